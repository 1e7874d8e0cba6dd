package tensor

import (
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// A groupedCall is a launch of a kernel of grouped.cu on a virtual device.
type groupedCall struct {
	*kernel.Call
	kind    groupedKind
	flags   uint32
	m, n, k int
	crow    int
	ccol    int
	alpha   float32
	beta    float32
}

// standInGrouped implements a kernel of grouped.cu in Go, and accesses only
// elements that the kernel accesses. Sums of float32 have its bits; those of
// other types are rounded after each product.
func standInGrouped(kind groupedKind) func(*kernel.Call) {
	return func(c *kernel.Call) {
		g := &groupedCall{Call: c, kind: kind, flags: kernel.Get[uint32](c, 5), m: int(kernel.Get[int32](c, 6)), n: int(kernel.Get[int32](c, 7)), k: int(kernel.Get[int32](c, 8)),
			crow: int(kernel.Get[int64](c, 13)), ccol: int(kernel.Get[int64](c, 14)), alpha: kernel.Get[float32](c, 16), beta: kernel.Get[float32](c, 17)}
		limit := g.m
		if g.flags&groupedInner != 0 {
			limit = g.k
		}
		begin := 0
		for i, end := range kernel.Read[int32](c, 3, int(kernel.Get[uint32](c, 4))) {
			e := max(begin, min(int(end), limit))
			if g.flags&groupedInner != 0 {
				g.multiply(i, 0, g.m, begin, e)
			} else {
				g.multiply(i, begin, e, 0, g.k)
			}
			if g.flags&groupedSeparate == 0 {
				begin = e
			}
		}
	}
}

// multiply computes the rows [from, to) of a group, with the inner dimension [lo, hi).
func (g *groupedCall) multiply(group, from, to, lo, hi int) {
	if from >= to {
		return
	}
	a := g.matrix(1, 9, group, g.kind.aInner, from, to, lo, hi)
	b := g.matrix(2, 11, group, g.kind.bInner, 0, g.n, lo, hi)
	sums, inner := make([]float32, (to-from)*g.n), hi-lo
	for i := range to - from {
		x := a[i*inner:][:inner]
		for j := range g.n {
			y, sum := b[j*inner:][:inner], float32(0)
			if g.kind.element == memory.Float32 {
				for k := range x {
					sum = dtype.FMA(x[k], y[k], sum)
				}
			} else {
				for k := range x {
					sum += float32(x[k] * y[k]) // exact
				}
			}
			sums[i*g.n+j] = sum
		}
	}
	g.store(group, from, to, sums)
}

// matrix returns rows and a part of the inner dimension of a, or of b
// transposed, in row-major order, where the arguments from strides on are the
// strides of the operand.
func (g *groupedCall) matrix(arg, strides, group int, innerLines bool, from, to, lo, hi int) []float32 {
	elem := dtype.Of(g.kind.element)
	ld, step := int(kernel.Get[int64](g.Call, strides)), int(kernel.Get[int64](g.Call, strides+1))
	line := func(y, x, n int) []byte {
		return kernel.ReadAddress[byte](g.Call, g.Address(arg)+uint64((group*step+y*ld+x)*elem.Size), n*elem.Size)
	}
	out := make([]float32, (to-from)*(hi-lo))
	if innerLines {
		for i := from; i < to && lo < hi; i++ {
			for k, raw := 0, line(i, lo, hi-lo); k < hi-lo; k++ {
				out[(i-from)*(hi-lo)+k] = elem.Load(raw, k).Float32()
			}
		}
		return out
	}
	for k := lo; k < hi && from < to; k++ {
		for i, raw := 0, line(k, from, to-from); i < to-from; i++ {
			out[i*(hi-lo)+k-lo] = elem.Load(raw, i).Float32()
		}
	}
	return out
}

// store writes rows of c along its lines of adjacent elements.
func (g *groupedCall) store(group, from, to int, sums []float32) {
	t := g.kind.element
	if g.flags&groupedFloats != 0 {
		t = memory.Float32
	}
	elem, cell := dtype.Of(t), int(kernel.Get[int64](g.Call, 15))
	line := func(row, col, n int, at func(i int) int) {
		raw := kernel.UpdateAddress[byte](g.Call, g.Address(0)+uint64((group*cell+row*g.crow+col*g.ccol)*elem.Size), n*elem.Size)
		for i := range n {
			x := float32(g.alpha * sums[at(i)])
			if g.beta != 0 {
				x = dtype.FMA(g.beta, elem.Load(raw, i).Float32(), x)
			}
			elem.Store(raw, i, dtype.FloatValue(float64(x)))
		}
	}
	if g.ccol == 1 {
		for i := from; i < to; i++ {
			line(i, 0, g.n, func(j int) int { return (i-from)*g.n + j })
		}
		return
	}
	for j := range g.n {
		line(from, j, to-from, func(i int) int { return i*g.n + j })
	}
}
