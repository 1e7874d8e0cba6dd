package checkpoint

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A scattered tensor is not one run of a file in row-major order: it is a view with strides,
// or its parts are in several places. The host reads its elements through the page cache.
type scattered struct {
	shape []int   // of the tensor, perhaps seen with fewer dimensions
	size  int     // bytes of an element
	boxes []filed // which cover the tensor
}

// A filed box is a rectangle of a tensor with its place in a file.
type filed struct {
	at, n   []int // first indices and numbers of indices
	file    int
	off     int64 // of the first element, in bytes
	strides []int // in the file, in elements
}

// gather reads elements of a scattered tensor into p, in row-major order from element from on.
func (c *Checkpoint) gather(ctx context.Context, s *scattered, p []byte, from int) error {
	g := gatherer{c: c, ctx: ctx, size: s.size, to: p}
	scratch := scratches.Get().(*[scratchBytes]byte)
	defer scratches.Put(scratch)
	g.scratch = scratch[:]
	rows := rowMajor(s.shape)
	return rectangles(s.shape, from, from+len(p)/s.size, func(at, n []int) error {
		for i := range s.boxes {
			if err := g.intersect(&s.boxes[i], at, n, rows, from); err != nil {
				return err
			}
		}
		return nil
	})
}

// scratchBytes is the memory that a call of gather needs besides its result.
const scratchBytes = 1 << 20

var scratches = sync.Pool{New: func() any { return new([scratchBytes]byte) }}

// rowMajor returns the strides of a contiguous tensor.
func rowMajor(shape []int) []int {
	strides, n := make([]int, len(shape)), 1
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = n
		n *= shape[i]
	}
	return strides
}

// rectangles cuts a run of elements, in row-major order, into rectangles.
func rectangles(shape []int, from, to int, fn func(at, n []int) error) error {
	at, n := make([]int, len(shape)), make([]int, len(shape))
	var cut func(dim, from, to int) error
	cut = func(dim, from, to int) error {
		if dim == len(shape) {
			return fn(at, n)
		}
		inner := product(shape[dim+1:])
		for from < to {
			i := from / inner
			at[dim], n[dim] = i, 1
			if from%inner != 0 || to-from < inner {
				end := min(to, (i+1)*inner)
				if err := cut(dim+1, from-i*inner, end-i*inner); err != nil {
					return err
				}
				from = end
				continue
			}
			n[dim] = (to - from) / inner
			from += n[dim] * inner
			for d := dim + 1; d < len(shape); d++ {
				at[d], n[d] = 0, shape[d]
			}
			if err := fn(at, n); err != nil {
				return err
			}
		}
		return nil
	}
	if from >= to {
		return nil
	}
	return cut(0, from, to)
}

// A gatherer copies elements from files.
type gatherer struct {
	c       *Checkpoint
	ctx     context.Context
	size    int // bytes of an element
	to      []byte
	scratch []byte
}

// An axis is a dimension of a copy: a number of steps, and their lengths in elements.
type axis struct{ n, in, out int }

// intersect copies the elements of a box that are in a rectangle. Element from of the tensor is
// the first one of the result.
func (g *gatherer) intersect(b *filed, at, n, rows []int, from int) error {
	off, out := 0, -from
	axes := make([]axis, 0, len(n))
	for d := range n {
		lo, hi := max(at[d], b.at[d]), min(at[d]+n[d], b.at[d]+b.n[d])
		if lo >= hi {
			return nil
		}
		off += (lo - b.at[d]) * b.strides[d]
		out += lo * rows[d]
		if hi-lo > 1 {
			axes = append(axes, axis{hi - lo, b.strides[d], rows[d]})
		}
	}
	return g.copy(b.file, b.off+int64(off)*int64(g.size), out, merge(axes))
}

// merge sorts the axes, the shortest steps in the file last, and joins axes
// that are one run. The axes that repeat the same elements come first.
func merge(axes []axis) []axis {
	slices.SortStableFunc(axes, func(a, b axis) int {
		if a.in == 0 || b.in == 0 {
			return cmp.Compare(min(a.in, 1), min(b.in, 1))
		}
		return cmp.Compare(b.in, a.in)
	})
	joined := axes[:0]
	for _, a := range axes {
		if last := len(joined) - 1; last >= 0 && joined[last].in == a.in*a.n && joined[last].out == a.out*a.n {
			joined[last] = axis{joined[last].n * a.n, a.in, a.out}
			continue
		}
		joined = append(joined, a)
	}
	return joined
}

