package gds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/stream"
)

// SaveConfig are the options of Save, SaveOn and SaveTensors; nil means their
// defaults. But for Progress they must be the same on all ranks.
type SaveConfig struct {
	// MaxFileBytes is how many bytes of tensors a file has at most, but for one that
	// has a single tensor. 0 is one file for all.
	MaxFileBytes int64
	// Metadata are texts about the file that its header has.
	Metadata map[string]string
	// Progress is as in LoadConfig, for bytes that were written.
	Progress func(done, total int64)
	// RoundBytes is as in LoadConfig.
	RoundBytes int
	// File is how the files are written; nil are the defaults.
	File *FileConfig
}

// Save writes the tensors that the ranks have together as a checkpoint: the file at
// path, which ends in .safetensors, or where they are more than MaxFileBytes several,
// NAME-00001-of-0000N.safetensors, and beside them an index,
// NAME.safetensors.index.json. weights has one for each local rank, as Load returned
// them; each byte is written once, by a rank that has it. What is on the group's
// streams by now comes before. It returns when everything is on the disk. Collective,
// in a folder that all processes see.
//
// The files take their places when all of them are whole and on the disk, one after
// the other, and the index last. Until then, and after an error or a crash before, the
// old ones are as they were. Who wants all of several or none saves in a new folder.
// Files of an older checkpoint that are not replaced stay there, but for an index of the
// same name when there is only one file: a folder would still be read by it.
func Save(ctx context.Context, g *comm.Group, path string, weights []*Weights, cfg *SaveConfig) error {
	w, err := worldOf(g)
	if err != nil {
		return fmt.Errorf("gds: save: %w", err)
	}
	return save(ctx, w, path, weights, cfg)
}

// SaveOn is Save for weights of LoadOn, in the order of s.
func SaveOn(ctx context.Context, s *stream.Stream, path string, weights *Weights, cfg *SaveConfig) error {
	return save(ctx, worldOn(s), path, []*Weights{weights}, cfg)
}

// A saving is a checkpoint that is being written.
type saving struct {
	*carrier
	cfg     SaveConfig
	out     *output
	tensors []*placed
}

func save(ctx context.Context, w *world, path string, weights []*Weights, cfg *SaveConfig) error {
	s := newSaving(w, path, cfg)
	return errors.Join(s.steps(ctx, s.begin(weights)), s.end())
}

func newSaving(w *world, path string, cfg *SaveConfig) *saving {
	s := &saving{carrier: &carrier{world: w, op: "save", path: path}}
	if cfg != nil {
		s.cfg = *cfg
	}
	return s
}

// begin is what this process does before it hears of the others.
func (s *saving) begin(weights []*Weights) error {
	err := s.prepare(weights)
	if err == nil && s.leads() {
		err = s.out.create()
		s.files = s.out.files
	}
	return err
}

// steps goes through what all processes do together, of which begin has ended with
// err in this one. Each step ends in a word of all of them, so that none goes on alone.
func (s *saving) steps(ctx context.Context, err error) error {
	if err := s.settle(ctx, err, s.fingerprint(s.tensors, s.cfg.RoundBytes)); err != nil {
		return err
	}
	if s.spread() {
		if err := s.join(ctx); err != nil {
			return err
		}
	}
	s.store(ctx)
	for _, f := range s.files {
		if !s.failed() {
			s.fail(f.Sync(ctx))
		}
	}
	if err := s.agree(ctx, s.op, s.path, s.named(s.errs()), 0); err != nil {
		return err
	}
	err = nil
	if s.leads() {
		err = s.out.commit(ctx)
	}
	return s.settle(ctx, err, 0)
}

// settle is agree for an error of the process.
func (s *saving) settle(ctx context.Context, err error, print uint64) error {
	errs := make([]error, len(s.world.locals))
	errs[0] = err
	return s.agree(ctx, s.op, s.path, errs, print)
}

// leads reports whether this process makes the files: that of rank 0.
func (s *saving) leads() bool { return s.world.locals[0].rank == 0 }

// prepare finds what is wrong, and says which byte goes where.
func (s *saving) prepare(weights []*Weights) error {
	if s.cfg.MaxFileBytes < 0 || s.cfg.RoundBytes < 0 {
		return fmt.Errorf("gds: save %s: files of %d bytes and rounds of %d: want 0 or more", s.path, s.cfg.MaxFileBytes, s.cfg.RoundBytes)
	}
	if s.cfg.RoundBytes == 0 {
		s.cfg.RoundBytes = defaultRound
	}
	if err := errors.Join(s.world.prepare(), s.check(weights)); err != nil {
		return fmt.Errorf("gds: save %s: %w", s.path, err)
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
	s.moved = progress(s.cfg.Progress, s.plan.bytes(s.world.locals))
	return s.open()
}

// check looks at the arguments.
func (s *saving) check(weights []*Weights) error {
	if !strings.HasSuffix(s.path, extension) {
		return fmt.Errorf("want a name that ends in %s", extension)
	}
	if len(weights) != len(s.world.locals) {
		return fmt.Errorf("%d weights for %d local ranks: give those that Load returned", len(weights), len(s.world.locals))
	}
	for i, l := range s.world.locals {
		w := weights[i]
		switch {
		case w == nil:
			return fmt.Errorf("there are no weights of rank %d", l.rank)
		case w.rank != l.rank || w.ranks != s.ranks:
			return fmt.Errorf("the weights of rank %d of %d are given for rank %d of %d", w.rank, w.ranks, l.rank, s.ranks)
		case !sameLoad(w, weights[0]):
			return fmt.Errorf("the weights of ranks %d and %d are of different loads", weights[0].rank, w.rank)
		}
		if err := w.slab.Check("weights", l.device()); err != nil {
			return err
		}
	}
	return nil
}

// sameLoad reports whether weights come from one call.
func sameLoad(a, b *Weights) bool {
	return len(a.order) == len(b.order) && (len(a.order) == 0 || &a.order[0] == &b.order[0])
}

// savedAs returns what the file says of a tensor. The ranks must have all of it.
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
	talk, cancel := parting(ctx)
	defer cancel()
	var temps []string
	for _, f := range s.files {
		temps = append(temps, f.fresh.temp)
	}
	err := comm.BroadcastValue(talk, s.group, 0, &temps, nil)
	for i := 0; err == nil && !s.leads() && i < len(temps); i++ {
		var f *File
		if f, err = OpenFile(temps[i], os.O_RDWR, s.cfg.File); err == nil {
			f.path = s.out.file(i) // for errors
			s.out.files = append(s.out.files, f)
		}
	}
	s.files = s.out.files
	return s.settle(ctx, err, 0)
}

// end closes what is open.
func (s *saving) end() error {
	return errors.Join(s.close(), s.out.close(), s.world.close())
}
