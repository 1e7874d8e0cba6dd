package comm

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// The collectives of which one rank, the root, gives or gets something that the
// others do not. On the other ranks that slice is not used, and may be the zero one;
// where the root is not local, the whole list may be nil.

// BroadcastFrom enqueues, in place, the copy of rank root's slice to all ranks
// (ncclBcast). Collective.
func BroadcastFrom[T memory.Element](g *Group, root int, xs ...memory.Slice[T]) error {
	if err := checkShards(g, "broadcast", xs, true); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.Broadcast(m.comm, m.stream, xs[i], xs[i], root)
	})
}

// ReduceTo enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce). Collective.
func ReduceTo[T memory.Element](g *Group, root int, op Op, dst, src Shards[T]) error {
	if err := checkRooted(g, "reduce", root, src, dst); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.Reduce(m.comm, m.stream, dst.at(i), src[i], op, root)
	})
}

// GatherTo enqueues the concatenation of src over all ranks, by rank, into dst on
// rank root, which is Size times as long (ncclGather). Collective.
func GatherTo[T memory.Element](g *Group, root int, dst, src Shards[T]) error {
	if err := checkRooted(g, "gather", root, src, dst); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.Gather(m.comm, m.stream, dst.at(i), src[i], root)
	})
}

// ScatterFrom enqueues the copy of each rank's part of src, which rank root has and
// which is Size times as long, into that rank's dst (ncclScatter). Collective.
func ScatterFrom[T memory.Element](g *Group, root int, dst, src Shards[T]) error {
	if err := checkRooted(g, "scatter", root, dst, src); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.Scatter(m.comm, m.stream, dst[i], src.at(i), root)
	})
}

// at returns the slice of local rank i of a list that may be nil.
func (xs Shards[T]) at(i int) memory.Slice[T] {
	if xs == nil {
		return memory.Slice[T]{}
	}
	return xs[i]
}

// checkRooted checks the slices that all ranks have, and those of which the root's
// counts.
func checkRooted[T memory.Element](g *Group, op string, root int, all, roots Shards[T]) error {
	if err := checkShards(g, op, all, true); err != nil {
		return err
	}
	if roots == nil && !g.hasRank(root) {
		return nil
	}
	return checkShards(g, op, roots, false)
}

// hasRank says whether a rank is local.
func (g *Group) hasRank(rank int) bool {
	for i := range g.members {
		if g.members[i].comm.Rank() == rank {
			return true
		}
	}
	return false
}
