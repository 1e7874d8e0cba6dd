package fabric

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Quantized is an all-reduce in place whose ranks send blocks of 8-bit numbers (see package
// quant). Its bits are those of the kernels of that package.
type Quantized struct {
	DType, Format memory.DType // of the elements and of the 8-bit numbers
	N             int
	X, Errors     uint64 // the addresses of N elements, and of N float32 or 0
	Mean          bool   // divide by the number of ranks
}

// TakesQuantized reports whether EnqueueQuantized supports x, the same on all ranks.
func (r *Rank) TakesQuantized(x *Quantized) bool {
	return r.ranks > 1 && x.N > 0 && quant.Supports(x.DType, x.Format)
}

// LoadQuantized loads the kernel of EnqueueQuantized, so that a failure comes before an operation is
// enqueued.
func (r *Rank) LoadQuantized(x *Quantized) error {
	_, err := tools(r.dev, r.ranks).quantizer(r.dev, x)
	return err
}

// EnqueueQuantized enqueues x on s, a stream of the rank's device, and fails
// unless TakesQuantized returns true for x.
func (r *Rank) EnqueueQuantized(s *stream.Stream, x *Quantized) error {
	const op = "quantized all-reduce"
	if err := r.Err(); err != nil {
		return err
	}
	if !r.TakesQuantized(x) {
		return r.errorf(op, "%d elements of %s in %s: there is no kernel for that", x.N, x.DType, x.Format)
	}
	if err := r.enqueueQuantized(s, x); err != nil {
		return r.errorf(op, "%w", err)
	}
	return nil
}

const (
	// quantizedAlone is the number of elements up to which the shares are one chunk, if the scratch memory has room: with so few, more
	// chunks would save less than their steps take.
	quantizedAlone = 4 << 20
	// quantizedChunk is the number of elements of the chunks of larger operations, of all ranks together.
	quantizedChunk = 2 << 20
)

// quantizedChunks returns how many elements of a share are in a chunk, and the grid. Several chunks are about equal, and a
// thread has at most one unit of each part of a chunk.
func (r *Rank) quantizedChunks(n int) (length int, g grid) {
	share := quant.ShareLen(n, r.ranks)
	room := min(r.slot, r.whole/r.ranks)
	if n <= quantizedAlone && quant.ChunkBytes(share) <= room {
		return share, r.grid(share / quant.Unit)
	}
	warps := share / quant.WarpLen
	most := min(room/4/quant.ChunkBytes(quant.WarpLen), quantizedChunk/r.ranks/quant.WarpLen, r.blocks*(maxThreads/warp-1))
	length = over(warps, over(warps, most)) * quant.WarpLen
	if g = r.forced; g.threads == 0 {
		units := length / quant.Unit
		g.threads = uint32(over(over(units, r.blocks), warp) * warp)
		g.blocks = uint32(over(units, int(g.threads)))
	}
	g.threads = min(g.threads+warp, maxThreads) // the first warp moves no data
	return length, g
}

// The parameters of the operands, from the first of them.
const (
	quantizedX = inParam + iota
	quantizedErrors
	quantizedN
	quantizedShare
	quantizedLength
	quantizedMean
	quantizedAligned
	quantizedParams
)

// enqueueQuantized launches the kernel.
func (r *Rank) enqueueQuantized(s *stream.Stream, x *Quantized) error {
	k, err := tools(r.dev, r.ranks).quantizer(r.dev, x)
	if err != nil {
		return err
	}
	if err := gpu.StreamOf(s).Captured(r); err != nil {
		return err
	}
	mean, aligned := uint32(0), uint32(0)
	if x.Mean {
		mean = 1
	}
	if (x.X|x.Errors)%16 == 0 {
		aligned = 1
	}
	length, g := r.quantizedChunks(x.N)
	var args [quantizedParams]kernel.Arg
	copy(args[:], r.args[:])
	args[signatureParam] = kernel.Scalar(x.signature())
	copy(args[quantizedX:], []kernel.Arg{kernel.Address(x.X), kernel.Address(x.Errors), kernel.Scalar(uint64(x.N)), kernel.Scalar(uint64(quant.ShareLen(x.N, r.ranks))),
		kernel.Scalar(uint64(length)), kernel.Scalar(mean), kernel.Scalar(aligned)})
	if err := r.order.Begin(gpu.StreamOf(s)); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	if err := k.Launch(s, kernel.Grid{Blocks: [3]uint32{g.blocks, 1, 1}, Threads: [3]uint32{g.threads, 1, 1}}, args[:]...); err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of a quantized all-reduce", true, x.uses)
	return nil
}

// signature is operation.signature for x.
func (x *Quantized) signature() uint64 {
	mean := uint64(0)
	if x.Mean {
		mean = 1
	}
	return scramble(scramble(uint64(collective.NumKinds)+1|uint64(x.DType)<<16|uint64(x.Format)<<24|mean<<32) + uint64(x.N))
}

// uses lists the operands, for the sanitizer.
func (x *Quantized) uses() []cudadrv.Use {
	list := []cudadrv.Use{{Ptr: cudadrv.DevicePtr(x.X), Bytes: uint64(x.N * x.DType.Size()), Write: true}}
	if x.Errors != 0 {
		list = append(list, cudadrv.Use{Ptr: cudadrv.DevicePtr(x.Errors), Bytes: uint64(4 * x.N), Write: true})
	}
	return list
}

// quantizer returns the kernel for x, which NVRTC compiles.
func (t *toolbox) quantizer(dev *device.Device, x *Quantized) (*kernel.Kernel, error) {
	dtype, format, wide := x.DType, x.Format, 0
	if format == memory.Int8 {
		wide = 1
	}
	return t.kernel(&t.quantized[normFormatOf(dtype).index][wide], 0, func() ([]*kernel.Kernel, error) {
		linked := append(params()[:inParam:inParam], kernel.Pointer, kernel.Pointer, kernel.U64, kernel.U64, kernel.U64, kernel.U32, kernel.U32)
		ks, err := compile(dev, &kernel.Source{Name: "quantized.cu", CUDA: quantizedSource, Options: t.exactly(quant.Macros(dtype, format)), Kernels: []kernel.Def{
			{Name: "all_reduce_quantized", Params: linked, Go: func(c *kernel.Call) { reduceQuantized(c, dtype, format) }},
		}})
		if err != nil {
			return nil, fmt.Errorf("fabric: the all-reduce of %s in %s: %w", dtype, format, err)
		}
		return ks, nil
	})
}

// reduceQuantized implements the kernel in Go, for virtual devices.
func reduceQuantized(k *kernel.Call, dtype, format memory.DType) {
	number := func(param int) int { return int(kernel.Get[uint64](k, param)) }
	x := quant.Open(k, dtype, format, k.Address(quantizedX), k.Address(quantizedErrors), number(quantizedN))
	share, length := number(quantizedShare), number(quantizedLength)
	c := &chunked{party: meet(k), step: length}
	c.bytes, c.aligned = share, kernel.Get[uint32](k, quantizedAligned) != 0
	words := make([]uint64, quant.ChunkBytes(length)/8)
	// of returns the part of rank r of chunk n, and the memory for its blocks.
	of := func(n, r int) (at, elements int, chunk []byte) {
		elements = min(length, share-n*length)
		return r*share + n*length, elements, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), quant.ChunkBytes(elements))
	}
	send := func(to []uint64) {
		for i, w := range words {
			c.sendCell(&to[i], w)
		}
	}
	receive := func(from []uint64) {
		for i := range words {
			words[i] = atomic.LoadUint64(&from[i])
		}
	}
	c.run(2, func(n, count int) {
		for k := 1; k < c.ranks && n < count; k++ {
			at, elements, chunk := of(n, c.after(k))
			x.ToBlocks(chunk, at, elements)
			send(c.slotOf(k, c.rank, n))
		}
		if n > 0 && n <= count {
			at, elements, chunk := of(n-1, c.rank)
			chunks := make([][]byte, c.ranks)
			for k := 1; k < c.ranks; k++ {
				receive(c.slotOf(0, c.after(k), n-1))
				chunks[c.after(k)] = slices.Clone(chunk)
			}
			x.SumToBlocks(chunk, at, elements, chunks, kernel.Get[uint32](c.c, quantizedMean) == 1)
			for k := 1; k < c.ranks; k++ {
				send(c.gatheredOf(k, n-1)[c.rank*len(words):])
			}
		}
		for k := 1; k < c.ranks && n > 1; k++ {
			at, _, chunk := of(n-2, c.after(k))
			receive(c.gatheredOf(0, n-2)[c.after(k)*len(words):])
			x.FromBlocks(at, chunk)
		}
	})
}