// sparse is how many elements of a file are read for one that is needed, at most.
const sparse = 16

// copy copies elements from an offset of a file to an element of the result.
func (g *gatherer) copy(file int, off int64, out int, axes []axis) error {
	if len(axes) == 1 && axes[0].in == 1 && axes[0].out == 1 {
		return g.read(file, g.to[out*g.size:(out+axes[0].n)*g.size], off)
	}
	span, n := 1, 1
	for _, a := range axes {
		span, n = span+(a.n-1)*a.in, n*a.n
	}
	if span <= sparse*n && span <= len(g.scratch)/g.size {
		from := g.scratch[:span*g.size]
		if err := g.read(file, from, off); err != nil {
			return err
		}
		g.scatter(from, out, axes)
		return nil
	}
	a := axes[0]
	parts, step := a.n, 1
	if len(axes) == 1 && a.in <= sparse { // long, but not sparse
		parts, step = 2, (a.n+1)/2
	}
	for i := range parts {
		first := i * step
		rest := axes[1:]
		if k := min(step, a.n-first); k > 1 {
			rest = []axis{{k, a.in, a.out}}
		}
		if err := g.copy(file, off+int64(first*a.in)*int64(g.size), out+first*a.out, rest); err != nil {
			return err
		}
	}
	return nil
}

// scatter distributes elements in memory.
func (g *gatherer) scatter(from []byte, out int, axes []axis) {
	if len(axes) == 0 {
		copy(g.to[out*g.size:(out+1)*g.size], from)
		return
	}
	a := axes[0]
	for i := range a.n {
		g.scatter(from[i*a.in*g.size:], out+i*a.out, axes[1:])
	}
}

func (g *gatherer) read(file int, p []byte, off int64) error {
	_, err := files.Of(g.c.files[file]).ReadHost(g.ctx, p, off)
	return err
}

// fillScattered reads the local ranks' parts of scattered tensors by the host, and copies them
// to the devices. It comes before the rounds, which tell other processes of failures.
func (m *executor) fillScattered(ctx context.Context, c *Checkpoint, all []*Weights, tensors []*placed) {
	if scatteredBytes(m.peers.locals, tensors) == 0 {
		return
	}
	for i, w := range all {
		d := m.locals[i]
		for _, t := range tensors {
			if t.scattered == nil || !t.cut.holds(d.rank) || t.bytes(d.rank) == 0 || m.failed() {
				continue
			}
			if err := m.fillOne(ctx, c, w, d, t); err != nil {
				m.setError(d, &TensorError{Op: m.op, Path: t.info.File, Tensor: t.info.Name, Offset: c.begin(t.info.Name), Err: err})
			}
		}
		if err := d.stream.Sync(ctx); err != nil {
			m.setError(d, err)
		}
	}
}

// scatteredBytes is how many bytes fillScattered moves.
func scatteredBytes(locals []*local, tensors []*placed) (n int64) {
	for _, t := range tensors {
		for _, l := range locals {
			if t.scattered != nil && t.cut.holds(l.rank) {
				n += int64(t.cut.elements(l.rank) * t.from)
			}
		}
	}
	return n
}

// fillOne fills a rank's part of a tensor, which is a run of each row of the
// tensor.
func (m *executor) fillOne(ctx context.Context, c *Checkpoint, w *Weights, d *worker, t *placed) error {
	f := &t.flat
	run := f.ranges[d.rank]
	host := make([]byte, min(verifyChunk/t.from, run.Len*f.outer)*t.from)
	staged, err := tensor.Make(d.stream, memory.Uint8, len(host))
	if err != nil {
		return err
	}
	defer staged.Close()
	// The rows of the part follow each other in memory, so that a chunk may have several.
	total := run.Len * f.outer
	for at := 0; at < total; at += len(host) / t.from {
		n := min(len(host)/t.from, total-at)
		for k := 0; k < n; {
			row, column := (at+k)/run.Len, (at+k)%run.Len
			more := min(run.Len-column, n-k)
			if err := c.gather(ctx, t.scattered, host[k*t.from:(k+more)*t.from], row*f.width+run.Start+column); err != nil {
				return err
			}
			k += more
		}
		if err := d.put(w, t, staged, host[:n*t.from], at, n); err != nil {
			return err
		}
		if m.moved != nil {
			m.moved(n * t.from)
		}
	}
	return nil
}

