package comm

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// AllToAll enqueues the exchange of parts between all ranks: part i of src goes to rank i,
// and part i of dst comes from rank i. src and dst have one part for each rank, all of the
// same length (ncclAlltoAll, torch.distributed.all_to_all_single). Collective.
func AllToAll[T memory.Element](on Issuer, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkPair(g, "all-to-all", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllToAll(m.on, m.stream, dst[i], src[i])
	})
}

// AllToAllV is AllToAll for parts of different lengths. sends and recvs have, for each
// local rank, the number of elements to send to each rank and to receive from each rank.
// Both ranks of a pair must agree on the number. Collective.
func AllToAllV[T memory.Element](on Issuer, dst Shards[T], recvs [][]int, src Shards[T], sends [][]int) error {
	g, b := groupOf(on)
	const op = "all-to-all"
	if err := g.check(op); err != nil {
		return b.markRefused(err)
	}
	if len(recvs) != len(g.members) || len(sends) != len(g.members) {
		return b.markRefused(fmt.Errorf("comm: %s: counts of %d receiving and %d sending ranks for %d local ranks: %w", op, len(recvs), len(sends), len(g.members), ErrMismatch))
	}
	if err := checkShards(g, op, dst, false); err != nil {
		return b.markRefused(err)
	}
	if err := checkShards(g, op, src, false); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllToAllV(m.on, m.stream, dst[i], recvs[i], src[i], sends[i])
	})
}

// AllGatherV is AllGather for sources of different lengths: counts has the length of each
// rank's source, and each dst has the total length. Collective.
func AllGatherV[T memory.Element](on Issuer, dst, src Shards[T], counts []int) error {
	g, b := groupOf(on)
	if err := checkUneven(g, "all-gather", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllGatherV(m.on, m.stream, dst[i], src[i], counts)
	})
}

// ReduceScatterV is ReduceScatter for destinations of different lengths: counts has the
// length of each rank's destination, and each src has the total length. Collective.
func ReduceScatterV[T memory.Element](on Issuer, op Op, dst, src Shards[T], counts []int) error {
	g, b := groupOf(on)
	if err := checkUneven(g, "reduce-scatter", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.ReduceScatterV(m.on, m.stream, dst[i], src[i], counts, op)
	})
}

func checkUneven[T memory.Element](g *Group, op string, dst, src Shards[T]) error {
	if err := checkShards(g, op, dst, false); err != nil {
		return err
	}
	return checkShards(g, op, src, false)
}
