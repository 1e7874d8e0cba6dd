package nccl

import (
	"fmt"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/mem"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
)

// An Op is a reduction (ncclRedOp_t): one of the constants, or PreMulSum.Op.
type Op int32

// The reductions. Avg divides the sum by the number of ranks. For bools, whose bytes must
// be 0 or 1, Sum and Max return true if any rank has true, and Prod and Min if all ranks
// have true, as in torch.distributed. Bools have no Avg.
const (
	Sum  = Op(ncclapi.Sum)
	Prod = Op(ncclapi.Prod)
	Max  = Op(ncclapi.Max)
	Min  = Op(ncclapi.Min)
	Avg  = Op(ncclapi.Avg)
)

// String returns NCCL's name of the reduction, such as "sum".
func (o Op) String() string { return flight.Reduction(o).String() }

// A PreMulSum is a sum that first multiplies each rank's elements by that rank's factor
// (ncclRedOpCreatePreMulSum), for example to scale gradients.
type PreMulSum struct {
	owner handle.Owner
	comm  *Communicator
	op    ncclapi.RedOp
	dtype memory.DType
}

// NewPreMulSum makes a reduction for operations of c on elements of T, with this rank's
// factor. The ranks may have different factors. Close it after the last operation that
// uses it is enqueued; the end of c closes it too. NewPreMulSum enqueues nothing and is
// not collective.
func NewPreMulSum[T memory.Element](c *Communicator, factor T) (*PreMulSum, error) {
	return c.newPreMulSum(memory.DTypeOf[T](), unsafe.Pointer(&factor), ncclapi.ScalarHostImmediate)
}

// NewPreMulSumFrom is NewPreMulSum with a factor in device memory, one element,
// which operations read when they run. It must stay allocated until the last of
// them has completed.
func NewPreMulSumFrom[T memory.Element](c *Communicator, factor memory.Slice[T]) (*PreMulSum, error) {
	const op = "nccl: ncclRedOpCreatePreMulSum"
	if err := c.checkUsable("ncclRedOpCreatePreMulSum"); err != nil {
		return nil, err
	}
	if factor.Len() != 1 {
		return nil, fmt.Errorf("%s on rank %d of %d: the factor has %d elements: want 1", op, c.rank, c.size, factor.Len())
	}
	if err := mem.Check(op, factor.Buffer(), factor.Len(), c.dev); err != nil {
		return nil, err
	}
	return c.newPreMulSum(factor.DType(), dl.Pointer(factor.Ptr()), ncclapi.ScalarDevice)
}

func (c *Communicator) newPreMulSum(t memory.DType, scalar unsafe.Pointer, residence int32) (*PreMulSum, error) {
	const name = "ncclRedOpCreatePreMulSum"
	if err := c.checkUsable(name); err != nil {
		return nil, err
	}
	w := wireTypes[t]
	if !w.sums || t == memory.Bool {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: NCCL cannot multiply %s", name, c.rank, c.size, t)
	}
	if c.version < w.since {
		return nil, needs("nccl: "+name+" of "+t.String(), w.since, c.version)
	}
	p := &PreMulSum{comm: c, dtype: t}
	if err := c.enter(name); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	var r ncclapi.Result
	p.op, r = c.api.RedOpCreatePreMulSum(scalar, w.reduce, residence, *c.h)
	if err := c.check(name, r); err != nil {
		return nil, err
	}
	c.sums.Store(Op(p.op), factorOf(t, scalar, residence))
	handle.Init(p, &p.owner, handle.About{Kind: "pre-multiplied sum", On: c.dev})
	return p, nil
}

// A factor is the factor of a PreMulSum: one element in bits, or at a device address.
type factor struct {
	dtype    memory.DType
	bits, at uint64
}

func factorOf(t memory.DType, scalar unsafe.Pointer, residence int32) factor {
	f := factor{dtype: t}
	if residence == ncclapi.ScalarDevice {
		f.at = uint64(uintptr(scalar))
		return f
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&f.bits)), t.Size()), unsafe.Slice((*byte)(scalar), t.Size()))
	return f
}

