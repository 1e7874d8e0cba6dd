package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// LoadConfig are the options of Load and LoadOn; nil means their defaults. They must be the
// same on all ranks, except Progress.
type LoadConfig struct {
	// Plan says which rank gets which part of each tensor. nil is Replicate for all tensors.
	Plan Plan
	// DType returns the type of a tensor's elements in memory. If it is nil, or returns
	// Invalid, the type is the type in the file. The device converts values as tensor.Copy does.
	DType func(t Info) memory.DType
	// Progress is called as bytes arrive for the ranks of this process, by one goroutine at a
	// time, with the bytes so far and the total. It should be short.
	Progress func(done, total int64)
	// RoundBytes is how much a rank reads before it exchanges with the others. 0 is 256 MiB.
	// The least is one row of a tensor that is cut along another dimension than the first. If
	// a rank needs staging buffers, it has two, and each holds RoundBytes and the other ranks'
	// parts of the rows that it cuts.
	RoundBytes int
}

const defaultRound = 256 << 20

// Load brings the checkpoint to the devices of the group: each rank gets the part of every
// tensor that the plan gives it. The result has one Weights for each local rank. Load returns
// when all bytes have arrived. All ranks open the same files. Collective.
//
// One rank reads each byte of the files, once, in few large reads. Tensors for several ranks,
// and tensors that are cut along another dimension than the first, go from device to device
// over the group.
//
// After an error no memory is left. If a rank fails, for example because it cannot read its
// part, all ranks return a *RankError that names it. Ranks compare their files, plans and
// options before they read, and return an error if these differ.
func (c *Checkpoint) Load(ctx context.Context, g *comm.Group, cfg *LoadConfig) ([]*Weights, error) {
	w, err := peersOf(g)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: load: %w", err)
	}
	return c.load(ctx, w, cfg)
}

