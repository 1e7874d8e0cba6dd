package comm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/memory"
)

// A QuantizedConfig has the options of AllReduceQuantized; nil means the defaults. Format must be the
// same on all ranks.
type QuantizedConfig struct {
	// Format is the type of the 8-bit numbers: memory.Float8E4M3, which is the default, or
	// memory.Int8. Integers have a smaller error relative to the largest element of a block, and
	// 8-bit floats keep elements that are much smaller than it.
	Format memory.DType
	// Errors has a float32 for each element of each local rank, or is nil. If it is set, the
	// errors are added to the elements before the sum, and then replaced by what the rank's
	// rounding has taken away (error feedback). They begin as zeros, and must not overlap the elements: the call is refused
	// then. Other processes may have none: what their rounding takes away is then lost.
	Errors Shards[float32]
}

// AllReduceQuantized enqueues, in place, the sum or the mean of xs over all ranks, which send
// 8-bit numbers instead of elements. The elements T are float16, bfloat16 or float32. op is Sum or
// Avg. xs has one slice for each local rank, all of the same length. Collective.
//
// Each 32 elements are a block, which has a scale of its own, a power of two, as in the formats
// MXFP8 and MXINT8. So the links carry 33/32 bytes where other all-reduces carry an element.
// Each rank owns a share of the elements. It receives their blocks from the other ranks, and adds them to
// its own elements in float32 and in rank order. Then it rounds the sums to blocks, and sends these to
// all ranks. All ranks get the same bits, and the same call gives the same bits again. They depend on
// the number of ranks and on the length.
//
// The sum S of elements x_r of the ranks r has an error of at most
//
//	u · (Σ M_r + M)
//
// plus the roundings of float32 and of the result's type. M_r is the largest magnitude in the element's
// block on rank r, over all ranks but the owner, and M is the largest of the sums that the owner
// computes for the block. u is 1/17 for 8-bit floats, and 1/127 for integers. Avg divides all of
// that by the number of ranks. For normally distributed elements, the root mean square of the error is about 1.6 %
// of the largest sum of a block with 8-bit floats, and 0.5 % with integers.
//
// A block is not changed if each element is a number of the format
// times a common power of two. So a sum is exact if that is true of its block on each rank and of the
// sums of the block, and if float32 adds them exactly. Multiples of a power of two up to 16 times (127
// times for integers) are such elements. For tiny numbers, a rounding changes up to 2⁻¹³⁷ (2⁻¹²⁸
// for integers) even if that is more than the bound.
//
// If an element is infinite or NaN on one rank, or a sum is too large for T, then its block is NaN
// on all ranks, and its errors on the ranks that notice become 0. Only a finite sum that is rounded
// beyond the largest number of T becomes that number.
//
// With cfg.Errors nothing is lost: the results of any number of calls, plus the errors of all
// ranks, are the sums of all that was given, up to the roundings of float32. A rank's errors are what
// the owner of a share has not received from it, and in its own share what the rounding of the sums has
// taken away. After an error, xs and the errors are undefined.
//
// With the strategies of Chorus kernels and Tuned, Chorus kernels do
// everything, whatever the length, in the group's scratch memory. In other
// groups, in deterministic ones, and where GPUs cannot access each other's
// memory, there are three kernels, and NCCL moves the blocks in an all-to-all
// and an all-gather of bytes. That takes memory for about 33/16 bytes of each
// element from the group's streams until they have passed the call. In both
// cases the bits are the same, and the flight recorder, metrics and the
// timeline show one AllReduceQuantized.
//
// All ranks must give the same op, type, length and format. Ranks of one process that differ get a *nccl.MismatchError at once. Of
// ranks of several processes, those that wait for each other are found within seconds, as with other collectives: the error is a
// *CulpritError that names what both have issued. With Chorus kernels, ranks that differ always wait. If NCCL moves the
// blocks, ranks whose blocks have the same size do not wait. The results then are NaN on all ranks, and usually no error says so.
// Lengths that differ by less than 512·Size may have blocks of the same size.
//
// The call does not wait for the device, and does nothing in a group of one
// rank. The first call for a type and a format compiles the kernels, which
// needs NVRTC on GPUs; without it, the error matches errors.ErrUnsupported, and
// nothing is enqueued. Graphs capture later calls. On GPUs below compute
// capability 8.9 the kernels convert 8-bit floats in software, with the same
// bits.
func AllReduceQuantized[T memory.Element](g *Group, op Op, xs Shards[T], cfg *QuantizedConfig) error {
	const name = "quantized all-reduce"
	c := *cmp.Or(cfg, new(QuantizedConfig))
	if err := checkQuantized(g, name, op, xs, &c); err != nil {
		return err
	}
	if xs[0].Len() == 0 || g.size == 1 {
		return nil
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	ops := make([]collective.Op, len(xs))
	for i := range ops {
		o := &ops[i]
		o.Kind, o.DType, o.Format, o.Reduction, o.Stream = collective.AllReduceQuantized, memory.DTypeOf[T](), c.Format, collective.Reduction(op), g.Stream(i)
		o.Dst, o.Src = collective.OperandOf(xs[i]), collective.OperandOf(xs[i])
	}
	launch, err := g.routers.TakeQuantized(quantizedOperands(op, xs, &c))
	if launch != nil {
		return g.breakIfRefused(g.batch.EnqueueKernels(g.comms(), ops, launch))
	}
	var ranks []quantizedRank[T]
	if err == nil {
		ranks, err = quantizedRanks(g, op == Avg, xs, &c)
	}
	if err == nil {
		err = enqueueQuantized(g, ranks, ops)
	}
	for i := range ranks {
		err = errors.Join(err, ranks[i].blocks.Close(), ranks[i].received.Close())
	}
	if err == nil {
		return nil
	}
	if end := g.err(); end != nil {
		return end
	}
	return fmt.Errorf("comm: %s: %w", name, err)
}

// checkQuantized validates the arguments, and puts in the defaults.
func checkQuantized[T memory.Element](g *Group, name string, op Op, xs Shards[T], c *QuantizedConfig) error {
	if err := checkShards(g, name, xs, true); err != nil {
		return err
	}
	c.Format = cmp.Or(c.Format, memory.Float8E4M3)
	switch t := memory.DTypeOf[T](); {
	case op != Sum && op != Avg:
		return badArgument(name, "the reduction is %s: want %s or %s", op, Sum, Avg)
	case !slices.Contains([]memory.DType{memory.Float16, memory.BFloat16, memory.Float32}, t):
		return badArgument(name, "elements of %s: want float16, bfloat16 or float32", t)
	case c.Format != memory.Float8E4M3 && c.Format != memory.Int8:
		return badArgument(name, "the format is %s: want %s or %s", c.Format, memory.Float8E4M3, memory.Int8)
	case c.Errors == nil:
		return nil
	}
	if err := checkShards(g, name, c.Errors, true); err != nil {
		return err
	}
	if have, want := c.Errors[0].Len(), xs[0].Len(); have != want {
		return badArgument(name, "there are %d errors for %d elements: want one for each", have, want)
	}
	for i := range xs {
		if overlap(xs[i], c.Errors[i]) {
			return badArgument(name, "the elements and the errors of rank %d overlap: want no memory in common", g.members[i].comm.Rank())
		}
	}
	return nil
}

// overlap reports whether two slices of a device share memory.
func overlap[T, U memory.Element](a memory.Slice[T], b memory.Slice[U]) bool {
	end := func(ptr uint64, n int, t memory.DType) uint64 { return ptr + uint64(n*t.Size()) }
	return a.Len() > 0 && b.Len() > 0 && a.Ptr() < end(b.Ptr(), b.Len(), b.DType()) && b.Ptr() < end(a.Ptr(), a.Len(), a.DType())
}

// quantizedOperands returns the operands of the local ranks for Chorus kernels that move the blocks themselves.
func quantizedOperands[T memory.Element](op Op, xs Shards[T], c *QuantizedConfig) []fabric.Quantized {
	own := make([]fabric.Quantized, len(xs))
	for i := range own {
		own[i] = fabric.Quantized{DType: memory.DTypeOf[T](), Format: c.Format, N: xs[i].Len(), X: xs[i].Ptr(), Mean: op == Avg}
		if c.Errors != nil {
			own[i].Errors = c.Errors[i].Ptr()
		}
	}
	return own
}

// A quantizedRank is a local rank of a quantized all-reduce.
type quantizedRank[T memory.Element] struct {
	quant.Operand[T]
	kernels *quant.Kernels
	// blocks has chunks: first those for the other ranks, then those of all sums by rank. received
	// has the chunks of the other ranks.
	blocks, received memory.Slice[uint8]
}

// quantizedRanks loads the kernels and allocates the memory of all local ranks, so that a failure
// comes before other ranks wait for this one. The caller closes the memory, also after an error.
func quantizedRanks[T memory.Element](g *Group, mean bool, xs Shards[T], c *QuantizedConfig) ([]quantizedRank[T], error) {
	ranks := make([]quantizedRank[T], len(g.members))
	chunk := quant.TaggedBytes(quant.ShareLen(xs[0].Len(), g.size))
	for i := range g.members {
		m, r := &g.members[i], &ranks[i]
		r.Operand = quant.Operand[T]{X: xs[i], Rank: m.comm.Rank(), Ranks: g.size, Mean: mean}
		if c.Errors != nil {
			r.Errors = c.Errors[i]
		}
		var err error
		if r.kernels, err = quant.Load(m.comm.Device(), memory.DTypeOf[T](), c.Format); err != nil {
			return ranks, fmt.Errorf("rank %d: %w", r.Rank, err)
		}
		if r.blocks, err = memory.Make[uint8](m.stream, g.size*chunk); err == nil {
			r.received, err = memory.Make[uint8](m.stream, (g.size-1)*chunk)
		}
		if err != nil {
			return ranks, fmt.Errorf("rank %d: %w", r.Rank, err)
		}
	}
	return ranks, nil
}

// enqueueQuantized enqueues the kernels of the local ranks and the copies between them, as one operation of each rank. If the
// last kernels fail, the operation has taken place for the other ranks, and the group stays usable.
func enqueueQuantized[T memory.Element](g *Group, ranks []quantizedRank[T], ops []collective.Op) error {
	each := func(what string, fn func(m *member, r *quantizedRank[T]) error) error {
		for i := range ranks {
			if err := fn(&g.members[i], &ranks[i]); err != nil {
				return fmt.Errorf("%s on rank %d: %w", what, ranks[i].Rank, err)
			}
		}
		return nil
	}
	chunk := ranks[0].blocks.Len() / g.size
	var last error
	err := g.batch.EnqueueSteps(g.comms(), ops, func(move func([]collective.Move) error) error {
		err := each("to blocks", func(m *member, r *quantizedRank[T]) error {
			return quant.Quantize(r.kernels, m.stream, &r.Operand, r.blocks.Slice(0, r.received.Len()))
		})
		if err == nil {
			err = move(exchangeOf(ranks, chunk))
		}
		if err == nil {
			err = each("sums", func(m *member, r *quantizedRank[T]) error {
				return quant.Reduce(r.kernels, m.stream, &r.Operand, r.received, r.blocks.Slice(r.Rank*chunk, (r.Rank+1)*chunk))
			})
		}
		if err == nil {
			err = move(gatherOf(ranks, chunk))
		}
		if err == nil {
			last = each("from blocks", func(m *member, r *quantizedRank[T]) error {
				return quant.Dequantize(r.kernels, m.stream, &r.Operand, r.blocks)
			})
		}
		return err
	})
	return g.breakIfRefused(cmp.Or(err, last))
}

// exchangeOf returns the copies of each rank's blocks to the ranks that own the shares.
func exchangeOf[T memory.Element](ranks []quantizedRank[T], chunk int) (list []collective.Move) {
	for i := range ranks {
		r := &ranks[i]
		for at := range r.Ranks - 1 {
			peer, from := at, uint64(at*chunk)
			if at >= r.Rank {
				peer++
			}
			list = append(list, collective.Move{Operation: i, Kind: collective.Send, Peer: peer, Src: r.blocks.Ptr() + from, Bytes: chunk},
				collective.Move{Operation: i, Kind: collective.Recv, Peer: peer, Dst: r.received.Ptr() + from, Bytes: chunk})
		}
	}
	return list
}

// gatherOf returns the copies of the sums to all ranks.
func gatherOf[T memory.Element](ranks []quantizedRank[T], chunk int) (list []collective.Move) {
	for i := range ranks {
		r := &ranks[i]
		list = append(list, collective.Move{Operation: i, Kind: collective.AllGather, Src: r.blocks.Ptr() + uint64(r.Rank*chunk), Dst: r.blocks.Ptr(), Bytes: chunk})
	}
	return list
}
