package comm

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// AllToAll enqueues the exchange of parts: the part of src at a rank's place goes to
// that rank, and what comes from it to the same place of dst; both have a part for
// each rank, all of one length (ncclAlltoAll, torch.distributed.all_to_all_single).
// Collective.
func AllToAll[T memory.Element](g *Group, dst, src Shards[T]) error {
	if err := checkPair(g, "all-to-all", dst, src); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.AllToAll(m.comm, m.stream, dst[i], src[i])
	})
}

// AllToAllV is AllToAll of parts of different lengths: sends and recvs have, for each
// local rank, how many elements go to each rank and how many come from each. What a
// rank sends to another must be what that one receives. Collective.
func AllToAllV[T memory.Element](g *Group, dst Shards[T], recvs [][]int, src Shards[T], sends [][]int) error {
	const op = "all-to-all"
	if err := g.check(op); err != nil {
		return err
	}
	if len(recvs) != len(g.members) || len(sends) != len(g.members) {
		return fmt.Errorf("comm: %s: counts of %d receiving and %d sending ranks for %d local ranks: %w", op, len(recvs), len(sends), len(g.members), ErrMismatch)
	}
	if err := checkShards(g, op, dst, false); err != nil {
		return err
	}
	if err := checkShards(g, op, src, false); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.AllToAllV(m.comm, m.stream, dst[i], recvs[i], src[i], sends[i])
	})
}

// AllGatherV is AllGather of sources of different lengths: counts has that of each
// rank, and each dst is as long as all together. Collective.
func AllGatherV[T memory.Element](g *Group, dst, src Shards[T], counts []int) error {
	if err := checkUneven(g, "all-gather", dst, src); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.AllGatherV(m.comm, m.stream, dst[i], src[i], counts)
	})
}

// ReduceScatterV is ReduceScatter into destinations of different lengths: counts has
// that of each rank, and each src is as long as all together. Collective.
func ReduceScatterV[T memory.Element](g *Group, op Op, dst, src Shards[T], counts []int) error {
	if err := checkUneven(g, "reduce-scatter", dst, src); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.ReduceScatterV(m.comm, m.stream, dst[i], src[i], counts, op)
	})
}

func checkUneven[T memory.Element](g *Group, op string, dst, src Shards[T]) error {
	if err := checkShards(g, op, dst, false); err != nil {
		return err
	}
	return checkShards(g, op, src, false)
}
