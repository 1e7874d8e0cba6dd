package route

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
)

// An Order is the order of the ranks in reductions. The elements of each Block ranks are
// reduced in rank order, and then the results of the blocks in their order. 0 means one block.
type Order struct {
	Block int
	// Hosts says that the ranks of each block are on one host, and that there are several hosts.
	Hosts bool
	// OnRequest reduces only the batches of Batch.ReduceInOrder deterministically.
	OnRequest bool
}

// orderedBytes is the size of the memory in which a rank receives the elements of the others.
var orderedBytes = 64 << 20

// pieceBytes is the maximum size of an all-reduce that Chorus kernels execute at once in rank order.
var pieceBytes = MostBytes

// alwaysStaged treats each block as a host.
var alwaysStaged = false

// SetStaged lets routers that are opened from now on treat each block as a host, in tests.
func SetStaged(on bool) (restore func()) {
	old := alwaysStaged
	alwaysStaged = on
	return func() { alwaysStaged = old }
}

// SetOrderedBytes changes the memory and the pieces of routers that are opened from now on, in tests.
func SetOrderedBytes(n int) (restore func()) {
	memory, piece := orderedBytes, pieceBytes
	orderedBytes, pieceBytes = n, n
	return func() { orderedBytes, pieceBytes = memory, piece }
}

// An ordered is the part of a router that reduces in rank order, if Chorus kernels do
// not. NCCL moves the elements of all ranks to the rank that reduces them, and a kernel of
// internal/fabric reduces. NCCL computes nothing, so its algorithms do not change the results.
type ordered struct {
	block   int
	piece   int                 // the value of pieceBytes
	request bool                // only for batches that request it
	staged  bool                // blocks are reduced within their hosts first
	scratch memory.Slice[uint8] // of the elements of the other ranks
	order   gpu.Sequence        // serializes the operations, which share the memory
}

// openOrdered allocates the memory of the local ranks.
func (rs Routers) openOrdered(o Order) error {
	for _, r := range rs {
		block := o.Block
		if size := r.comm.Size(); block == 0 || block > size {
			block = size
		}
		mem, err := memory.Make[uint8](r.stream, max(orderedBytes, r.comm.Size()*16*unit)+r.comm.Size()*unit)
		if err != nil {
			return r.withRankName(fmt.Errorf("memory of deterministic reductions: %w", err))
		}
		r.ordered = &ordered{block: block, piece: pieceBytes, request: o.OnRequest, staged: o.Hosts || alwaysStaged, scratch: mem}
	}
	return nil
}

// close frees the memory when the streams have passed all operations.
func (o *ordered) close() error {
	if o == nil {
		return nil
	}
	done := o.order.Close("comm: close the memory of deterministic reductions", syncAll)
	return errors.Join(done, o.scratch.Close())
}

// syncAll waits for streams.
func syncAll(users []*gpu.Stream) error {
	var errs []error
	for _, s := range users {
		errs = append(errs, syncUnlessLost(s))
	}
	return errors.Join(errs...)
}

// inOrder reports whether an operation must be executed in rank order, and s may
// not execute it. Chorus kernels reduce all ranks as one block. requested says that its batch
// requests the order.
func (k *Router) inOrder(x *collective.Op, s Strategy, requested bool) bool {
	if k.ordered == nil || k.ordered.request && !requested || !collective.Kinds[x.Kind].Reduces {
		return false
	}
	return services[s] != collective.Kernels || k.ordered.block < k.comm.Size()
}

// inPieces reports whether Chorus kernels execute x in rank order, in pieces of any number. NCCL does
// not execute it, so it does not matter above which size NCCL is faster without an order.
func (k *Router) inPieces(x *collective.Op) bool {
	s := k.rule.Load().strategy
	if k.kernels == nil || s != Tuned && services[s] != collective.Kernels || k.ordered.block < k.comm.Size() || x.Kind != collective.AllReduce {
		return false
	}
	piece := *x
	piece.N = min(x.N, k.pieceOf(x))
	return k.kernels.Takes(&piece, fabric.Auto)
}

// pieceOf returns the number of elements in a piece of x.
func (k *Router) pieceOf(x *collective.Op) int {
	return min(k.ordered.piece, k.kernels.Limits().AllReduce()) / x.DType.Size()
}

// launchPieces launches the kernels of an operation of inPieces.
func (k *Router) launchPieces(x *collective.Op) error {
	piece, left := *x, x.N
	for most := k.pieceOf(x); left > 0; left -= piece.N {
		piece.N = min(left, most)
		if err := k.kernels.Enqueue(&piece); err != nil {
			if left < x.N {
				err = &collective.PartialError{Err: err}
			}
			return err
		}
		piece.Dst.Ptr += cudadrv.DevicePtr(piece.Bytes())
		if piece.Src.Ptr != 0 { // 0 means in place
			piece.Src.Ptr += cudadrv.DevicePtr(piece.Bytes())
		}
	}
	return nil
}

// reduction returns the type and the reduction that compute an operation, and the factor of a
// PreMulSum or nil. It returns an error if no kernel reduces in order.
func (k *Router) reduction(x *collective.Op) (t memory.DType, op collective.Reduction, by *fabric.Factor, err error) {
	t, op = x.DType, x.Reduction
	if t == memory.Bool { // bytes that are 0 or 1
		if t = memory.Uint8; op == collective.Sum {
			op = collective.Max
		}
	}
	if op < 0 || op >= collective.NumReductions {
		bits, at, ok := k.in.Factor(op)
		if !ok {
			return t, op, nil, fmt.Errorf("the reduction %s was closed", x.Reduction)
		}
		by, op = &fabric.Factor{Bits: bits, At: at}, collective.Sum
	}
	if !fabric.CanFold(t, op) {
		return t, op, nil, fmt.Errorf("the %s of %s is not deterministic: no kernel computes it in rank order", op, t)
	}
	return t, op, by, nil
}
