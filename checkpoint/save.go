package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/stream"
)

// SaveConfig are the options of Save, SaveOn and SaveTensors; nil means their defaults. They
// must be the same on all ranks, except Progress.
type SaveConfig struct {
	// MaxFileBytes is the most bytes of tensors in a file; a larger tensor gets a file for
	// itself. 0 is one file for all.
	MaxFileBytes int64
	// Metadata are the texts in the header of each file.
	Metadata map[string]string
	// Progress is as in LoadConfig, for written bytes.
	Progress func(done, total int64)
	// RoundBytes is as in LoadConfig.
	RoundBytes int
	// File are the options of the files; nil are their defaults.
	File *gds.FileConfig
}

// Save writes the tensors that the ranks have together as a checkpoint: the file at path,
// which ends in .safetensors. If the tensors have more than MaxFileBytes, Save writes several
// files, NAME-00001-of-0000N.safetensors, and an index, NAME.safetensors.index.json. weights
// has one Weights for each local rank, as Load returned them. Each byte is written once, by a
// rank that has it. Save comes after the work that is now on the group's streams, and returns
// when everything is on the disk. All processes must see the folder. Collective.
//
// When all files are complete and on the disk, they replace the old files one after the other,
// and the index last. Before that, and after an earlier error or crash, the old files are
// unchanged. To replace several files at once, save to a new folder. Other files of an older
// checkpoint stay. Only an index of the same name is removed if there is one file, because
// Open would read it first.
func Save(ctx context.Context, g *comm.Group, path string, weights []*Weights, cfg *SaveConfig) error {
	w, err := peersOf(g)
	if err != nil {
		return fmt.Errorf("checkpoint: save: %w", err)
	}
	return save(ctx, w, path, weights, cfg)
}

// SaveOn is Save for weights of LoadOn, in the order of s.
func SaveOn(ctx context.Context, s *stream.Stream, path string, weights *Weights, cfg *SaveConfig) error {
	return save(ctx, peersOn(s), path, []*Weights{weights}, cfg)
}

// A saving is a checkpoint that is being written.
type saving struct {
	*executor
	cfg     SaveConfig
	out     *output
	tensors []*placed
}

func save(ctx context.Context, w *peers, path string, weights []*Weights, cfg *SaveConfig) error {
	s := newSaving(w, path, cfg)
	return errors.Join(s.steps(ctx, s.begin(weights)), s.release())
}

func newSaving(w *peers, path string, cfg *SaveConfig) *saving {
	s := &saving{executor: &executor{peers: w, op: "save", path: path}}
	if cfg != nil {
		s.cfg = *cfg
	}
	return s
}

// begin does the work of this process before it hears from the others.
func (s *saving) begin(weights []*Weights) error {
	err := s.prepare(weights)
	if err == nil && s.isRoot() {
		err = s.out.create()
		s.files = s.out.files
	}
	return err
}

// steps does the work that all processes do together. err is the error of begin. All processes
// agree at the end of each step, so that none goes on alone.
func (s *saving) steps(ctx context.Context, err error) error {
	if err := s.agreeAlone(ctx, err, s.fingerprint(s.tensors, s.cfg.RoundBytes)); err != nil {
		return err
	}
	if s.remote() {
		if err := s.join(ctx); err != nil {
			return err
		}
	}
	s.store(ctx)
	for _, f := range s.files {
		if !s.failed() {
			s.setErrorOfAll(f.Sync(ctx))
		}
	}
	if err := s.agree(ctx, s.op, s.path, s.named(s.errs()), ""); err != nil {
		return err
	}
	err = nil
	if s.isRoot() {
		err = s.out.commit(ctx)
	}
	return s.agreeAlone(ctx, err, "")
}

// agreeAlone is agree for an error of the process, not of one of its ranks.
func (s *saving) agreeAlone(ctx context.Context, err error, plan string) error {
	errs := make([]error, len(s.peers.locals))
	errs[0] = err
	return s.agree(ctx, s.op, s.path, errs, plan)
}

// isRoot reports whether this process has rank 0, and so makes the files.
func (s *saving) isRoot() bool { return s.peers.locals[0].rank == 0 }

