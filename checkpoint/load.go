package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/strided"
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

// Load brings the checkpoint to the devices of the group: each rank gets the
// part of every tensor that the plan gives it. The result has one Weights for
// each local rank. Load returns when all bytes have arrived. All ranks must
// open the same files. Collective.
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

// LoadOn loads the checkpoint to the device of s, stream-ordered on s, without a group.
func (c *Checkpoint) LoadOn(ctx context.Context, s *stream.Stream, cfg *LoadConfig) (*Weights, error) {
	all, err := c.load(ctx, peersOn(s), cfg)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

func (c *Checkpoint) load(ctx context.Context, w *peers, cfg *LoadConfig) ([]*Weights, error) {
	if err := c.check("load"); err != nil {
		return nil, err
	}
	lc := *cmp.Or(cfg, new(LoadConfig))
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

// allocate allocates the tensors, whose contents are undefined, the schedule, and its memory.
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

// fingerprint returns a digest of the plan, by which processes compare their
// plans, or "" if there is one process.
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

// Info describes a tensor of a checkpoint.
type Info struct {
	Name  string
	DType memory.DType // Invalid where device memory has no such type
	Shape []int        // not to be changed
	File  string       // the path of its file

	Format safetensors.DType // the type as the file names it
}

// Bytes returns the size of the tensor in its file.
func (i Info) Bytes() int64 {
	n := int64(i.Format.Bits())
	for _, d := range i.Shape {
		n *= int64(d)
	}
	return n / 8
}

// A Range is a run of indices of a dimension.
type Range struct{ Start, Len int }

// A Plan returns the placement of each tensor of a checkpoint. It must be the same on all ranks.
type Plan func(t Info) Placement

// A Placement says which part of a tensor each rank gets. The zero Placement is Replicate.
type Placement struct {
	what string // for errors
	dim  int
	cut  func(rank, ranks, size int) Range // nil is everything on all ranks
	rank int                               // of Own
	skip bool
}

// Replicate gives all ranks the whole tensor, which is read once, in parts that
// the ranks exchange.
func Replicate() Placement { return Placement{} }

// Shard cuts the tensor along a dimension and gives each rank one part, by the
// rule of torch.chunk. The length of a part is the length of the dimension
// divided by the number of ranks, rounded up, so the last parts may be shorter
// or empty. A negative dimension counts from the end.
func Shard(dim int) Placement {
	return Placement{what: "shard", dim: dim, cut: chunkOf}
}

// Own gives the whole tensor to one rank, and nothing to the others.
func Own(rank int) Placement {
	return Placement{what: "own", rank: rank, cut: func(r, _, size int) Range {
		if r != rank {
			return Range{}
		}
		return Range{0, size}
	}}
}

// Skip gives the tensor to no rank.
func Skip() Placement { return Placement{skip: true} }

// Slice gives each rank the range of a dimension that the function of returns for it. Ranges
// may overlap, for example if ranks share the heads of an attention, and need not cover the
// dimension.
func Slice(dim int, of func(rank, ranks, size int) Range) Placement {
	return Placement{what: "slice", dim: dim, cut: of}
}

func chunkOf(rank, ranks, size int) Range {
	part := size / ranks
	if size%ranks > 0 { // size may be near the largest int
		part++
	}
	start := min(rank*part, size)
	return Range{start, min(part, size-start)}
}

// A division is a placement of one tensor, resolved: dimension dim has width indices,
// outer times, of inner elements each, and rank r gets the range ranges[r].
type division struct {
	dim                 int
	outer, width, inner int
	ranges              []Range
	owner               int // the only rank that has it, or -1
}

// resolve returns the division of a tensor of the given shape by p.
func (p Placement) resolve(shape []int, ranks int) (division, error) {
	c := division{outer: 1, width: 1, inner: 1, ranges: make([]Range, ranks), owner: -1}
	if p.cut == nil || p.what == "own" {
		err := p.resolveWhole(&c, shape)
		return c, err
	}
	err := p.resolveDim(&c, shape)
	return c, err
}

// resolveWhole resolves a placement that gives a rank everything or nothing.
func (p Placement) resolveWhole(c *division, shape []int) error {
	c.dim = -1
	for _, n := range shape {
		c.width *= n
	}
	ranks := len(c.ranges)
	if p.what == "own" {
		if p.rank < 0 || p.rank >= ranks {
			return fmt.Errorf("the plan gives it to rank %d, but there are %d", p.rank, ranks)
		}
		c.owner = p.rank
	}
	for r := range c.ranges {
		if c.ranges[r] = (Range{0, c.width}); p.cut != nil {
			c.ranges[r] = p.cut(r, ranks, c.width)
		}
	}
	return nil
}

// resolveDim resolves a placement that cuts a dimension.
func (p Placement) resolveDim(c *division, shape []int) error {
	dim, err := strided.WrapDim(p.dim, len(shape))
	if err == nil && len(shape) == 0 {
		err = fmt.Errorf("a tensor of one element has no dimension")
	}
	if err != nil {
		return fmt.Errorf("the plan's %s along dimension %d of shape %v: %w", p.what, p.dim, shape, err)
	}
	c.dim, c.width = dim, shape[dim]
	for i, n := range shape {
		if i < dim {
			c.outer *= n
		} else if i > dim {
			c.inner *= n
		}
	}
	for r := range c.ranges {
		g := p.cut(r, len(c.ranges), c.width)
		if g.Start < 0 || g.Len < 0 || g.Len > c.width-g.Start {
			return fmt.Errorf("the plan gives rank %d indices %d to %d of dimension %d, which has %d", r, g.Start, g.Start+g.Len, dim, c.width)
		}
		c.ranges[r] = g
	}
	return nil
}

// shapeOf returns the shape of a rank's part of a tensor of the given shape.
func (c *division) shapeOf(rank int, shape []int) []int {
	part := append([]int(nil), shape...)
	if c.dim >= 0 {
		part[c.dim] = c.ranges[rank].Len
	}
	return part
}

// elements returns how many elements a rank gets.
func (c *division) elements(rank int) int { return c.outer * c.ranges[rank].Len * c.inner }

// holds reports whether a rank gets a part, which may be empty.
func (c *division) holds(rank int) bool { return c.owner < 0 || c.owner == rank }

// flat merges the dimensions behind the cut one with it. If the parts are contiguous, it also
// merges the dimensions before it: then one dimension of all elements is cut.
func (c *division) flat() division {
	if c.outer == 0 || c.width == 0 || c.inner == 0 { // the others may be any numbers
		return division{dim: c.dim, outer: 1, inner: 1, ranges: make([]Range, len(c.ranges)), owner: c.owner}
	}
	f := division{dim: c.dim, outer: c.outer, width: c.width * c.inner, inner: 1, ranges: make([]Range, len(c.ranges)), owner: c.owner}
	whole := true
	for r, g := range c.ranges {
		f.ranges[r] = Range{g.Start * c.inner, g.Len * c.inner}
		whole = whole && (g.Len == 0 || g.Len == c.width)
	}
	if whole {
		f.outer, f.width = 1, c.outer*f.width
		for r := range f.ranges {
			f.ranges[r].Len *= c.outer // everything or nothing
		}
	}
	return f
}

// everywhere reports whether all ranks get everything.
func (c *division) everywhere() bool {
	for _, g := range c.ranges {
		if g.Len != c.width {
			return false
		}
	}
	return true
}

// gap returns the first index of the dimension that no rank gets, if there is one.
func (c *division) gap() (index int, is bool) {
	ranges := slices.Clone(c.ranges)
	slices.SortFunc(ranges, func(a, b Range) int { return cmp.Compare(a.Start, b.Start) })
	for _, g := range ranges {
		if g.Start > index {
			break
		}
		index = max(index, g.Start+g.Len)
	}
	return index, index < c.width
}

// slotAlign is the alignment of tensors in device memory, in bytes. The allocator has the same
// alignment, and it is enough for every kernel. Every element's size divides it.
const slotAlign = 512

func roundUp(n, align int) int { return (n + align - 1) / align * align }

// placed is a tensor of a checkpoint with its place in the file and in the memory
// of the ranks.
type placed struct {
	info Info
	cut  division // as the plan says
	flat division // where parts are contiguous, merged to one dimension

	file int   // which of the files
	off  int64 // of the first byte there
	from int   // bytes of an element there

	scattered *scattered // nil if the file has it in one run

	to memory.DType // in memory
	at []int        // by rank: the first byte of the part in its slab; -1 if the rank has no part
}

// casts reports whether elements change their type on the way.
func (s *placed) casts() bool { return s.to != s.info.DType }

// contiguous reports whether the parts of all ranks are runs of the file.
func (s *placed) contiguous() bool { return s.flat.outer == 1 }

// bytes returns the size of a rank's part in memory.
func (s *placed) bytes(rank int) int { return s.cut.elements(rank) * s.to.Size() }

// fileBytes returns the size of the whole tensor in its file.
func (s *placed) fileBytes() int { return s.flat.outer * s.flat.width * s.from }

// layOut gives every part its place, for each rank in the same order. Tensors that all ranks
// have whole come first, so that they have the same places on all ranks and are exchanged in
// long runs. The other tensors follow in file order. layOut returns the size of
// each rank's slab.
func layOut(tensors []*placed, ranks int) (sizes []int, err error) {
	sizes = make([]int, ranks)
	for _, everywhere := range []bool{true, false} {
		for _, s := range tensors {
			if s.cut.everywhere() != everywhere {
				continue
			}
			s.at = make([]int, ranks)
			for r := range s.at {
				if s.at[r] = -1; !s.cut.holds(r) {
					continue
				}
				if s.bytes(r) > math.MaxInt-slotAlign-sizes[r] {
					return nil, fmt.Errorf("the tensors of rank %d up to %q are larger than any memory", r, s.info.Name)
				}
				s.at[r] = sizes[r]
				sizes[r] = roundUp(sizes[r]+s.bytes(r), slotAlign)
			}
		}
	}
	return sizes, nil
}

// fits reports whether the sizes of a tensor are numbers that int holds.
func fits(shape []int, size int) bool {
	n := size
	for _, d := range shape {
		if d != 0 && n > math.MaxInt/d {
			return false
		}
		n *= d
	}
	return true
}
