package checkpoint

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
)

// A Saved is a checkpoint that a Saver wrote. Several goroutines may use it.
type Saved struct {
	folder string
	m      *manifest
	files  *Checkpoint
	byFile map[string]*safetensors.Header // by name
}

// OpenSaved opens the checkpoint in a folder such as step-00000100, and checks that its files
// have the tensors that the manifest names. If the name of the folder is the name of a step, the
// manifest must have the same step. Verify compares the digests.
func OpenSaved(folder string) (*Saved, error) { return openSaved(folder, nil) }

func openSaved(folder string, cfg *gds.FileConfig) (*Saved, error) {
	m, err := readManifest(folder)
	if err != nil {
		return nil, err
	}
	if step, ok := stepOf(filepath.Base(folder)); ok && step != m.Step {
		return nil, fmt.Errorf("checkpoint: open %s: its manifest says step %d, and the folder has the name of step %d: it is a copy of another checkpoint, so rename it to %s", folder, m.Step, step, stepName(m.Step))
	}
	s := &Saved{folder: folder, m: m, byFile: map[string]*safetensors.Header{}}
	var names []string
	for _, f := range m.Files {
		names = append(names, f.Name)
	}
	if s.files, err = openIn(folder, names, cfg); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, errors.Join(fmt.Errorf("checkpoint: open %s: %w", folder, err), s.Close())
	}
	return s, nil
}

// check compares the manifest with the headers of the files.
func (s *Saved) check() error {
	for i, f := range s.m.Files {
		if got := s.files.headers[i].Size; got != f.Bytes {
			return fmt.Errorf("file %s has %d bytes: want %d", f.Name, got, f.Bytes)
		}
	}
	for _, t := range s.m.Tensors {
		for _, p := range t.Parts {
			at, ok := s.files.where[p.Key]
			if !ok || at.file != p.File {
				return fmt.Errorf("file %s has no tensor %q", s.m.Files[p.File].Name, p.Key)
			}
			h := &s.files.headers[at.file].Tensors[at.tensor]
			if h.DType.String() != t.DType || product(h.Shape) != t.Rows*p.Len {
				return fmt.Errorf("file %s: tensor %q is %s %v: want %d elements of %s", s.m.Files[p.File].Name, p.Key, h.DType, h.Shape, t.Rows*p.Len, t.DType)
			}
			if err := p.checkBlocks(h.Bytes(), s.m.Block); err != nil {
				return fmt.Errorf("file %s: %w", s.m.Files[p.File].Name, err)
			}
		}
	}
	return nil
}

// Folder returns the path of the checkpoint.
func (s *Saved) Folder() string { return s.folder }

// Step returns the step of the checkpoint.
func (s *Saved) Step() int64 { return s.m.Step }

// Ranks returns how many ranks saved it.
func (s *Saved) Ranks() int { return s.m.Ranks }

// Bytes returns the size of the tensors.
func (s *Saved) Bytes() int64 { return s.files.Bytes() }

// Files returns how many safetensors files it has.
func (s *Saved) Files() int { return len(s.m.Files) }

// Tensors describes the tensors, each as a whole, by name. File is the file of the first part.
func (s *Saved) Tensors() []Info {
	all := make([]Info, 0, len(s.m.Tensors))
	for i := range s.m.Tensors {
		t := &s.m.Tensors[i]
		format, _ := safetensors.ParseDType(t.DType) // checked when it was read
		all = append(all, Info{Name: t.Name, DType: dtypeOf(format), Format: format, Shape: slices.Clone(t.Shape), File: filepath.Join(s.folder, s.m.Files[t.Parts[0].File].Name)})
	}
	return all
}

// Value decodes the JSON value that a rank saved. If the checkpoint has fewer ranks, it is an
// error; Ranks says how many there are.
func (s *Saved) Value(rank int, v any) error {
	if rank < 0 || rank >= len(s.m.Values) || len(s.m.Values[rank]) == 0 || string(s.m.Values[rank]) == "null" {
		return fmt.Errorf("checkpoint: value of rank %d in %s: the rank saved none", rank, s.folder)
	}
	if err := json.Unmarshal(s.m.Values[rank], v); err != nil {
		return fmt.Errorf("checkpoint: value of rank %d in %s: %w", rank, s.folder, err)
	}
	return nil
}

// Close closes the files. It is idempotent and safe on nil.
func (s *Saved) Close() error {
	if s == nil {
		return nil
	}
	return s.files.Close()
}

// Verify compares all bytes with the digests that the save computed, in parallel and with at most
// 128 MiB of memory. The error joins a *TensorError for each damaged block, up to 20. Each names
// the file, the tensor, and the offset in the file where the block begins. A block has at most
// 16 MiB.
func (s *Saved) Verify(ctx context.Context) error { return s.verifyShare(ctx, 0, 1) }

// verifyShare verifies each block whose number has the remainder rank.
func (s *Saved) verifyShare(ctx context.Context, rank, ranks int) error {
	if rank == 0 {
		if err := s.verifyStarts(); err != nil {
			return err
		}
	}
	var mine []savedBlock
	for i, b := range s.blocks() {
		if i%ranks == rank {
			mine = append(mine, b)
		}
	}
	var mu sync.Mutex
	var damaged []*TensorError
	err := each(ctx, mine, func(ctx context.Context, b savedBlock) error {
		damage, err := s.verifyBlock(ctx, b)
		if damage != nil {
			mu.Lock()
			defer mu.Unlock()
			damaged = append(damaged, damage)
		}
		return err
	})
	return errors.Join(err, joinDamages(damaged))
}