// LoadOn brings the checkpoint to the device of s, in the order of s, without a group.
func (c *Checkpoint) LoadOn(ctx context.Context, s *stream.Stream, cfg *LoadConfig) (*Weights, error) {
	all, err := c.load(ctx, peersOn(s), cfg)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

func (c *Checkpoint) load(ctx context.Context, w *peers, cfg *LoadConfig) ([]*Weights, error) {
	var lc LoadConfig
	if cfg != nil {
		lc = *cfg
	}
	return c.loadPlaced(ctx, w, &lc, func() ([]*placed, error) { return c.place(&lc, w) })
}

// loadPlaced loads the tensors that place returns.
func (c *Checkpoint) loadPlaced(ctx context.Context, w *peers, lc *LoadConfig, place func() ([]*placed, error)) (all []*Weights, err error) {
	defer func() {
		if err = errors.Join(err, w.close()); err != nil {
			err = errors.Join(err, closeAll(all))
			all = nil
		}
	}()
	m := &executor{peers: w, op: "load", path: c.path(), files: c.files, headers: c.headers}
	tensors, err := place()
	if err == nil {
		all, err = c.allocate(m, tensors, lc)
	}
	if err != nil { // the ranks need memory to exchange the error
		err = errors.Join(err, m.close(), closeAll(all))
		m.locals, all = nil, nil
	}
	errs := make([]error, len(w.locals))
	errs[0] = err
	if err := w.agree(ctx, m.op, m.path, errs, w.fingerprint(tensors, lc.RoundBytes)); err != nil {
		return all, errors.Join(err, m.close())
	}
	m.fillScattered(ctx, c, all, tensors)
	m.load(ctx)
	err = m.close()
	m.setErrorOfAll(err)
	if m.failed() || m.remoteFailed {
		return all, w.agree(ctx, m.op, m.path, m.named(m.errs()), "")
	}
	return all, nil
}

func closeAll[C io.Closer](all []C) error {
	var errs []error
	for _, c := range all {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// path is the path in errors about the whole checkpoint.
func (c *Checkpoint) path() string {
	if len(c.files) == 1 {
		return c.files[0].Path()
	}
	return fmt.Sprintf("%s (%d files)", filepath.Dir(c.files[0].Path()), len(c.files))
}

// place returns the places of all tensors that some rank gets.
func (c *Checkpoint) place(cfg *LoadConfig, w *peers) ([]*placed, error) {
	if err := w.prepare(); err != nil {
		return nil, fmt.Errorf("checkpoint: load: %w", err)
	}
	if cfg.RoundBytes < 0 {
		return nil, fmt.Errorf("checkpoint: load: rounds of %d bytes: want 0 or more", cfg.RoundBytes)
	}
	if cfg.RoundBytes == 0 {
		cfg.RoundBytes = defaultRound
	}
	var tensors []*placed
	for _, info := range c.infos {
		p := Replicate()
		if cfg.Plan != nil {
			p = cfg.Plan(info)
		}
		if p.skip {
			continue
		}
		t, err := c.placeOne(info, p, cfg, w.ranks)
		if err != nil {
			return nil, &TensorError{Op: "load", Path: info.File, Tensor: info.Name, Offset: -1, Err: err}
		}
		tensors = append(tensors, t)
	}
	return tensors, nil
}

func (c *Checkpoint) placeOne(info Info, p Placement, cfg *LoadConfig, ranks int) (*placed, error) {
	if info.DType == memory.Invalid {
		return nil, fmt.Errorf("device memory has no elements of type %s: let the plan Skip it: %w", info.Format, errors.ErrUnsupported)
	}
	at := c.where[info.Name]
	t := &placed{info: info, file: at.file, off: c.headers[at.file].Tensors[at.tensor].Begin, from: info.DType.Size(), to: info.DType,
		scattered: c.scattered[info.Name]}
	if cfg.DType != nil {
		if to := cfg.DType(info); to != memory.Invalid {
			t.to = to
		}
	}
	if t.to.Size() == 0 || !fits(info.Shape, max(t.to.Size(), t.from)) {
		return nil, fmt.Errorf("shape %v of %s, as %s, is larger than any memory, or no type", info.Shape, info.DType, t.to)
	}
	var err error
	if t.cut, err = p.resolve(info.Shape, ranks); err != nil {
		return nil, err
	}
	t.flat = t.cut.flat()
	return t, nil
}

// allocate makes the weights, which are empty yet, the schedule, and its memory.
func (c *Checkpoint) allocate(m *executor, tensors []*placed, cfg *LoadConfig) (all []*Weights, err error) {
	sizes, err := layOut(tensors, m.ranks)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: load %s: %w", c.path(), err)
	}
	for _, l := range m.peers.locals {
		slab, err := tensor.Make(l.stream, memory.Uint8, sizes[l.rank])
		if err != nil {
			return all, fmt.Errorf("checkpoint: load %s: %d bytes of weights for rank %d: %w", c.path(), sizes[l.rank], l.rank, err)
		}
		all = append(all, newWeights(l, m.ranks, slab, tensors))
		m.slabs = append(m.slabs, slab)
	}
	// Not before there is room for the weights: a file may pretend to be so large that
	// its schedule alone would fill the host's memory.
	m.plan = newSchedule(tensors, m.ranks, cfg.RoundBytes, true)
	m.moved = progress(cfg.Progress, m.plan.bytes(m.peers.locals)+scatteredBytes(m.peers.locals, tensors))
	if err := m.open(); err != nil {
		return all, fmt.Errorf("checkpoint: load %s: %w", c.path(), err)
	}
	return all, nil
}

// progress returns a function for all threads that calls fn in order.
func progress(fn func(done, total int64), total int64) func(bytes int) {
	if fn == nil {
		return nil
	}
	var mu sync.Mutex
	var done int64
	return func(bytes int) {
		mu.Lock()
		defer mu.Unlock()
		done += int64(bytes)
		fn(done, total)
	}
}

// bytes is how many bytes the local ranks move between files and memory.
func (s *schedule) bytes(locals []*local) (n int64) {
	for _, l := range locals {
		n += s.direct[l.rank].bytes()
		for _, r := range s.rounds {
			n += r.ranks[l.rank].reads.bytes()
		}
	}
	return n
}

func (l reads) bytes() (n int64) {
	for _, r := range l {
		n += int64(r.size)
	}
	return n
}

// fingerprint returns a digest of the plan, so that processes can compare their plans. It
// returns "" if there is one process.
func (w *peers) fingerprint(tensors []*placed, round int) string {
	if !w.remote() {
		return ""
	}
	h := fnv.New64a()
	fmt.Fprintln(h, round)
	for _, t := range tensors {
		fmt.Fprintln(h, t.info.Name, t.info.DType, t.info.Shape, t.file, t.off, t.to, t.cut)
	}
	return strconv.FormatUint(h.Sum64(), 16)
}
