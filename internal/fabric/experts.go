package fabric

import (
	"errors"
	"fmt"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An ExpertLayer describes a layer of experts, and a rank in it. The experts are divided among the ranks in order.
type ExpertLayer struct {
	DType       memory.DType // of rows: float16, bfloat16 or float32
	Experts     int          // of all ranks, a multiple of their number
	TopK        int          // choices of a token
	Hidden      int          // elements of a row
	MaxTokens   int          // of a rank in a call
	Small       bool         // dispatched rows travel as blocks of 8-bit floats
	Rank, Ranks int
}

// maxChoices is the number of lanes of a warp, each of which has a choice.
const maxChoices = warp

// Check returns an error unless the kernels support x.
func (x *ExpertLayer) Check() error {
	unit := 1
	if normFormatOf(x.DType) != nil {
		unit = cellBytes / x.DType.Size()
	}
	if x.Small {
		unit = max(unit, quant.BlockLen)
	}
	switch {
	case normFormatOf(x.DType) == nil:
		return fmt.Errorf("elements of %s: want float16, bfloat16 or float32", x.DType)
	case x.Experts < 1 || x.Experts%x.Ranks != 0:
		return fmt.Errorf("%d experts for %d ranks: want 1 or more, and a multiple of the number of ranks", x.Experts, x.Ranks)
	case x.TopK < 1 || x.TopK > maxChoices:
		return fmt.Errorf("%d experts for each token: want 1 to %d", x.TopK, maxChoices)
	case x.Hidden < 1 || x.Hidden%unit != 0:
		return fmt.Errorf("rows of %d elements of %s: want 1 or more, and a multiple of %d", x.Hidden, x.DType, unit)
	case x.MaxTokens < 1:
		return fmt.Errorf("at most %d tokens of a rank: want 1 or more", x.MaxTokens)
	}
	// Above 2⁴⁸ bytes no device has the memory. The factors are smaller than that, so the products do not overflow.
	total := 1.0
	for _, n := range []int{x.Ranks, x.MaxTokens, x.TopK, x.Hidden, x.DType.Size()} {
		total *= float64(n)
	}
	if total > 1<<48 || x.Ranks*x.MaxTokens*x.TopK > math.MaxInt32 || x.Hidden > math.MaxInt32 || x.Experts > math.MaxInt32 {
		return fmt.Errorf("%d ranks with %d tokens of %d elements for %d of %d experts: want fewer than 2³¹ choices and 2⁴⁸ bytes", x.Ranks, x.MaxTokens, x.Hidden, x.TopK, x.Experts)
	}
	return nil
}

// Own returns the number of experts of a rank, and Capacity the number of rows that an expert may get.
func (x *ExpertLayer) Own() int      { return x.Experts / x.Ranks }
func (x *ExpertLayer) Capacity() int { return x.Ranks * x.MaxTokens }

// DispatchBytes returns how much a rank sends to each other one in a dispatch, and CombineBytes in a combine: whole cells.
func (x *ExpertLayer) DispatchBytes() int {
	return over(x.weightedAt()+4, cellBytes) * cellBytes
}
func (x *ExpertLayer) CombineBytes() int { return x.MaxTokens * x.seats() * x.elementBytes() }

// SlotBytes returns how many bytes the slots of a rank need. Slots also have the places of rows, and the numbers of rows of the own experts.
func (x *ExpertLayer) SlotBytes() int {
	return max(x.weightedAt()+4+4*x.MaxTokens*x.TopK+4*x.Own(), x.CombineBytes())
}

// The methods of Shape in experts.cu.

func (x *ExpertLayer) seats() int        { return min(x.Own(), x.TopK) }
func (x *ExpertLayer) elementBytes() int { return x.Hidden * x.DType.Size() }
func (x *ExpertLayer) rowBytes() int {
	if x.Small {
		return over(quant.ChunkBytes(x.Hidden), cellBytes) * cellBytes
	}
	return x.elementBytes()
}
func (x *ExpertLayer) idsAt() int      { return x.MaxTokens * x.rowBytes() }
func (x *ExpertLayer) weightsAt() int  { return x.idsAt() + 4*x.MaxTokens*x.TopK }
func (x *ExpertLayer) weightedAt() int { return x.weightsAt() + 4*x.MaxTokens*x.TopK }

// A Dispatch has the addresses of the operands of a dispatch. Weights may be 0, also on some ranks only.
type Dispatch struct {
	Tokens               int
	X, IDs, Weights      uint64 // [Tokens Hidden], int32 and float32 [Tokens TopK]
	Rows, Counts, Routes uint64 // [own capacity Hidden], int32 [own] and [ranks MaxTokens TopK]
}

// A Combine has the addresses of the operands of a combine. Weights and Rows may be 0.
type Combine struct {
	Tokens    int
	Y, Routes uint64 // as Rows and Routes of the dispatch
	Weights   uint64 // float32 [Tokens TopK]
	Out, Rows uint64 // [Tokens Hidden], [Tokens TopK Hidden]
}

// An expertsFn identifies a kernel of experts.cu.
type expertsFn int

const (
	dispatchFn expertsFn = iota
	combineFn
	dispatchPackFn
	combinePackFn
	dispatchReceiveFn
	combineReceiveFn
)

// expertsKernel returns a kernel, which NVRTC compiles. Ranks beyond the maximum of Chorus kernels use those that need no other rank.
func (x *ExpertLayer) expertsKernel(dev *device.Device, fn expertsFn) (*kernel.Kernel, error) {
	ranks := x.Ranks
	if ranks < 2 || ranks > maxRanks {
		ranks = addNormRanks
	}
	t, f := tools(dev, ranks), normFormatOf(x.DType)
	return t.kernel(&t.experts[f.index], int(fn), func() ([]*kernel.Kernel, error) { return x.compileExperts(dev, t, expertsSource) })
}

// compileExperts returns the kernels of a source for the number of ranks of t.
func (x *ExpertLayer) compileExperts(dev *device.Device, t *toolbox, source string) ([]*kernel.Kernel, error) {
	p, w, u, f := kernel.Pointer, kernel.U32, kernel.U64, normFormatOf(x.DType)
	layer := []kernel.Param{w, w, w, w, w}
	list := func(head []kernel.Param, rest ...kernel.Param) []kernel.Param {
		return append(head[:len(head):len(head)], rest...)
	}
	links, shape := params()[:inParam:inParam], list([]kernel.Param{w, w}, layer...)
	ks, err := compile(dev, &kernel.Source{Name: "experts.cu", CUDA: source, Options: t.exactly(quant.Macros(x.DType, memory.Float8E4M3)), Kernels: []kernel.Def{
		{Name: "dispatch", Params: list(list(links, p, p, p, w, p, p, p), layer...), Go: f.dispatch},
		{Name: "combine", Params: list(list(links, p, p, p, p, p, w), layer...), Go: f.combine},
		{Name: "dispatch_pack", Params: list([]kernel.Param{p, p, p, p, w}, shape...), Go: f.dispatchPack},
		{Name: "combine_pack", Params: list([]kernel.Param{p, p, p, u}, shape...), Go: f.combinePack},
		{Name: "dispatch_receive", Params: list([]kernel.Param{p, u, p, p, p}, shape...), Go: f.dispatchReceive},
		{Name: "combine_receive", Params: list([]kernel.Param{p, u, p, p, p, p, w}, shape...), Go: f.combineReceive},
	}})
	if err != nil {
		return nil, fmt.Errorf("fabric: dispatch and combine of %s: %w", x.DType, err)
	}
	return ks, nil
}

// LoadExperts loads the kernels for x, so that a failure comes before an operation is enqueued.
func LoadExperts(dev *device.Device, x *ExpertLayer) error {
	_, err := x.expertsKernel(dev, dispatchFn)
	return err
}

// layer returns the arguments that follow those of the rank, and shape those with the rank.
func (x *ExpertLayer) layer() []kernel.Arg {
	small := uint32(0)
	if x.Small {
		small = 1
	}
	return []kernel.Arg{kernel.Scalar(uint32(x.Experts)), kernel.Scalar(uint32(x.TopK)), kernel.Scalar(uint32(x.Hidden)), kernel.Scalar(uint32(x.MaxTokens)), kernel.Scalar(small)}
}

func (x *ExpertLayer) shape() []kernel.Arg {
	return append([]kernel.Arg{kernel.Scalar(uint32(x.Rank)), kernel.Scalar(uint32(x.Ranks))}, x.layer()...)
}

// expertsThreads is the number of threads of a block, and expertsBlocks the maximum of blocks of a kernel that does not wait for
// other ranks. A kernel that does has at most a block for each multiprocessor.
const (
	expertsThreads = maxThreads
	expertsBlocks  = 256
)

// launch launches a kernel, whose blocks have tokens.
func (x *ExpertLayer) launch(s *stream.Stream, fn expertsFn, g grid, args ...kernel.Arg) error {
	k, err := x.expertsKernel(s.Device(), fn)
	if err != nil {
		return err
	}
	return k.Launch(s, kernel.Grid{Blocks: [3]uint32{g.blocks, 1, 1}, Threads: [3]uint32{g.threads, 1, 1}}, args...)
}

// grid returns a block for each of the tokens of a rank, up to a number of blocks.
func (x *ExpertLayer) grid(blocks int) grid {
	return grid{uint32(min(x.MaxTokens, blocks)), expertsThreads}
}

// expertsGrid is the same on all ranks, because a block receives what the blocks of its index send.
func (r *Rank) expertsGrid(x *ExpertLayer) grid {
	if r.forced.threads != 0 {
		return r.forced
	}
	return x.grid(r.blocks)
}

// Dispatch enqueues a dispatch on s, a stream of the rank's device. The rank's
// slots must have x.SlotBytes or more.
func (r *Rank) Dispatch(s *stream.Stream, x *ExpertLayer, d *Dispatch) error {
	return r.exchange(s, x, "dispatch", dispatchFn, d.uses(x), kernel.Address(d.X), kernel.Address(d.IDs), kernel.Address(d.Weights), kernel.Scalar(uint32(d.Tokens)),
		kernel.Address(d.Rows), kernel.Address(d.Counts), kernel.Address(d.Routes))
}

// Combine is Dispatch for a combine.
func (r *Rank) Combine(s *stream.Stream, x *ExpertLayer, c *Combine) error {
	return r.exchange(s, x, "combine", combineFn, c.uses(x), kernel.Address(c.Y), kernel.Address(c.Routes), kernel.Address(c.Weights),
		kernel.Address(c.Out), kernel.Address(c.Rows), kernel.Scalar(uint32(c.Tokens)))
}

// exchange launches a kernel with these operands.
func (r *Rank) exchange(s *stream.Stream, x *ExpertLayer, op string, fn expertsFn, uses []cudadrv.Use, operands ...kernel.Arg) error {
	if err := r.Err(); err != nil {
		return err
	}
	if x.Rank != r.rank || x.Ranks != r.ranks || r.ranks < 2 || x.SlotBytes() > r.slot {
		return r.errorf(op, "%d tokens of %d elements for rank %d of %d: the rank was not opened for that", x.MaxTokens, x.Hidden, x.Rank, x.Ranks)
	}
	if err := gpu.StreamOf(s).Captured(r); err != nil {
		return r.errorf(op, "%w", err)
	}
	args := append(append([]kernel.Arg{}, r.args[:]...), kernel.Scalar(x.signature(fn)))
	args = append(append(args, operands...), x.layer()...)
	if err := r.order.Begin(gpu.StreamOf(s)); err != nil {
		return errors.Join(r.Err(), err)
	}
	defer r.order.End()
	if err := r.Err(); err != nil {
		return err
	}
	if err := x.launch(s, fn, r.expertsGrid(x), args...); err != nil {
		return r.errorf(op, "%w", err)
	}
	gpu.StreamOf(s).Uses("kernel of a "+op, true, func() []cudadrv.Use { return uses })
	return nil
}

// signature is operation.signature for a kernel.
func (x *ExpertLayer) signature(fn expertsFn) uint64 {
	small := uint64(0)
	if x.Small {
		small = 1
	}
	h := scramble(uint64(collective.NumKinds) + 2 + uint64(fn) | uint64(x.DType)<<16 | small<<24 | uint64(x.TopK)<<32)
	return scramble(scramble(scramble(h+uint64(x.Hidden))+uint64(x.MaxTokens)) + uint64(x.Experts))
}

// PackDispatch enqueues what the rank sends to all others, in DispatchBytes at
// to. ReceiveDispatch enqueues the rest of the dispatch, when the bytes of all
// ranks are at in, by rank. Neither communicates with other ranks.
func (x *ExpertLayer) PackDispatch(s *stream.Stream, d *Dispatch, to uint64) error {
	return x.launch(s, dispatchPackFn, x.grid(expertsBlocks), append([]kernel.Arg{
		kernel.Address(d.X), kernel.Address(d.IDs), kernel.Address(d.Weights), kernel.Address(to), kernel.Scalar(uint32(d.Tokens))}, x.shape()...)...)
}

// ReceiveDispatch is documented at PackDispatch.
func (x *ExpertLayer) ReceiveDispatch(s *stream.Stream, d *Dispatch, in uint64) error {
	err := x.launch(s, dispatchReceiveFn, x.grid(expertsBlocks), append([]kernel.Arg{
		kernel.Address(in), kernel.Scalar(uint64(x.DispatchBytes())), kernel.Address(d.Rows), kernel.Address(d.Counts), kernel.Address(d.Routes)}, x.shape()...)...)
	if err == nil {
		gpu.StreamOf(s).Uses("kernels of a dispatch", false, func() []cudadrv.Use { return d.uses(x) })
	}
	return err
}

// PackCombine enqueues what the rank sends to each rank, in CombineBytes from to on. ReceiveCombine enqueues the rest of the combine,
// when the bytes from each rank are at in, by rank.
func (x *ExpertLayer) PackCombine(s *stream.Stream, c *Combine, to uint64) error {
	return x.launch(s, combinePackFn, x.grid(expertsBlocks), append([]kernel.Arg{
		kernel.Address(c.Y), kernel.Address(c.Routes), kernel.Address(to), kernel.Scalar(uint64(x.CombineBytes()))}, x.shape()...)...)
}

// ReceiveCombine is documented at PackCombine.
func (x *ExpertLayer) ReceiveCombine(s *stream.Stream, c *Combine, in uint64) error {
	err := x.launch(s, combineReceiveFn, x.grid(expertsBlocks), append([]kernel.Arg{
		kernel.Address(in), kernel.Scalar(uint64(x.CombineBytes())), kernel.Address(c.Routes), kernel.Address(c.Weights), kernel.Address(c.Out), kernel.Address(c.Rows),
		kernel.Scalar(uint32(c.Tokens))}, x.shape()...)...)
	if err == nil {
		gpu.StreamOf(s).Uses("kernels of a combine", false, func() []cudadrv.Use { return c.uses(x) })
	}
	return err
}

// uses lists the operands, for the sanitizer.
func (d *Dispatch) uses(x *ExpertLayer) []cudadrv.Use {
	choices := 4 * x.TopK
	return usesOf(
		cudadrv.Use{Ptr: cudadrv.DevicePtr(d.X), Bytes: uint64(d.Tokens * x.elementBytes())},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(d.IDs), Bytes: uint64(d.Tokens * choices)},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(d.Weights), Bytes: uint64(d.Tokens * choices)},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(d.Rows), Bytes: uint64(x.Own() * x.Capacity() * x.elementBytes()), Write: true},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(d.Counts), Bytes: uint64(4 * x.Own()), Write: true},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(d.Routes), Bytes: uint64(x.Capacity() * choices), Write: true},
	)
}

func (c *Combine) uses(x *ExpertLayer) []cudadrv.Use {
	choices := 4 * x.TopK
	return usesOf(
		cudadrv.Use{Ptr: cudadrv.DevicePtr(c.Y), Bytes: uint64(x.Own() * x.Capacity() * x.elementBytes())},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(c.Routes), Bytes: uint64(x.Capacity() * choices)},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(c.Weights), Bytes: uint64(c.Tokens * choices)},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(c.Out), Bytes: uint64(c.Tokens * x.elementBytes()), Write: true},
		cudadrv.Use{Ptr: cudadrv.DevicePtr(c.Rows), Bytes: uint64(c.Tokens * x.TopK * x.elementBytes()), Write: true},
	)
}

// usesOf returns the uses of operands that are given.
func usesOf(all ...cudadrv.Use) (list []cudadrv.Use) {
	for _, u := range all {
		if u.Ptr != 0 && u.Bytes > 0 {
			list = append(list, u)
		}
	}
	return list
}