// mostDamages is how many damaged blocks an error names.
const mostDamages = 20

// joinDamages joins errors in the order of the files.
func joinDamages(damaged []*TensorError) error {
	slices.SortFunc(damaged, func(a, b *TensorError) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Offset, b.Offset))
	})
	var errs []error
	for _, e := range damaged[:min(len(damaged), mostDamages)] {
		errs = append(errs, e)
	}
	if more := len(damaged) - mostDamages; more > 0 {
		errs = append(errs, fmt.Errorf("checkpoint: verify: %d more blocks are damaged", more))
	}
	return errors.Join(errs...)
}

// verifyStarts verifies the headers of the files, and the index.
func (s *Saved) verifyStarts() error {
	for i, f := range s.m.Files {
		path := s.files.files[i].Path()
		start := make([]byte, f.Bytes-s.dataBytes(i))
		if _, err := (hostReader{s.files.files[i]}).ReadAt(start, 0); err != nil {
			return err
		}
		if got := digest(start); got != f.SHA256 {
			return &TensorError{Op: "verify", Path: path, Tensor: "(header)", Offset: 0, Err: fmt.Errorf("SHA-256 is %s, and %s when it was saved: the file was damaged", got, f.SHA256)}
		}
	}
	if s.m.Index == "" {
		return nil
	}
	path := filepath.Join(s.folder, indexName)
	text, err := readIn(s.folder, indexName)
	if err != nil {
		return fmt.Errorf("checkpoint: verify %s: %w", path, err)
	}
	if got := digest(text); got != s.m.Index {
		return fmt.Errorf("checkpoint: verify %s: SHA-256 is %s, and %s when it was saved: the file was damaged", path, got, s.m.Index)
	}
	return nil
}

func (s *Saved) dataBytes(file int) (n int64) {
	for i := range s.files.headers[file].Tensors {
		n += s.files.headers[file].Tensors[i].Bytes()
	}
	return n
}

// A Skipped is a folder that Latest did not use.
type Skipped struct {
	Folder string
	Reason string
}

// Latest opens the newest complete checkpoint in a folder that a Saver used. The ranks verify
// all digests together, and agree on the result: if one of them cannot read a checkpoint, all
// use the one before it. skipped says why. If there is no checkpoint, saved is nil without an
// error. Collective.
func Latest(ctx context.Context, g *comm.Group, folder string) (saved *Saved, skipped []Skipped, err error) {
	w, err := peersOf(g)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint: latest: %w", err)
	}
	steps, err := agreedSteps(ctx, w, folder)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint: latest in %s: %w", folder, err)
	}
	for _, step := range slices.Backward(steps) {
		path := folderOf(folder, step)
		s, reason, err := tryOpen(ctx, w, path)
		if err != nil {
			return nil, skipped, errors.Join(fmt.Errorf("checkpoint: latest in %s: %w", folder, err), s.Close())
		}
		if reason == "" {
			return s, skipped, nil
		}
		skipped = append(skipped, Skipped{path, reason})
		if err := errors.Join(s.Close(), ctx.Err()); err != nil {
			return nil, skipped, err
		}
	}
	return nil, skipped, nil
}

// tryOpen opens a checkpoint and verifies the share of this process. It returns the first reason
// of a rank not to use the checkpoint. err means that the ranks cannot agree.
func tryOpen(ctx context.Context, w *peers, path string) (s *Saved, reason string, err error) {
	errs, id := make([]error, len(w.locals)), ""
	if s, errs[0] = OpenSaved(path); s != nil {
		id = s.m.ID
		for i, l := range w.locals {
			errs[i] = s.verifyShare(ctx, l.rank, w.ranks)
		}
	}
	all, err := w.exchange(ctx, errs, id)
	for rank, x := range all {
		switch {
		case x.Reason != "" && w.remote():
			return s, fmt.Sprintf("rank %d: %s", rank, x.Reason), err
		case x.Reason != "":
			return s, x.Reason, err
		case x.Plan != all[0].Plan:
			return s, fmt.Sprintf("rank %d sees another checkpoint of this step than rank 0", rank), err
		}
	}
	return s, "", err
}

// agreedSteps returns the steps that the first process sees.
func agreedSteps(ctx context.Context, w *peers, folder string) ([]int64, error) {
	type listing struct {
		Steps  []int64
		Reason string
	}
	var l listing
	var err error
	if w.locals[0].rank == 0 {
		if l.Steps, err = stepsIn(folder); errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		if err != nil {
			l.Reason = err.Error()
		}
	}
	if w.remote() {
		long, cancel := messageContext(ctx)
		defer cancel()
		if err := comm.BroadcastValue(long, w.group, 0, &l, nil); err != nil {
			return nil, err
		}
	}
	if l.Reason != "" {
		return nil, errors.New(l.Reason)
	}
	return l.Steps, nil
}

// List returns the folders of the checkpoints in a folder that a Saver used, the oldest first. A checkpoint
// whose replacement was interrupted on a file system such as NFS has a folder such as
// .saving-step-00000100-replaced.
// OpenSaved says which are complete.
func List(folder string) ([]string, error) {
	steps, err := stepsIn(folder)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: list %s: %w", folder, err)
	}
	var all []string
	for _, s := range steps {
		all = append(all, folderOf(folder, s))
	}
	return all, nil
}
