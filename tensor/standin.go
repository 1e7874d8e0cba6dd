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

// sides returns the layouts of the destination and of the source, for elements that are a
// number of words wide.
func sides(loops []loop, width int) (dst, src []kernel.Steps) {
	for _, l := range loops {
		dst, src = append(dst, kernel.Steps{N: l.n, Step: l.dst * width}), append(src, kernel.Steps{N: l.n, Step: l.src * width})
	}
	return dst, src
}

// standInCopy stands in for the copy of elements that are a number of Ws wide.
func standInCopy[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		loops := given(c)
		dst, src := sides(loops, width)
		from, to := kernel.ReadStrided[W](c, 1, width, src...), kernel.UpdateStrided[W](c, 0, width, dst...)
		runs(loops, func(r run) {
			if r.dstStep == 1 && r.srcStep == 1 {
				copy(to[r.dst*width:][:r.n*width], from[r.src*width:])
				return
			}
			for i := range r.n {
				copy(to[(r.dst+i*r.dstStep)*width:][:width], from[(r.src+i*r.srcStep)*width:])
			}
		})
	}
}

// standInConvert stands in for the conversion.
func standInConvert(c *kernel.Call) {
	to, from := memory.DType(c.Uint32(4+3*maxLoops)), memory.DType(c.Uint32(5+3*maxLoops))
	loops := given(c)
	dst, _ := sides(loops, to.Size())
	_, src := sides(loops, from.Size())
	x, y := kernel.ReadStrided[uint8](c, 1, from.Size(), src...), kernel.UpdateStrided[uint8](c, 0, to.Size(), dst...)
	runs(loops, func(r run) {
		for i := range r.n {
			element.Store(to, y, r.dst+i*r.dstStep, element.Load(from, x, r.src+i*r.srcStep))
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
