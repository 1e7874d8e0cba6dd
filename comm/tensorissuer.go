package comm

import (
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/tensor"
)

// A TensorIssuer issues collectives of tensors of any layout; see OfTensors.
type TensorIssuer struct{ on Issuer }

// OfTensors returns the collectives of torch.distributed for tensors, which may have any
// strides. They are the functions of the same names for slices, on the same streams and under
// the same rules:
//
//	err := comm.OfTensors(g).AllReduce(comm.Sum, a.T())
//
// Each call takes one tensor for each local rank, on its device and all of one type. A
// contiguous tensor is used directly. Tensors of other layouts are copied to and from
// contiguous memory, which the caching allocator provides, on the group's stream; elements are
// sent in row-major order, so that the ranks may have different strides. Like the functions for
// slices, a call validates all arguments before it enqueues anything, and errors of arguments
// match ErrMismatch. In a Batch the tensors are read and written when the batch is enqueued.
//
// An operand with a part for each rank is a list for each local rank: either one tensor, which
// holds the parts by rank (all_gather_into_tensor), or one tensor for each rank (all_gather).
// Adjacent parts of contiguous memory, such as the result of Tensor.Chunk along dimension 0,
// are not copied.
func OfTensors(on Issuer) TensorIssuer { return TensorIssuer{on} }

// AllReduce enqueues, in place, the reduction of one tensor of each rank
// (torch.distributed.all_reduce). Collective.
func (x TensorIssuer) AllReduce(op Op, ts ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.AllReduce, op: op, dst: single(ts), inPlace: true})
}

// BroadcastFrom enqueues, in place, the copy of rank root's tensor to all ranks
// (torch.distributed.broadcast). Collective.
func (x TensorIssuer) BroadcastFrom(root int, ts ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.Broadcast, root: root, dst: single(ts), inPlace: true})
}

// ReduceTo enqueues the reduction of src over all ranks into dst on rank root
// (torch.distributed.reduce, which works in place). Tensors of dst for other ranks are not
// used, and dst may be nil if root is not local. Collective.
func (x TensorIssuer) ReduceTo(root int, op Op, dst, src []tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.Reduce, op: op, root: root, dst: single(dst), src: single(src)})
}

// AllGather enqueues the copies of src of all ranks into dst on all ranks
// (torch.distributed.all_gather, all_gather_into_tensor). Collective.
func (x TensorIssuer) AllGather(dst [][]tensor.Tensor, src ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.AllGather, dst: dst, src: single(src)})
}

// ReduceScatter enqueues the reduction of src over all ranks; each rank gets its part in dst
// (torch.distributed.reduce_scatter, reduce_scatter_tensor). Collective.
func (x TensorIssuer) ReduceScatter(op Op, dst []tensor.Tensor, src ...[]tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.ReduceScatter, op: op, dst: single(dst), src: src})
}

// AllToAll enqueues the exchange of parts between all ranks: part i of src goes to rank i, and
// part i of dst comes from rank i (torch.distributed.all_to_all, all_to_all_single). All parts
// have the same number of elements; AllToAllV has no form for tensors. Collective.
func (x TensorIssuer) AllToAll(dst [][]tensor.Tensor, src ...[]tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.AllToAll, dst: dst, src: src})
}

// GatherTo enqueues the copies of src of all ranks into dst on rank root
// (torch.distributed.gather). Lists of dst for other ranks are not used, and dst may be nil if
// root is not local. Collective.
func (x TensorIssuer) GatherTo(root int, dst [][]tensor.Tensor, src ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.Gather, root: root, dst: dst, src: single(src)})
}

// ScatterFrom enqueues a copy of each rank's part of src on rank root into that rank's dst
// (torch.distributed.scatter). Lists of src for other ranks are not used, and src may be empty
// if root is not local. Collective.
func (x TensorIssuer) ScatterFrom(root int, dst []tensor.Tensor, src ...[]tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.Scatter, root: root, dst: single(dst), src: src})
}

// Send enqueues a send of t from the first local rank to rank peer, which receives the same
// number of elements (torch.distributed.isend). Sends and receives that could wait for each
// other must be issued in one Batch (torch.distributed.batch_isend_irecv).
func (x TensorIssuer) Send(peer int, t tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.Send, root: peer, src: [][]tensor.Tensor{{t}}})
}

// Recv enqueues a receive into t on the first local rank from rank peer
// (torch.distributed.irecv).
func (x TensorIssuer) Recv(peer int, t tensor.Tensor) error {
	return x.issue(&tensorCall{kind: flight.Recv, root: peer, dst: [][]tensor.Tensor{{t}}})
}

// issue adds a call to the issuer's batch, or enqueues it if the issuer is a group.
func (x TensorIssuer) issue(c *tensorCall) error {
	g, b := groupOf(x.on)
	if b != nil {
		return b.markRefused(c.addTo(b))
	}
	if err := g.check(c.name()); err != nil {
		return err
	}
	return g.Batch(c.addTo)
}

// single returns a list of one tensor for each tensor.
func single(ts []tensor.Tensor) [][]tensor.Tensor {
	lists := make([][]tensor.Tensor, len(ts))
	for i := range ts {
		lists[i] = ts[i : i+1 : i+1]
	}
	return lists
}
