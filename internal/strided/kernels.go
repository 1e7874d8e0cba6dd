package strided

import (
	_ "embed"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

//go:embed strided.cu
var source string

// packed is the compiled strided.cu; make ptx writes it.
//
//go:embed strided.ptx.zst
var packed []byte

var archive = cudacc.OpenArchive(packed)

// These constants must agree with strided.cu.
const (
	threads  = 256 // of a block
	items    = 4   // elements of a thread
	maxLoops = 8
	widths   = 5
)

// A toolbox holds the kernels of a device.
type toolbox struct {
	mu      sync.Mutex // held while they are being compiled
	kernels atomic.Pointer[kernels]
}

type kernels struct {
	copies  [widths]*kernel.Kernel // for elements of 1, 2, 4, 8 and 16 bytes
	pieces  [widths]*kernel.Kernel
	fans    [widths]*kernel.Kernel
	convert *kernel.Kernel
	sum     *kernel.Kernel // one element at a time
	sumWide *kernel.Kernel // 16 bytes at a time
}

var toolboxKey handle.Key

// kernelsOf returns the kernels of a device, which the first call loads.
func kernelsOf(dev *device.Device) (*kernels, error) {
	t := gpu.DeviceOf(dev).Local(&toolboxKey, func() any { return new(toolbox) }).(*toolbox)
	if k := t.kernels.Load(); k != nil {
		return k, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.kernels.Load(); k != nil {
		return k, nil
	}
	defs := []kernel.Def{{Name: "convert", Params: params(kernel.U32, kernel.U32), Go: standInConvert},
		{Name: "sum1", Params: tableParam[sumTable](), Go: standInSum(0)}, {Name: "sum16", Params: tableParam[sumTable](), Go: standInSum(16)}}
	copies := [widths]func(*kernel.Call){standInCopy[uint8](1), standInCopy[uint16](1), standInCopy[uint32](1), standInCopy[uint64](1), standInCopy[uint64](2)}
	pieces := [widths]func(*kernel.Call){standInPieces[uint8](1), standInPieces[uint16](1), standInPieces[uint32](1), standInPieces[uint64](1), standInPieces[uint64](2)}
	fans := [widths]func(*kernel.Call){standInFan[uint8](1), standInFan[uint16](1), standInFan[uint32](1), standInFan[uint64](1), standInFan[uint64](2)}
	for i := range widths {
		defs = append(defs, kernel.Def{Name: fmt.Sprint("copy", 1<<i), Params: params(), Go: copies[i]},
			kernel.Def{Name: fmt.Sprint("pieces", 1<<i), Params: tableParam[pieceTable](), Go: pieces[i]},
			kernel.Def{Name: fmt.Sprint("fan", 1<<i), Params: tableParam[fanTable](), Go: fans[i]})
	}
	src := &kernel.Source{Name: "strided.cu", CUDA: source, Kernels: defs}
	inside.Embed(src, archive)
	inside.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return nil, fmt.Errorf("tensor: %w", err)
	}
	k, err := named(m)
	if err == nil {
		t.kernels.Store(k)
	}
	return k, err
}

// named finds the kernels in their module.
func named(m *kernel.Module) (*kernels, error) {
	k := new(kernels)
	names := map[string]**kernel.Kernel{"convert": &k.convert, "sum1": &k.sum, "sum16": &k.sumWide}
	for i := range widths {
		names[fmt.Sprint("copy", 1<<i)] = &k.copies[i]
		names[fmt.Sprint("pieces", 1<<i)] = &k.pieces[i]
		names[fmt.Sprint("fan", 1<<i)] = &k.fans[i]
	}
	for name, at := range names {
		var err error
		if *at, err = m.Kernel(name); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// params are the destination, the source, the numbers of elements and loops, and the
// loops.
func params(more ...kernel.Param) []kernel.Param {
	ps := []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.U32, kernel.U32}
	for range maxLoops {
		ps = append(ps, kernel.U32, kernel.I64, kernel.I64)
	}
	return append(ps, more...)
}

// launch enqueues on s, whose device can access both arrays, a kernel that
// copies src to dst.
func launch(s *stream.Stream, dst, src Array, loops []loop) error {
	k, err := kernelsOf(s.Device())
	if err != nil {
		return err
	}
	j := job{s: s, dst: dst, src: src, to: dst.DType.Size(), from: src.DType.Size(), kernel: k.convert}
	if dst.DType == src.DType {
		j.to, loops = widen(dst, src, loops)
		j.from, j.kernel = j.to, k.copies[bits.TrailingZeros(uint(j.to))]
	} else {
		j.types = []kernel.Arg{kernel.Scalar(uint32(dst.DType)), kernel.Scalar(uint32(src.DType))}
	}
	return j.enqueue(loops, 0, 0)
}

// widen treats contiguous runs as wider elements, of at most 16 bytes, if all runs are
// aligned, and returns the width.
func widen(dst, src Array, loops []loop) (width int, wide []loop) {
	size := dst.DType.Size()
	if len(loops) == 0 {
		return size, loops
	}
	last := len(loops) - 1
	if loops[last].dst != 1 || loops[last].src != 1 {
		return size, loops
	}
	for f := 16 / size; f > 1; f /= 2 {
		if aligned(dst, src, loops, f) {
			for i, l := range loops {
				if i == last {
					wide = append(wide, loop{l.n / f, 1, 1})
				} else {
					wide = append(wide, loop{l.n, l.dst / f, l.src / f})
				}
			}
			return size * f, wide
		}
	}
	return size, loops
}

// aligned reports whether f elements can be accessed as one.
func aligned(dst, src Array, loops []loop, f int) bool {
	bytes := uint64(f * dst.DType.Size())
	if dst.Ptr()%bytes != 0 || src.Ptr()%bytes != 0 || loops[len(loops)-1].n%f != 0 {
		return false
	}
	for _, l := range loops[:len(loops)-1] {
		if l.dst%f != 0 || l.src%f != 0 {
			return false
		}
	}
	return true
}

// A job is one copy by a kernel.
type job struct {
	s        *stream.Stream
	dst, src Array
	to, from int // bytes of an element
	kernel   *kernel.Kernel
	types    []kernel.Arg
}

// enqueue launches the kernel, with offsets in elements, several times if there
// are more loops or elements than one launch supports.
func (j *job) enqueue(loops []loop, dst, src int) error {
	n := 1
	for _, l := range loops {
		n *= l.n
	}
	switch {
	case len(loops) > maxLoops:
		for i := range loops[0].n {
			if err := j.enqueue(loops[1:], dst+i*loops[0].dst, src+i*loops[0].src); err != nil {
				return err
			}
		}
		return nil
	case n > math.MaxInt32 && loops[0].n == 1:
		return j.enqueue(loops[1:], dst, src)
	case n > math.MaxInt32:
		l := loops[0]
		half := append([]loop{{l.n / 2, l.dst, l.src}}, loops[1:]...)
		rest := append([]loop{{l.n - l.n/2, l.dst, l.src}}, loops[1:]...)
		if err := j.enqueue(half, dst, src); err != nil {
			return err
		}
		return j.enqueue(rest, dst+l.n/2*l.dst, src+l.n/2*l.src)
	}
	return j.one(loops, n, dst, src)
}

// one launches the kernel once.
func (j *job) one(loops []loop, n, dst, src int) error {
	to, err := j.dst.from(dst * j.to)
	if err != nil {
		return err
	}
	from, err := j.src.from(src * j.from)
	if err != nil {
		return err
	}
	args := make([]kernel.Arg, 0, 32)
	args = append(args, kernel.Ptr(to), kernel.Ptr(from), kernel.Scalar(uint32(n)), kernel.Scalar(uint32(len(loops))))
	inside.AllowPeers(&args[0])
	inside.AllowPeers(&args[1])
	for i := range maxLoops {
		l := loop{n: 1}
		if at := len(loops) - 1 - i; at >= 0 {
			l = loops[at]
		}
		args = append(args, kernel.Scalar(uint32(l.n)), kernel.Scalar(int64(l.dst)), kernel.Scalar(int64(l.src)))
	}
	if err := j.kernel.Launch(j.s, cover(n), append(args, j.types...)...); err != nil {
		return err
	}
	gpu.StreamOf(j.s).Uses("kernel of a strided copy", false, func() []cudadrv.Use { return j.uses(loops, to.Ptr(), from.Ptr()) })
	return nil
}

// from returns the memory of a device tensor, beginning at a byte offset from its first
// element.
func (t Array) from(byteOffset int) (memory.Slice[uint8], error) {
	return memory.View[uint8](t.mem.buf, t.Offset+byteOffset, 0)
}

// cover returns the grid for n elements, n > 0.
func cover(n int) kernel.Grid { return blocks(n, items) }

// blocks returns the grid for n elements, with each elements per thread.
func blocks(n, each int) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{uint32((n-1)/(threads*each) + 1), 1, 1}, Threads: [3]uint32{threads, 1, 1}}
}

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
func sides(loops []loop, width int) (dst, src []inside.Steps) {
	for _, l := range loops {
		dst, src = append(dst, inside.Steps{N: l.n, Step: l.dst * width}), append(src, inside.Steps{N: l.n, Step: l.src * width})
	}
	return dst, src
}

// standInCopy implements the copy of elements that are width Ws wide.
func standInCopy[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		loops := given(c)
		dst, src := sides(loops, width)
		from, to := inside.ReadStrided[W](c, 1, width, src), inside.UpdateStrided[W](c, 0, width, dst)
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
	x, y := inside.ReadStrided[uint8](c, 1, from.Size(), src), inside.UpdateStrided[uint8](c, 0, to.Size(), dst)
	runs(loops, func(r run) {
		for i := range r.n {
			dtype.Of(to).Store(y, r.dst+i*r.dstStep, dtype.Of(from).Load(x, r.src+i*r.srcStep))
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
				dtype.Of(dst.DType).Store(to, r.dst+i*r.dstStep, dtype.Of(src.DType).Load(from, r.src+i*r.srcStep))
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
