package fabric

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/flight"
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

// EnqueueQuantized enqueues x on s, a stream of the rank's device. TakesQuantized must have returned
// true for it. An operation that is larger than the scratch memory becomes several launches, each
// for a part of all shares.
func (r *Rank) EnqueueQuantized(s *stream.Stream, x *Quantized) error {
	const op = "quantized all-reduce"
	if err := r.Err(); err != nil {
		return err
	}
	if !r.TakesQuantized(x) {
		return r.errorf(op, "%d elements of %s in %s: there is no kernel for that", x.N, x.DType, x.Format)
	}
	share := quant.ShareLen(x.N, r.ranks)
	warps, most := share/quant.WarpLen, min(r.slot, r.whole/r.ranks)/quant.ChunkBytes(quant.WarpLen)
	length := over(warps, over(warps, most)) * quant.WarpLen // the parts are about equal
	for begin := 0; begin < share; begin += length {
		if err := r.enqueueQuantized(s, x, share, begin, min(length, share-begin)); err != nil {
			if err = r.errorf(op, "%w", err); begin > 0 {
				err = &collective.PartialError{Err: err}
			}
			return err
		}
	}
	return nil
}

// The parameters of the operands, from the first of them.
const (
	quantizedX = inParam + iota
	quantizedErrors
	quantizedN
	quantizedShare
	quantizedBegin
	quantizedLength
	quantizedMean
	quantizedAligned
	quantizedParams
)

// enqueueQuantized launches the kernel for length elements of each share.
func (r *Rank) enqueueQuantized(s *stream.Stream, x *Quantized, share, begin, length int) error {
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
	var args [quantizedParams]kernel.Arg
	copy(args[:], r.args[:])
	args[signatureParam] = kernel.Scalar(x.signature(begin))
	copy(args[quantizedX:], []kernel.Arg{kernel.Address(x.X), kernel.Address(x.Errors), kernel.Scalar(uint64(x.N)), kernel.Scalar(uint64(share)),
		kernel.Scalar(uint64(begin)), kernel.Scalar(uint64(length)), kernel.Scalar(mean), kernel.Scalar(aligned)})
	if err := r.order.Begin(gpu.StreamOf(s)); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	g := r.grid(length / quant.Unit)
	if err := k.Launch(s, kernel.Grid{Blocks: [3]uint32{g.blocks, 1, 1}, Threads: [3]uint32{g.threads, 1, 1}}, args[:]...); err != nil {
		return err
	}
	gpu.StreamOf(s).Uses("kernel of a quantized all-reduce", true, x.uses)
	return nil
}

// signature is operation.signature for x.
func (x *Quantized) signature(begin int) uint64 {
	mean := uint64(0)
	if x.Mean {
		mean = 1
	}
	h := scramble(uint64(flight.NumKinds) + 1 | uint64(x.DType)<<16 | uint64(x.Format)<<24 | mean<<32)
	return scramble(scramble(h+uint64(x.N)) + uint64(begin))
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
		linked := append(params()[:inParam:inParam], kernel.Pointer, kernel.Pointer, kernel.U64, kernel.U64, kernel.U64, kernel.U64, kernel.U32, kernel.U32)
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
func reduceQuantized(c *kernel.Call, dtype, format memory.DType) {
	p := meet(c)
	number := func(param int) int { return int(kernel.Get[uint64](c, param)) }
	x := quant.Open(c, dtype, format, c.Address(quantizedX), c.Address(quantizedErrors), number(quantizedN))
	share, begin, length := number(quantizedShare), number(quantizedBegin), number(quantizedLength)
	words := make([]uint64, quant.ChunkBytes(length)/8)
	chunk := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 8*len(words))
	send := func(to []uint64) {
		for i, w := range words {
			p.sendCell(&to[i], w)
		}
	}
	receive := func(from []uint64) {
		for i := range words {
			words[i] = atomic.LoadUint64(&from[i])
		}
	}
	for k := 1; k < p.ranks; k++ {
		x.ToBlocks(chunk, p.after(k)*share+begin, length)
		send(p.from(k, p.rank))
	}
	p.barrier(0)
	chunks := make([][]byte, p.ranks)
	for k := 1; k < p.ranks; k++ {
		receive(p.from(0, p.after(k)))
		chunks[p.after(k)] = append([]byte{}, chunk...)
	}
	x.SumToBlocks(chunk, p.rank*share+begin, length, chunks, kernel.Get[uint32](c, quantizedMean) == 1)
	for k := 1; k < p.ranks; k++ {
		send(p.gathered(k)[p.rank*len(words):])
	}
	p.barrier(1)
	for k := 1; k < p.ranks; k++ {
		receive(p.gathered(0)[p.after(k)*len(words):])
		x.FromBlocks(p.after(k)*share+begin, chunk)
	}
	p.leave()
}
