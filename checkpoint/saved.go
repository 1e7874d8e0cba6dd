package checkpoint

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/safe"
)

// A Saved is a checkpoint that a Saver wrote. Several goroutines may use it.
type Saved struct {
	folder string
	m      *manifest
	files  *Checkpoint
	byFile map[string]*safetensors.Header // by name
}

// OpenSaved opens the checkpoint in a folder such as step-00000100, and checks
// that its files have the tensors that the manifest names. If the name of the
// folder is the name of a step, the manifest must have the same step. OpenSaved
// does not read the tensors; Verify compares their digests.
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

// Tensors describes the tensors, each as a whole, by name, where File is the
// file of the first part.
func (s *Saved) Tensors() []Info {
	all := make([]Info, 0, len(s.m.Tensors))
	for i := range s.m.Tensors {
		t := &s.m.Tensors[i]
		format, _ := safetensors.ParseDType(t.DType) // checked when it was read
		all = append(all, Info{Name: t.Name, DType: dtypes[format], Format: format, Shape: slices.Clone(t.Shape), File: filepath.Join(s.folder, s.m.Files[t.Parts[0].File].Name)})
	}
	return all
}

// Value decodes the JSON value that a rank saved. If the checkpoint has fewer ranks, it is an
// error; Ranks says how many there are.
func (s *Saved) Value(rank int, v any) error {
	if err := s.given("value"); err != nil {
		return err
	}
	if rank < 0 || rank >= len(s.m.Values) || len(s.m.Values[rank]) == 0 || string(s.m.Values[rank]) == "null" {
		return fmt.Errorf("checkpoint: value of rank %d in %s: the rank saved none", rank, s.folder)
	}
	if err := json.Unmarshal(s.m.Values[rank], v); err != nil {
		return fmt.Errorf("checkpoint: value of rank %d in %s: %w", rank, s.folder, err)
	}
	return nil
}

// given returns an error if s is no checkpoint of OpenSaved.
func (s *Saved) given(op string) error {
	if s == nil || s.m == nil {
		return fmt.Errorf("checkpoint: %s: no saved checkpoint given", op)
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

// Verify compares all bytes with the digests that the save computed, in
// parallel and with at most 128 MiB of memory. The error joins a *TensorError
// for each damaged block, up to 20, which names the file, the tensor, and the
// offset in the file where the block, of at most 16 MiB, begins.
func (s *Saved) Verify(ctx context.Context) error {
	if err := s.given("verify"); err != nil {
		return err
	}
	return s.verifyShare(ctx, 0, 1)
}

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
	return errors.Join(ended(ctx, "verify "+s.folder, err), joinDamages(damaged))
}

// mostDamages is how many damaged blocks an error names.
const mostDamages = 20

// joinDamages joins errors in file order.
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

// Latest opens the newest complete checkpoint in a folder that a Saver used.
// The ranks verify all digests together, and agree on the result: if one of
// them cannot read a checkpoint, all use the one before it, and skipped says
// why. If there is no checkpoint, saved is nil without an error. Collective.
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
		if err := s.Close(); err != nil {
			return nil, skipped, fmt.Errorf("checkpoint: latest in %s: %w", folder, err)
		}
	}
	return nil, skipped, nil
}

// An inspection is what a rank says about a checkpoint.
type inspection struct {
	ID    string
	Ended bool // the rank's ctx: all ranks return then, because this one makes no further attempt
}

// tryOpen opens a checkpoint and verifies the share of this process. It returns the first reason
// of a rank not to use the checkpoint. err means that the ranks cannot agree, or that the ctx of a rank has ended.
func tryOpen(ctx context.Context, w *peers, path string) (s *Saved, reason string, err error) {
	errs, mine := make([]error, len(w.locals)), inspection{}
	if s, errs[0] = OpenSaved(path); s != nil {
		mine.ID = s.m.ID
		for i, l := range w.locals {
			errs[i] = s.verifyShare(ctx, l.rank, w.ranks)
		}
	}
	if ctx.Err() != nil {
		mine.Ended = true
		fillWith(errs, context.Cause(ctx))
	}
	err = agree(ctx, w, "compare the checkpoint", slices.Repeat([]inspection{mine}, len(errs)), errs, func(all []collective.Said[inspection]) error {
		for rank, x := range all {
			if x.Value.Ended {
				return errorOf(w, rank, x.Failed, errs)
			}
		}
		for rank, x := range all {
			switch {
			case x.Failed != "" && w.remote():
				reason = fmt.Sprintf("rank %d: %s", rank, x.Failed)
			case x.Failed != "":
				reason = x.Failed
			case x.Value.ID != all[0].Value.ID:
				reason = fmt.Sprintf("rank %d sees another checkpoint of this step than rank 0", rank)
			}
			if reason != "" {
				return errors.New(reason)
			}
		}
		return nil
	})
	if reason != "" {
		return s, reason, nil
	}
	return s, "", err
}