// prepare checks the arguments and makes the schedule.
func (s *saving) prepare(weights []*Weights) error {
	if s.cfg.MaxFileBytes < 0 || s.cfg.RoundBytes < 0 {
		return fmt.Errorf("checkpoint: save %s: files of %d bytes and rounds of %d: want 0 or more", s.path, s.cfg.MaxFileBytes, s.cfg.RoundBytes)
	}
	if s.cfg.RoundBytes == 0 {
		s.cfg.RoundBytes = defaultRound
	}
	if err := errors.Join(s.peers.prepare(), s.check(weights)); err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", s.path, err)
	}
	var infos []safetensors.Tensor
	byName := map[string]*placed{}
	for _, t := range weights[0].order {
		info, err := t.savedAs(s.ranks)
		if err != nil {
			return &TensorError{Op: "save", Path: s.path, Tensor: t.info.Name, Offset: -1, Err: err}
		}
		infos = append(infos, info)
		byName[info.Name] = t
	}
	var err error
	if s.out, err = newOutput(s.path, infos, &s.cfg); err != nil {
		return err
	}
	s.headers = s.out.headers
	for i, h := range s.headers {
		for j := range h.Tensors {
			t := *byName[h.Tensors[j].Name]
			t.info.DType, t.from = t.to, t.to.Size()
			t.file, t.off = i, h.Tensors[j].Begin
			s.tensors = append(s.tensors, &t)
		}
	}
	for _, w := range weights {
		s.slabs = append(s.slabs, w.slab)
	}
	s.plan = newSchedule(s.tensors, s.ranks, s.cfg.RoundBytes, false)
	s.moved = progress(s.cfg.Progress, s.plan.bytes(s.peers.locals))
	return s.open()
}

// check validates the arguments.
func (s *saving) check(weights []*Weights) error {
	if !strings.HasSuffix(s.path, extension) {
		return fmt.Errorf("want a name that ends in %s", extension)
	}
	if len(weights) != len(s.peers.locals) {
		return fmt.Errorf("%d weights for %d local ranks: give those that Load returned", len(weights), len(s.peers.locals))
	}
	for i, l := range s.peers.locals {
		w := weights[i]
		switch {
		case w == nil:
			return fmt.Errorf("there are no weights of rank %d", l.rank)
		case w.rank != l.rank || w.ranks != s.ranks:
			return fmt.Errorf("the weights of rank %d of %d are given for rank %d of %d", w.rank, w.ranks, l.rank, s.ranks)
		case !sameLoad(w, weights[0]):
			return fmt.Errorf("the weights of ranks %d and %d are of different loads", weights[0].rank, w.rank)
		}
		if err := strided.Check("weights", w.slab, l.device()); err != nil {
			return err
		}
	}
	return nil
}

// sameLoad reports whether weights come from one call.
func sameLoad(a, b *Weights) bool {
	return len(a.order) == len(b.order) && (len(a.order) == 0 || &a.order[0] == &b.order[0])
}

// savedAs returns the file's description of a tensor. The ranks must have all its elements.
func (t *placed) savedAs(ranks int) (safetensors.Tensor, error) {
	format, ok := formatOf(t.to)
	if !ok {
		return safetensors.Tensor{}, fmt.Errorf("the format has no type %s: %w", t.to, errors.ErrUnsupported)
	}
	if missing, is := t.cut.gap(); is {
		return safetensors.Tensor{}, fmt.Errorf("no rank has index %d of dimension %d: it cannot be saved", missing, t.cut.dim)
	}
	return safetensors.Tensor{Name: t.info.Name, DType: format, Shape: t.info.Shape}, nil
}

// join lets the other processes open the files that the first one made.
func (s *saving) join(ctx context.Context) error {
	long, cancel := messageContext(ctx)
	defer cancel()
	var temps []string
	for _, f := range s.files {
		temps = append(temps, files.Of(f).Temp())
	}
	err := comm.BroadcastValue(long, s.group, 0, &temps, nil)
	for i := 0; err == nil && !s.isRoot() && i < len(temps); i++ {
		var f *gds.File
		if f, err = gds.OpenFile(temps[i], os.O_RDWR, s.cfg.File); err == nil {
			files.Of(f).Rename(s.out.file(i))
			s.out.files = append(s.out.files, f)
		}
	}
	s.files = s.out.files
	return s.agreeAlone(ctx, err, "")
}

// release closes the files and frees the memory and streams of prepare.
func (s *saving) release() error {
	return errors.Join(s.close(), s.out.close(), s.peers.close())
}
