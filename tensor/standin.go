package tensor

import (
	"slices"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below do in Go what tensor.cu does, for virtual devices. They touch
// the elements that the kernel touches and no others, since other streams may use
// those meanwhile.

// given reads the loops of a launch, from the outermost.
func given(c *kernel.Call) []loop {
	var loops []loop
	for i := range int(c.Uint32(3)) {
		loops = append(loops, loop{int(c.Uint32(4 + 3*i)), int(c.Int64(5 + 3*i)), int(c.Int64(6 + 3*i))})
	}
	slices.Reverse(loops)
	return loops
}

// standInCopy stands in for the copy of elements that are a number of Ws wide.
func standInCopy[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		runs(given(c), func(r run) {
			if r.dstStep == 1 && r.srcStep == 1 {
				copy(kernel.UpdateAt[W](c, 0, r.dst*width, r.n*width), kernel.ReadAt[W](c, 1, r.src*width, r.n*width))
				return
			}
			for i := range r.n {
				copy(kernel.UpdateAt[W](c, 0, (r.dst+i*r.dstStep)*width, width), kernel.ReadAt[W](c, 1, (r.src+i*r.srcStep)*width, width))
			}
		})
	}
}

// standInConvert stands in for the conversion.
func standInConvert(c *kernel.Call) {
	to, from := memory.DType(c.Uint32(4+3*maxLoops)), memory.DType(c.Uint32(5+3*maxLoops))
	convert := func(dst, src, n int) {
		x := kernel.ReadAt[uint8](c, 1, src*from.Size(), n*from.Size())
		y := kernel.UpdateAt[uint8](c, 0, dst*to.Size(), n*to.Size())
		for i := range n {
			element.Store(to, y, i, element.Load(from, x, i))
		}
	}
	runs(given(c), func(r run) {
		if r.dstStep == 1 && r.srcStep == 1 {
			convert(r.dst, r.src, r.n)
			return
		}
		for i := range r.n {
			convert(r.dst+i*r.dstStep, r.src+i*r.srcStep, 1)
		}
	})
}

// A run is one pass of the innermost loop: n elements from the places dst and src
// on.
type run struct{ n, dst, src, dstStep, srcStep int }

// runs calls fn for each.
func runs(loops []loop, fn func(run)) {
	if len(loops) == 0 {
		fn(run{1, 0, 0, 1, 1})
		return
	}
	l := loops[len(loops)-1]
	outer(loops[:len(loops)-1], 0, 0, func(dst, src int) { fn(run{l.n, dst, src, l.dst, l.src}) })
}

func outer(loops []loop, dst, src int, fn func(dst, src int)) {
	if len(loops) == 0 {
		fn(dst, src)
		return
	}
	for i := range loops[0].n {
		outer(loops[1:], dst+i*loops[0].dst, src+i*loops[0].src, fn)
	}
}

// copyHost copies between tensors in host memory.
func copyHost(dst, src Tensor) {
	loops, empty := loopsOf(dst.shape, dst.strides, src.strides)
	if empty {
		return
	}
	to, from := dst.all(), src.all()
	size, srcSize := dst.dtype.Size(), src.dtype.Size()
	runs(loops, func(r run) {
		switch {
		case dst.dtype != src.dtype:
			for i := range r.n {
				element.Store(dst.dtype, to, r.dst+i*r.dstStep, element.Load(src.dtype, from, r.src+i*r.srcStep))
			}
		case r.dstStep == 1 && r.srcStep == 1:
			copy(to[r.dst*size:][:r.n*size], from[r.src*srcSize:])
		default:
			for i := range r.n {
				copy(to[(r.dst+i*r.dstStep)*size:][:size], from[(r.src+i*r.srcStep)*size:])
			}
		}
	})
}
