package checkpoint

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/files"
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

// merge sorts the axes, the shortest steps in the file last, and joins axes that are one run.
// Axes that repeat the same elements come first.
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
