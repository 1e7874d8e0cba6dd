package gds

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
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

const extension = ".safetensors"

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
// So does who saves in another number of files than before: nothing removes the files
// that are not replaced, and an old index would still be what a folder is read by.
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
	shards  []safetensors.Shard
	starts  [][]byte // what each file begins with
	tensors []*placed
	temps   []string // the names of the files until they are committed
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
		err = s.create()
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
	if err := s.agree(ctx, s.op, s.path, s.named(s.errs(ctx)), 0); err != nil {
		return err
	}
	err = nil
	if s.leads() {
		err = s.commit(ctx)
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
	if s.shards, s.headers, s.starts, err = layFiles(s.path, infos, &s.cfg); err != nil {
		return err
	}
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

// layFiles divides tensors into files.
func layFiles(path string, infos []safetensors.Tensor, cfg *SaveConfig) (shards []safetensors.Shard, headers []*safetensors.Header, starts [][]byte, err error) {
	most := cfg.MaxFileBytes
	if most == 0 {
		most = math.MaxInt64
	}
	if shards, err = safetensors.Split(strings.TrimSuffix(filepath.Base(path), extension), infos, most); err != nil {
		return nil, nil, nil, fmt.Errorf("gds: save %s: %w", path, err)
	}
	for _, s := range shards {
		h, start, err := safetensors.NewHeader(s.Tensors, cfg.Metadata)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("gds: save %s: %w", path, err)
		}
		headers, starts = append(headers, h), append(starts, start)
	}
	return shards, headers, starts, nil
}

// create makes the files, with their headers and of their whole length.
func (s *saving) create() error {
	for i, shard := range s.shards {
		f, err := Create(filepath.Join(filepath.Dir(s.path), shard.File), s.cfg.File)
		if err != nil {
			return err
		}
		s.files = append(s.files, f)
		s.temps = append(s.temps, f.fresh.temp)
		if err := f.begin(s.starts[i], s.headers[i].Size); err != nil {
			return err
		}
	}
	return nil
}

// begin gives a new file its length, with the room for it, and writes its first bytes.
func (f *File) begin(start []byte, size int64) error {
	if err := f.reserve(size); err != nil {
		return err
	}
	if _, err := f.plain.WriteAt(start, 0); err != nil {
		return f.fail("write", errors.Unwrap(err))
	}
	if err := f.plain.Truncate(size); err != nil {
		return f.fail("extend", errors.Unwrap(err))
	}
	return nil
}

// join lets the other processes open the files that the first one made.
func (s *saving) join(ctx context.Context) error {
	talk, cancel := parting(ctx)
	defer cancel()
	err := comm.BroadcastValue(talk, s.group, 0, &s.temps, nil)
	for i := 0; err == nil && !s.leads() && i < len(s.temps); i++ {
		var f *File
		if f, err = OpenFile(s.temps[i], os.O_RDWR, s.cfg.File); err == nil {
			f.path = filepath.Join(filepath.Dir(s.path), s.shards[i].File) // for errors
			s.files = append(s.files, f)
		}
	}
	return s.settle(ctx, err, 0)
}

// commit lets the files take their places, and then the index.
func (s *saving) commit(ctx context.Context) error {
	for _, f := range s.files {
		if err := f.Commit(ctx); err != nil {
			return err
		}
	}
	if len(s.shards) == 1 {
		return nil
	}
	return writeIndex(ctx, s.path, s.shards, s.cfg.File)
}

// writeIndex writes the index of files beside them.
func writeIndex(ctx context.Context, path string, shards []safetensors.Shard, cfg *FileConfig) error {
	x, err := safetensors.NewIndex(shards)
	if err != nil {
		return fmt.Errorf("gds: save %s: %w", path, err)
	}
	f, err := Create(path+".index.json", cfg)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := x.Write(f.plain); err != nil {
		return f.fail("write", err)
	}
	return f.Commit(ctx)
}

// end closes what is open; files that were not committed are gone then.
func (s *saving) end() error {
	errs := []error{s.close()}
	for _, f := range s.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errors.Join(errs...), s.world.close())
}