// Op returns the reduction, for operations of its communicator.
func (p *PreMulSum) Op() Op { return Op(p.op) }

// Close frees the reduction (ncclRedOpDestroy). It does not affect operations that are
// already enqueued. Close is idempotent, and does nothing after the end of the
// communicator.
func (p *PreMulSum) Close() error {
	const name = "ncclRedOpDestroy"
	if p == nil || !p.owner.Close() {
		return nil
	}
	c := p.comm
	c.sums.Delete(p.Op())
	if err := c.enter(name); err != nil {
		return c.ignoreIfClosed(err)
	}
	defer c.mu.Unlock()
	return c.check(name, c.api.RedOpDestroy(p.op, *c.h))
}

// oneRankParts returns how many elements of an operation of a single rank with a PreMulSum NCCL must
// get at first; it gets the others in a second operation. NCCL 2.28's kernel (oneRankReduce) divides
// the elements evenly among its blocks and rounds the parts down to whole packs of 16 bytes, so that it omits the
// last elements, unless the parts are whole packs.
func oneRankParts(n, size uintptr) (first uintptr) {
	const mostBlocks, blockBytes, pack = 32, 16 << 10, 16
	for {
		blocks := min(mostBlocks, (n*size+blockBytes-1)/blockBytes)
		if blocks <= 1 {
			return n
		}
		rest := n % (blocks * pack / size)
		if rest == 0 {
			return n
		}
		n -= rest
	}
}

// inOneRankParts calls reduce for each part of a reduction.
func (o *operation) inOneRankParts(from, to cudadrv.DevicePtr, n uintptr, reduce func(from, to cudadrv.DevicePtr, n uintptr) ncclapi.Result) ncclapi.Result {
	if o.comm.size > 1 || o.redop <= ncclapi.Avg {
		return reduce(from, to, n)
	}
	size := o.wire.Size()
	first := oneRankParts(n, size)
	if r := reduce(from, to, first); r != ncclapi.Success || first == n {
		return r
	}
	at := cudadrv.DevicePtr(first * size)
	return reduce(from+at, to+at, n-first)
}

// setWireType determines NCCL's type and reduction for the operation, and validates them.
func (o *operation) setWireType(reduces bool) error {
	w := &wireTypes[o.DType]
	o.unit = 1
	if !reduces {
		if o.wire = w.move; o.wire == ncclapi.Uint8 {
			o.unit = o.DType.Size()
		}
		return nil
	}
	o.wire, o.redop = w.reduce, ncclapi.RedOp(o.Reduction)
	if w.sums && w.since <= o.comm.version && uint(o.Reduction) < uint(Avg) && o.DType != memory.Bool {
		return nil
	}
	return o.checkReduction(w)
}

// checkReduction is translate for unusual types and reductions.
func (o *operation) checkReduction(w *wireType) error {
	c, op := o.comm, Op(o.Reduction)
	at := func() string { return fmt.Sprintf("nccl: %s on rank %d of %d", o.Kind, c.rank, c.size) }
	if !w.sums {
		return fmt.Errorf("%s: NCCL cannot reduce %s", at(), o.DType)
	}
	if c.version < w.since {
		return needs(at()+" of "+o.DType.String(), w.since, c.version)
	}
	if op < Sum || op > Avg {
		v, ok := c.sums.Load(op)
		switch f, _ := v.(factor); {
		case !ok:
			return fmt.Errorf("%s: %s is not a reduction of this communicator: want sum, prod, max, min, avg or an open PreMulSum", at(), op)
		case f.dtype != o.DType:
			return fmt.Errorf("%s: %s is a reduction of %s and not of %s", at(), op, f.dtype, o.DType)
		}
		return nil
	}
	switch {
	case o.DType == memory.Bool && op == Avg:
		return fmt.Errorf("%s: bools have no average: want sum or max, prod or min", at())
	case o.DType == memory.Bool && op == Sum:
		o.redop = ncclapi.Max
	case op == Avg && c.size == 1:
		// NCCL 2.28 refuses the mean of 8-bit floats of a single rank, and corrupts the
		// last of an odd number of 16-bit floats.
		o.redop = ncclapi.Sum
	}
	return nil
}
