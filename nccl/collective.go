package nccl

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AllReduce enqueues the reduction of src over all ranks into dst on all ranks
// (ncclAllReduce). dst and src have the same length and may be the same.
// Collective.
func AllReduce[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(c, s, allReduce, dst, src, op, 0)
}

// Reduce enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce); dst is not used elsewhere and may be the zero Slice there.
// Collective.
func Reduce[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], op Op, root int) error {
	return issue(c, s, reduce, dst, src, op, root)
}

// Broadcast enqueues the copy of src on rank root into dst on all ranks
// (ncclBroadcast). src is not used elsewhere and may be the zero Slice there.
// Collective.
func Broadcast[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(c, s, broadcast, dst, src, Sum, root)
}

// AllGather enqueues the concatenation of src of all ranks, by rank, into dst
// on all ranks (ncclAllGather). dst is Size times as long as src; in place, src
// is the rank's part of dst. Collective.
func AllGather[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(c, s, allGather, dst, src, Sum, 0)
}

// ReduceScatter enqueues the reduction of src over all ranks, of which each
// rank gets its part into dst (ncclReduceScatter). src is Size times as long as
// dst; in place, dst is the rank's part of src. Collective.
func ReduceScatter[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(c, s, reduceScatter, dst, src, op, 0)
}

// AllToAll enqueues the exchange of parts: part j of src goes to part i of dst
// on rank j, where i is this rank (ncclAlltoAll, or sends and receives before
// NCCL 2.28). dst and src have the same length, a multiple of Size, and do not
// overlap. Collective.
func AllToAll[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(c, s, allToAll, dst, src, Sum, 0)
}

// Gather enqueues the concatenation of src of all ranks, by rank, into dst on
// rank root (ncclGather, or sends and receives before NCCL 2.28). dst is Size
// times as long as src there, and is not used elsewhere; in place, src is the
// root's part of dst. Collective.
func Gather[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(c, s, gather, dst, src, Sum, root)
}

// Scatter enqueues the distribution of the parts of src on rank root to dst on
// each rank (ncclScatter, or sends and receives before NCCL 2.28). src is Size
// times as long as dst there, and is not used elsewhere; in place, dst is the
// root's part of src. Collective.
func Scatter[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(c, s, scatter, dst, src, Sum, root)
}

// Send enqueues the sending of src to rank peer, which receives as many
// elements (ncclSend). Sends and receives that may wait for each other belong
// into one Group.
func Send[T memory.Element](c *Communicator, s *stream.Stream, src memory.Slice[T], peer int) error {
	return issue(c, s, send, memory.Slice[T]{}, src, Sum, peer)
}

// Recv enqueues the receiving of what rank peer sends into dst (ncclRecv).
func Recv[T memory.Element](c *Communicator, s *stream.Stream, dst memory.Slice[T], peer int) error {
	return issue(c, s, recv, dst, memory.Slice[T]{}, Sum, peer)
}
