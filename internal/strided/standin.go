package strided

import (
	"slices"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below implement strided.cu in Go, for virtual devices. They access only the
// elements that the kernels access, because other streams may use the others at the same
// time.

// given reads the loops of a launch, from the outermost.
func given(c *kernel.Call) []loop {
	var loops []loop
	for i := range int(kernel.Get[uint32](c, 3)) {
		loops = append(loops, loop{int(kernel.Get[uint32](c, 4+3*i)), int(kernel.Get[int64](c, 5+3*i)), int(kernel.Get[int64](c, 6+3*i))})
	}
	slices.Reverse(loops)
	return loops
}

// sides returns the layouts of the destination and of the source, for elements of width
// words.
func sides(loops []loop, width int) (dst, src []kern.Steps) {
	for _, l := range loops {
		dst, src = append(dst, kern.Steps{N: l.n, Step: l.dst * width}), append(src, kern.Steps{N: l.n, Step: l.src * width})
	}
	return dst, src
}

// standInCopy implements the copy of elements that are width Ws wide.
func standInCopy[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		loops := given(c)
		dst, src := sides(loops, width)
		from, to := kern.ReadStrided[W](c, 1, width, src), kern.UpdateStrided[W](c, 0, width, dst)
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

// standInConvert implements the conversion.
func standInConvert(c *kernel.Call) {
	to, from := memory.DType(kernel.Get[uint32](c, 4+3*maxLoops)), memory.DType(kernel.Get[uint32](c, 5+3*maxLoops))
	loops := given(c)
	dst, _ := sides(loops, to.Size())
	_, src := sides(loops, from.Size())
	x, y := kern.ReadStrided[uint8](c, 1, from.Size(), src), kern.UpdateStrided[uint8](c, 0, to.Size(), dst)
	runs(loops, func(r run) {
		for i := range r.n {
			element.Store(to, y, r.dst+i*r.dstStep, element.Load(from, x, r.src+i*r.srcStep))
		}
	})
}

// A run is one pass of the innermost loop: n elements, beginning at the indexes dst and
// src.
type run struct{ n, dst, src, dstStep, srcStep int }

// runs calls fn for each run.
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
func copyHost(dst, src Array) {
	loops, empty := loopsOf(dst.Shape, dst.Strides, src.Strides)
	if empty {
		return
	}
	to, from := dst.all(), src.all()
	size, srcSize := dst.DType.Size(), src.DType.Size()
	runs(loops, func(r run) {
		switch {
		case dst.DType != src.DType:
			for i := range r.n {
				element.Store(dst.DType, to, r.dst+i*r.dstStep, element.Load(src.DType, from, r.src+i*r.srcStep))
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
