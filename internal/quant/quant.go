// Package quant has the blocks of 8-bit numbers that an all-reduce sends, and the kernels that
// write, add and read them.
//
// A block is BlockLen elements, as 8-bit numbers with a common scale, which is a power of two. Its
// exponent has one byte, as in the microscaling formats MXFP8 and MXINT8 of the Open Compute
// Project. The scale is the smallest one with which no number is out of range, so a block loses
// nothing if its elements are multiples of some power of two by numbers of the format.
package quant

import (
	_ "embed"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Blocks is the part of the source that kernels of other packages share.
//
//go:embed block.cuh
var Blocks string

//go:embed quant.cu
var kernels string

const (
	// BlockLen is the number of elements that share a scale.
	BlockLen = 32

	// Unit is the number of elements of a thread.
	Unit = 16
	// WarpLen is the number of elements of a warp. The lengths of shares and chunks are multiples of it.
	WarpLen = 32 * Unit

	// These constants must agree with the source.
	threads   = 256
	notFinite = 255     // the exponent of a block that has an infinity or a NaN
	maxBlocks = 1 << 10 // of a grid, for a chunk
	scaleZero = 127     // the exponent of scale 1
	tagBytes  = 16
)

// ShareLen returns the number of elements in a share, if n elements are divided among so many ranks.
// The last shares may be partly or completely beyond the end.
func ShareLen(n, ranks int) int {
	return (n + ranks*WarpLen - 1) / (ranks * WarpLen) * WarpLen
}

// ChunkBytes returns the number of bytes of so many elements in blocks.
func ChunkBytes(length int) int { return length + length/BlockLen }

// TaggedBytes returns the number of bytes of a chunk with its tag, as the kernels of Load have it.
func TaggedBytes(length int) int { return ChunkBytes(length) + tagBytes }

// Supports reports whether there are blocks of a format for elements of a type.
func Supports(t, format memory.DType) bool {
	return indexOf(elements[:], t) >= 0 && indexOf(codes[:], format) >= 0
}

// Macros returns the options that select a type and a format, which Supports must have accepted, in a source
// that begins with Blocks.
func Macros(t, format memory.DType) []string {
	return []string{"--define-macro=CHORUS_TYPE=" + elements[indexOf(elements[:], t)].c, "--define-macro=CHORUS_CODE=" + codes[indexOf(codes[:], format)].c}
}

// Kernels are the kernels for elements of one type and blocks of one format, on one device.
type Kernels struct {
	quantize, reduce, dequantize *kernel.Kernel
	index                        int // of the type and the format
}

// loaded has the kernels by type and format.
var loaded [len(elements)][len(codes)]inside.PerDevice[Kernels]

// Load returns the kernels for elements of float16, bfloat16 or float32, and for blocks of
// memory.Float8E4M3 or memory.Int8. The first call for a device compiles and loads them, for which
// the driver may wait for all work of the device.
func Load(dev *device.Device, t, format memory.DType) (*Kernels, error) {
	if !Supports(t, format) {
		return nil, &device.UnsupportedError{Feature: "an all-reduce in 8-bit blocks", Need: "elements of float16, bfloat16 or float32, and blocks of float8_e4m3fn or int8", Have: fmt.Sprintf("%s in %s", t, format)}
	}
	return loaded[indexOf(elements[:], t)][indexOf(codes[:], format)].Of(dev, func(k *Kernels, dev *device.Device) error {
		k.index = indexOf(elements[:], t)*len(codes) + indexOf(codes[:], format)
		src := sourceOf(t, format)
		m, err := kernel.Compile(dev, src)
		for i, to := range []**kernel.Kernel{&k.quantize, &k.reduce, &k.dequantize} {
			if err == nil {
				*to, err = m.Kernel(src.Kernels[i].Name)
			}
		}
		if err != nil {
			return fmt.Errorf("kernels for %s in blocks of %s: %w", t, format, err)
		}
		return nil
	})
}

// sourceOf returns the source for a type and a format.
func sourceOf(t, format memory.DType) *kernel.Source {
	p, u, w := kernel.Pointer, kernel.U64, kernel.U32
	src := &kernel.Source{Name: "quant.cu", CUDA: Blocks + kernels, Options: Macros(t, format), Kernels: []kernel.Def{
		{Name: "quantize", Params: []kernel.Param{p, p, p, u, u, w, w, u}, Go: func(c *kernel.Call) { quantize(c, t, format) }},
		{Name: "reduce", Params: []kernel.Param{p, p, p, p, u, u, w, w, w, w, u}, Go: func(c *kernel.Call) { reduce(c, t, format) }},
		{Name: "dequantize", Params: []kernel.Param{p, p, u, u, w, w, u}, Go: func(c *kernel.Call) { dequantize(c, t, format) }},
	}}
	inside.MakeResident(src)
	inside.Declare(src, map[string]string{"quantize": "rww-----", "reduce": "wwrw-------", "dequantize": "wr-----"})
	return src
}

// An Operand is the memory of a rank in an all-reduce of n elements.
type Operand[T memory.Element] struct {
	X      memory.Slice[T]
	Errors memory.Slice[float32] // as long as X, or the zero Slice
	Rank   int
	Ranks  int  // 2 or more
	Mean   bool // divide the sums by the number of ranks
}

// share returns the elements of a share.
func (x *Operand[T]) share() int { return ShareLen(x.X.Len(), x.Ranks) }

// aligned reports whether the kernels may access 16 bytes at once.
func (x *Operand[T]) aligned() uint32 {
	if (x.X.Ptr()|x.errorsPtr())%16 != 0 {
		return 0
	}
	return 1
}

func (x *Operand[T]) errorsPtr() uint64 {
	if x.Errors.Buffer() == nil {
		return 0
	}
	return x.Errors.Ptr()
}

func (x *Operand[T]) errors() kernel.Arg {
	if x.Errors.Buffer() == nil {
		return kernel.Address(0)
	}
	return kernel.Ptr(x.Errors)
}

// tag returns what all ranks must have in common. A rank takes the elements of a chunk with another tag as NaN.
func (k *Kernels) tag(n int, mean bool) kernel.Arg {
	tag := uint64(n)<<8 | uint64(k.index)<<1
	if mean {
		tag++
	}
	return kernel.Scalar(tag)
}

// Quantize enqueues the conversion of the shares that other ranks own to chunks, in rank order
// without the own one. The chunks have tags. First it adds the errors, if there are any; they become the rounding errors.
func Quantize[T memory.Element](k *Kernels, s *stream.Stream, x *Operand[T], chunks memory.Slice[uint8]) error {
	share := x.share()
	return k.quantize.Launch(s, grid(share, x.Ranks-1), kernel.Ptr(x.X), x.errors(), kernel.Ptr(chunks), kernel.Scalar(uint64(x.X.Len())),
		kernel.Scalar(uint64(share)), kernel.Scalar(uint32(x.Rank)), kernel.Scalar(x.aligned()), k.tag(x.X.Len(), x.Mean))
}

// Reduce enqueues the sum of the own share with the chunks of the other ranks, in rank order and in
// float32. The sums become the own share, rounded to blocks,
// and chunk. The rounding errors become the errors of the own share.
func Reduce[T memory.Element](k *Kernels, s *stream.Stream, x *Operand[T], chunks, chunk memory.Slice[uint8]) error {
	share, divide := x.share(), uint32(0)
	if x.Mean {
		divide = 1
	}
	return k.reduce.Launch(s, grid(share, 1), kernel.Ptr(x.X), x.errors(), kernel.Ptr(chunks), kernel.Ptr(chunk), kernel.Scalar(uint64(x.X.Len())),
		kernel.Scalar(uint64(share)), kernel.Scalar(uint32(x.Rank)), kernel.Scalar(uint32(x.Ranks)), kernel.Scalar(divide), kernel.Scalar(x.aligned()), k.tag(x.X.Len(), x.Mean))
}

// Dequantize enqueues the conversion of the chunks of all ranks to elements, except for the own share.
func Dequantize[T memory.Element](k *Kernels, s *stream.Stream, x *Operand[T], chunks memory.Slice[uint8]) error {
	share := x.share()
	return k.dequantize.Launch(s, grid(share, x.Ranks-1), kernel.Ptr(x.X), kernel.Ptr(chunks), kernel.Scalar(uint64(x.X.Len())),
		kernel.Scalar(uint64(share)), kernel.Scalar(uint32(x.Rank)), kernel.Scalar(x.aligned()), k.tag(x.X.Len(), x.Mean))
}

// grid returns the grid for so many chunks.
func grid(share, chunks int) kernel.Grid {
	blocks := min((share+threads*Unit-1)/(threads*Unit), maxBlocks)
	return kernel.Grid{Blocks: [3]uint32{uint32(blocks), uint32(chunks), 1}, Threads: [3]uint32{threads, 1, 1}}
}