// fillWith sets all errors to err.
func fillWith(errs []error, err error) {
	for i := range errs {
		errs[i] = err
	}
}

// errorOf returns the error of a rank that gives the text why: the error itself, if the rank is in this process.
func errorOf(w *peers, rank int, why string, errs []error) error {
	for i, l := range w.locals {
		if l.rank == rank {
			return errs[i]
		}
	}
	return fmt.Errorf("rank %d: %s", rank, why)
}

// agreedSteps returns the steps that the first process sees.
func agreedSteps(ctx context.Context, w *peers, folder string) (steps []int64, err error) {
	mine, errs := make([][]int64, len(w.locals)), make([]error, len(w.locals))
	if w.locals[0].rank == 0 {
		if mine[0], errs[0] = stepsIn(folder); errors.Is(errs[0], os.ErrNotExist) {
			errs[0] = nil
		}
	}
	if ctx.Err() != nil {
		fillWith(errs, context.Cause(ctx))
	}
	err = agree(ctx, w, "list the checkpoints", mine, errs, func(all []collective.Said[[]int64]) error {
		for rank, x := range all {
			if x.Failed != "" {
				return errorOf(w, rank, x.Failed, errs)
			}
		}
		steps = all[0].Value
		return nil
	})
	return steps, err
}

// List returns the folders of the checkpoints in a folder that a Saver used,
// the oldest first. A checkpoint whose replacement was interrupted on a file
// system such as NFS has a folder such as .saving-step-00000100-replaced. List
// does not check that they are complete, which OpenSaved does.
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

const (
	manifestName    = "manifest.json"
	manifestVersion = 1
	manifestLimit   = 1 << 30 // bytes that a reader accepts
)

// A manifest describes a checkpoint of a training state. It is the last file that a save writes.
type manifest struct {
	Version int               `json:"version"`
	ID      string            `json:"id"` // of the save
	Step    int64             `json:"step"`
	Fence   *fence            `json:"fence,omitempty"` // of the job that saved it; nil without one, and in older checkpoints
	Ranks   int               `json:"ranks"`
	Block   int64             `json:"block"`  // bytes of a part that have a digest
	Values  []json.RawMessage `json:"values"` // by rank; null if it gave none
	Files   []savedFile       `json:"files"`
	Tensors []savedTensor     `json:"tensors"`         // by name
	Index   string            `json:"index,omitempty"` // SHA-256 of the index for Hugging Face's readers
}

type savedFile struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"` // of the header; the tensors have their own

	rank int // that writes it
}

type savedTensor struct {
	Name  string      `json:"name"`
	DType string      `json:"dtype"`
	Shape []int       `json:"shape"`
	Rows  int         `json:"rows"` // the tensor seen as a matrix, which the parts cut by columns
	Width int         `json:"width"`
	Parts []savedPart `json:"parts"` // by Start
}

type savedPart struct {
	File   int      `json:"file"`
	Key    string   `json:"key"` // the tensor in the file
	Start  int      `json:"start"`
	Len    int      `json:"len"`
	SHA256 string   `json:"sha256"`           // of the bytes; of Blocks if the part has several
	Blocks []string `json:"blocks,omitempty"` // SHA-256 of each Block bytes

	rank   int      // that writes it
	stored []int    // its shape in the file
	info   partInfo // as the rank has it
}

