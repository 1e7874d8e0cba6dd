package comm

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// The collectives with a root: one rank reads or writes a slice that the other ranks do
// not use. On the other ranks that slice may be the zero Slice, and if the root is not
// local the whole list may be nil.

// BroadcastFrom enqueues, in place, the copy of rank root's slice to all ranks
// (ncclBcast). Collective.
func BroadcastFrom[T memory.Element](on Issuer, root int, xs ...memory.Slice[T]) error {
	g, b := groupOf(on)
	if err := checkShards(g, "broadcast", xs, true); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Broadcast(m.on, m.stream, xs[i], xs[i], root)
	})
}

// ReduceTo enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce). Collective.
func ReduceTo[T memory.Element](on Issuer, root int, op Op, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkRooted(g, "reduce", root, src, dst); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Reduce(m.on, m.stream, dst.at(i), src[i], op, root)
	})
}

// GatherTo enqueues the concatenation of src over all ranks, by rank, into dst on
// rank root, which is Size times as long (ncclGather). Collective.
func GatherTo[T memory.Element](on Issuer, root int, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkRooted(g, "gather", root, src, dst); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Gather(m.on, m.stream, dst.at(i), src[i], root)
	})
}

// ScatterFrom enqueues a copy of each rank's part of src on rank root into that rank's
// dst. src is Size times as long as dst (ncclScatter). Collective.
func ScatterFrom[T memory.Element](on Issuer, root int, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkRooted(g, "scatter", root, dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Scatter(m.on, m.stream, dst[i], src.at(i), root)
	})
}

// at returns the slice of local rank i; the list may be nil.
func (xs Shards[T]) at(i int) memory.Slice[T] {
	if xs == nil {
		return memory.Slice[T]{}
	}
	return xs[i]
}

// checkRooted validates the slices that all ranks use, and the list that only the root
// uses.
func checkRooted[T memory.Element](g *Group, op string, root int, all, roots Shards[T]) error {
	if err := checkShards(g, op, all, true); err != nil {
		return err
	}
	if roots == nil && !g.hasRank(root) {
		return nil
	}
	return checkShards(g, op, roots, false)
}

// hasRank reports whether a rank is local.
func (g *Group) hasRank(rank int) bool {
	for i := range g.members {
		if g.members[i].comm.Rank() == rank {
			return true
		}
	}
	return false
}
