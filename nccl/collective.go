package nccl

import (
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AllReduce enqueues the reduction of src over all ranks into dst on all ranks
// (ncclAllReduce). dst and src have the same length and may be the same.
// Collective.
func AllReduce[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(on, s, flight.AllReduce, dst, src, op, 0)
}

// Reduce enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce); dst is not used elsewhere and may be the zero Slice there.
// Collective.
func Reduce[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], op Op, root int) error {
	return issue(on, s, flight.Reduce, dst, src, op, root)
}

// Broadcast enqueues the copy of src on rank root into dst on all ranks
// (ncclBroadcast). src is not used elsewhere and may be the zero Slice there.
// Collective.
func Broadcast[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(on, s, flight.Broadcast, dst, src, Sum, root)
}

// AllGather enqueues the concatenation of src of all ranks, by rank, into dst
// on all ranks (ncclAllGather). dst is Size times as long as src; in place, src
// is the rank's part of dst. Collective.
func AllGather[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(on, s, flight.AllGather, dst, src, Sum, 0)
}

// ReduceScatter enqueues the reduction of src over all ranks; each rank gets its part in
// dst (ncclReduceScatter). src is Size times as long as dst; in place, dst is the rank's
// part of src. Collective.
func ReduceScatter[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(on, s, flight.ReduceScatter, dst, src, op, 0)
}

// AllToAll enqueues the exchange of parts: part j of src goes to part i of dst
// on rank j, where i is this rank (ncclAlltoAll, or sends and receives before
// NCCL 2.28). dst and src have the same length, a multiple of Size, and do not
// overlap. Collective.
func AllToAll[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(on, s, flight.AllToAll, dst, src, Sum, 0)
}

// Gather enqueues the concatenation of src of all ranks, by rank, into dst on
// rank root (ncclGather, or sends and receives before NCCL 2.28). dst is Size
// times as long as src there, and is not used elsewhere; in place, src is the
// root's part of dst. Collective.
func Gather[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(on, s, flight.Gather, dst, src, Sum, root)
}

// Scatter enqueues the distribution of the parts of src on rank root to dst on
// each rank (ncclScatter, or sends and receives before NCCL 2.28). src is Size
// times as long as dst there, and is not used elsewhere; in place, dst is the
// root's part of src. Collective.
func Scatter[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(on, s, flight.Scatter, dst, src, Sum, root)
}

// Send enqueues a send of src to rank peer, which receives the same number of elements
// (ncclSend). Sends and receives that could wait for each other must be added to one
// Batch.
func Send[T memory.Element](on Issuer, s *stream.Stream, src memory.Slice[T], peer int) error {
	return issue(on, s, flight.Send, memory.Slice[T]{}, src, Sum, peer)
}

// Recv enqueues a receive into dst from rank peer (ncclRecv).
func Recv[T memory.Element](on Issuer, s *stream.Stream, dst memory.Slice[T], peer int) error {
	return issue(on, s, flight.Recv, dst, memory.Slice[T]{}, Sum, peer)
}