// check sorts the parts and checks that they cover the tensor once.
func (t *savedTensor) check() error {
	slices.SortFunc(t.Parts, func(a, b savedPart) int { return cmp.Compare(a.Start, b.Start) })
	at := 0
	for _, p := range t.Parts {
		switch {
		case p.Start > at:
			return fmt.Errorf("tensor %q: no rank has elements %d to %d of its rows of %d", t.Name, at, p.Start, t.Width)
		case p.Start < at || p.Len < 0 || p.Len > t.Width-p.Start:
			return fmt.Errorf("tensor %q: two parts have element %d of its rows of %d, or a part ends behind them", t.Name, p.Start, t.Width)
		}
		at += p.Len
	}
	if at != t.Width || len(t.Parts) == 0 {
		return fmt.Errorf("tensor %q: no rank has elements %d to %d of its rows of %d", t.Name, at, t.Width, t.Width)
	}
	return nil
}

// sealed is the content of the file: the manifest with its digest.
type sealed struct {
	SHA256   string          `json:"sha256"` // of the bytes of Manifest
	Manifest json.RawMessage `json:"manifest"`
}

// write writes the manifest to a folder. If all tensors are whole, it first writes the index that
// Hugging Face's readers want.
func (m *manifest) write(fs fileSystem, folder string) error {
	index, err := m.index()
	if err == nil && index != nil {
		m.Index = digest(index)
		err = writeWhole(fs, filepath.Join(folder, indexName), index)
	}
	if err != nil {
		return err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if text, err = json.Marshal(sealed{digest(text), text}); err != nil {
		return err
	}
	return writeWhole(fs, filepath.Join(folder, manifestName), text)
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// readManifest reads and checks the manifest of a folder, whose path its error
// names.
func readManifest(folder string) (*manifest, error) {
	path := filepath.Join(folder, manifestName)
	text, err := readIn(folder, manifestName)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: read %s: %w", path, err)
	}
	m, err := decodeManifest(text)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: read %s: %w", path, err)
	}
	return m, nil
}

// readIn reads a file in the folder of a Saver.
func readIn(folder, name string) ([]byte, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return safe.ReadIn(root, name, manifestLimit)
}

func decodeManifest(text []byte) (*manifest, error) {
	var s sealed
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("it is not a manifest: %w", err)
	}
	if got := digest(s.Manifest); got != s.SHA256 {
		return nil, fmt.Errorf("SHA-256 of the manifest is %s, and it says %q: the file was damaged", got, s.SHA256)
	}
	if err := checkDensity(s.Manifest); err != nil {
		return nil, err
	}
	m := new(manifest)
	if err := json.Unmarshal(s.Manifest, m); err != nil {
		return nil, fmt.Errorf("it is not a manifest: %w", err)
	}
	return m, m.check()
}

// Limits of a manifest. An empty object would take 100 times its size in memory. A tensor, a part or a file has a digest or several
// fields; values are data of the program.
const (
	fewObjects    = 4096 // of any size
	bytesOfObject = 64   // of further ones, on average
	mostOfValues  = 1 << 20
)

// checkDensity returns an error if a manifest has much less text than it would take memory.
func checkDensity(text []byte) error {
	objects, values, depth, inValues := 0, 0, 0, false
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			begin := i + 1
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
			if depth == 1 {
				inValues = strings.EqualFold(string(text[begin:min(i, len(text))]), "values")
			}
		case '{', '[':
			if depth++; text[i] == '{' && !inValues {
				objects++
			}
		case '}', ']':
			depth--
		case ',':
			if inValues && depth == 2 {
				values++
			}
		}
	}
	if objects > fewObjects+len(text)/bytesOfObject || values > mostOfValues {
		return fmt.Errorf("it has %d objects and values of more than %d ranks in %d bytes: it is not a manifest of a checkpoint", objects, values, len(text))
	}
	return nil
}

// check checks what a manifest says about itself.
func (m *manifest) check() error {
	if m.Version != manifestVersion {
		return fmt.Errorf("it has version %d: this library reads version %d", m.Version, manifestVersion)
	}
	if m.Ranks < 1 || len(m.Values) > m.Ranks || len(m.Files) == 0 || m.Step < 0 {
		return errors.New("it has no files or no ranks, a negative step, or more values than ranks")
	}
	for _, f := range m.Files {
		if f.Name != filepath.Base(f.Name) || !filepath.IsLocal(f.Name) {
			return fmt.Errorf("file %q is outside of the folder", f.Name)
		}
		if strings.ContainsFunc(f.Name, unicode.IsControl) { // an error that names the file would have several lines
			return fmt.Errorf("the name of file %q has control characters", f.Name)
		}
	}
	for i := range m.Tensors {
		if err := m.Tensors[i].checkRead(len(m.Files)); err != nil {
			return err
		}
	}
	return nil
}