// put copies n elements on the host to a rank's part, from element at on.
func (d *worker) put(w *Weights, t *placed, staged tensor.Tensor, host []byte, at, n int) error {
	x, err := view(staged, 0, len(host))
	if err == nil {
		err = x.CopyFrom(d.stream, host)
	}
	if err != nil {
		return err
	}
	from, err := cutOut(staged, 0, t.info.DType, n)
	if err != nil {
		return err
	}
	to, err := cutOut(w.slab, t.at[d.rank]+at*t.to.Size(), t.to, n)
	if err != nil {
		return err
	}
	return tensor.Copy(d.stream, to, from)
}

const (
	// smallTensor is the largest size in the file of a batched tensor. The parts of larger
	// tensors are further apart than the gaps that a read covers.
	smallTensor = 2 * files.GapBytes
	// mostBatch is the size of a batch, large enough for an efficient read.
	mostBatch = 4 << 20
	// batchAlign is the alignment of tensors in a batch. It fits every element, and most
	// files, whose tensors then need one copy.
	batchAlign = 8
)

// A batch is small tensors that one rank reads for all. Each rank copies its parts from its
// staging buffer.
type batch struct {
	tensors []*placed
	bytes   int
}

func (s *scheduler) addSmall(t *placed) {
	if one := (batch{tensors: []*placed{t}}); len(one.needers(s.ranks)) == 0 {
		return
	}
	if s.small.bytes+t.fileBytes() > min(mostBatch, s.budget) {
		s.flushBatch()
	}
	s.small.tensors = append(s.small.tensors, t)
	s.small.bytes += roundUp(t.fileBytes(), batchAlign)
}

// flushBatch lets the rank with the least work read the batch, sends the batch to the other
// ranks that need a part, and cuts the parts out.
func (s *scheduler) flushBatch() {
	b := s.small
	s.small = batch{}
	who := b.needers(s.ranks)
	if len(who) == 0 {
		return
	}
	s.room(who)
	reader := who[0]
	for _, rank := range who {
		if s.reads(rank) < s.reads(reader) {
			reader = rank
		}
	}
	at := make([]int, s.ranks)
	for _, rank := range who {
		at[rank] = s.open.ranks[rank].stage(b.bytes)
		s.load[rank] += b.bytes // it is in the staging buffers of all these ranks
	}
	for _, rank := range who {
		if rank != reader {
			s.open.sends = append(s.open.sends, send{from: reader, to: rank, packed: true, batch: true, fromAt: at[reader], toAt: at[rank], bytes: b.bytes})
		}
	}
	place := 0
	for _, t := range b.tensors {
		w := &s.open.ranks[reader]
		if t.fileBytes() > 0 {
			w.reads = append(w.reads, read{file: t.file, off: t.off, size: t.fileBytes(), staged: true, at: at[reader] + place})
		}
		for _, rank := range who {
			if g := t.flat.ranges[rank]; t.flat.outer*g.Len > 0 {
				s.open.ranks[rank].parts = append(s.open.ranks[rank].parts, copying{of: t, rows: t.flat.outer, width: t.flat.width, from: g, staged: at[rank] + place, at: t.at[rank]})
			}
		}
		place += roundUp(t.fileBytes(), batchAlign)
	}
}

// reads is how many bytes a rank reads in the open round.
func (s *scheduler) reads(rank int) int64 { return s.open.ranks[rank].reads.bytes() }

// needers returns the ranks that get a part of the batch.
func (b *batch) needers(ranks int) []int {
	var who []int
	for rank := range ranks {
		for _, t := range b.tensors {
			if t.flat.outer*t.flat.ranges[rank].Len > 0 {
				who = append(who, rank)
				break
			}
		}
	}
	return who
}