func (t *savedTensor) checkRead(files int) error {
	format, err := safetensors.ParseDType(t.DType)
	if err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	for _, d := range t.Shape {
		if d < 0 {
			return fmt.Errorf("tensor %q has shape %v", t.Name, t.Shape)
		}
	}
	if !fits(t.Shape, max(format.Bits()/8, 1)) {
		return fmt.Errorf("tensor %q of shape %v is larger than any memory", t.Name, t.Shape)
	}
	n := int64(product(t.Shape))
	if t.Rows < 0 || t.Width < 0 || n > 0 && (t.Rows == 0 || int64(t.Width) != n/int64(t.Rows) || n%int64(t.Rows) != 0) || n == 0 && t.Rows != 0 && t.Width != 0 {
		return fmt.Errorf("tensor %q of shape %v is not %d rows of %d", t.Name, t.Shape, t.Rows, t.Width)
	}
	for _, p := range t.Parts {
		if p.File < 0 || p.File >= files {
			return fmt.Errorf("tensor %q is in file %d of %d", t.Name, p.File, files)
		}
	}
	return t.check()
}

// blockBytes is how many bytes of a stored part have a digest, so that an error names the damaged
// block of a large tensor. Tests change it.
var blockBytes = int64(16 << 20)

// seal notes the digests of the part's blocks, and returns false if there are
// none.
func (p *savedPart) seal(blocks []string) bool {
	switch len(blocks) {
	case 0:
		return false
	case 1:
		p.SHA256, p.Blocks = blocks[0], nil
	default:
		p.SHA256, p.Blocks = digestOf(blocks), blocks
	}
	return true
}

// digestOf returns the digest of digests.
func digestOf(blocks []string) string { return digest([]byte(strings.Join(blocks, ""))) }

// checkBlocks checks that a part of so many bytes has a digest for each block.
func (p *savedPart) checkBlocks(bytes, block int64) error {
	switch {
	case len(p.Blocks) == 0:
		return nil
	case block <= 0 || int64(len(p.Blocks)) != (bytes+block-1)/block:
		return fmt.Errorf("tensor %q of %d bytes has digests of %d blocks of %d bytes", p.Key, bytes, len(p.Blocks), block)
	case digestOf(p.Blocks) != p.SHA256:
		return fmt.Errorf("tensor %q: the digests of its blocks do not have the digest %s", p.Key, p.SHA256)
	}
	return nil
}

// A savedBlock is the bytes of a file that have a digest.
type savedBlock struct {
	key        string
	file       int
	begin, end int64
	want       string
}

// blocks returns all blocks of all parts.
func (s *Saved) blocks() []savedBlock {
	var all []savedBlock
	for i := range s.m.Tensors {
		for j := range s.m.Tensors[i].Parts {
			p := &s.m.Tensors[i].Parts[j]
			at := s.files.where[p.Key]
			t := &s.files.headers[at.file].Tensors[at.tensor]
			b := savedBlock{p.Key, at.file, t.Begin, t.End, p.SHA256}
			if len(p.Blocks) == 0 {
				all = append(all, b)
			}
			for k, want := range p.Blocks {
				b.begin, b.want = t.Begin+int64(k)*s.m.Block, want
				b.end = min(b.begin+s.m.Block, t.End)
				all = append(all, b)
			}
		}
	}
	return all
}

// verifyBlock compares a block with its digest, and returns a nil damage if
// they are equal.
func (s *Saved) verifyBlock(ctx context.Context, b savedBlock) (damage *TensorError, err error) {
	f, h := s.files.files[b.file], sha256.New()
	tensor := s.files.begin(b.key)
	if err := s.files.hashRun(ctx, h, make([]byte, min(verifyChunk, b.end-b.begin)), b.key, b.begin-tensor, b.end-tensor); err != nil {
		return nil, &TensorError{Op: "verify", Path: f.Path(), Tensor: b.key, Offset: b.begin, Err: err}
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != b.want {
		return &TensorError{Op: "verify", Path: f.Path(), Tensor: b.key, Offset: b.begin,
			Err: fmt.Errorf("SHA-256 of %d bytes is %s, and %s when they were saved: the file was damaged", b.end-b.begin, got, b.want)}, nil
	}
	return nil, nil
}
