package comm

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
)

// openOwn opens the ranks' own kernels, each with so much room, where the devices can.
// exchange gives each local rank its exchange with the others.
func (g *Group) openOwn(ctx context.Context, bytes int, exchange func(rank int) fabric.Exchange) error {
	open := func(ctx context.Context, m *member) (err error) {
		rank := m.comm.Rank()
		m.ways.own, err = fabric.Open(ctx, m.stream, rank, g.size, exchange(rank), &fabric.Config{Bytes: bytes})
		return err
	}
	return g.openOn(ctx, "own kernels", open, func(m *member) error {
		own := m.ways.own
		m.ways.own = nil
		return own.Close()
	})
}

// Up to how many bytes own kernels are used: of an all-reduce, and of one rank's part of
// the others. NCCL is not slower from about there on. Where a Tuning says how far they
// carry, they may have ownMost.
var (
	ownBytes     = 4 << 20
	ownPartBytes = 64 << 10
	ownMost      = 16 << 20
)

func ownLimit(x nccl.Collective) int {
	if x.Kind == nccl.AllReduceKind {
		return ownBytes
	}
	return ownPartBytes
}

var ownKinds = map[nccl.CollectiveKind]fabric.Kind{
	nccl.AllReduceKind: fabric.AllReduces, nccl.BroadcastKind: fabric.Broadcasts, nccl.AllGatherKind: fabric.AllGathers,
	nccl.ReduceScatterKind: fabric.ReduceScatters, nccl.AllToAllKind: fabric.AllToAlls,
}

var ownOps = map[nccl.Op]fabric.Op{
	nccl.Sum: fabric.Sum, nccl.Prod: fabric.Prod, nccl.Max: fabric.Max, nccl.Min: fabric.Min, nccl.Avg: fabric.Avg,
}

var ownAlgorithms = [strategies]fabric.Algorithm{OneShot: fabric.OneShot, TwoShotPackets: fabric.TwoShotPackets, TwoShot: fabric.TwoShot}

// ownRaw is x as own kernels have it, and reports whether they know its reduction.
func ownRaw(s Strategy, x nccl.Collective) (raw fabric.Raw, ok bool) {
	op, ok := ownOps[x.Op]
	return fabric.Raw{Kind: ownKinds[x.Kind], Algorithm: ownAlgorithms[s], DType: x.DType, Op: op, Root: x.Root, Count: x.Count, Dst: x.Dst, Src: x.Src}, ok
}

// exchangeBy is the exchange of a process's rank over a Rendezvous.
func exchangeBy(r Rendezvous, prefix string) fabric.Exchange {
	round := 0
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		key := func(rank int) string { return fmt.Sprintf("%sown/%d/%d", prefix, round, rank) }
		if err := r.Set(ctx, key(r.Rank()), mine); err != nil {
			return nil, err
		}
		all := make([][]byte, r.Size())
		for i := range all {
			var err error
			if all[i], err = r.Get(ctx, key(i)); err != nil {
				return nil, fmt.Errorf("wait for rank %d: %w", i, err)
			}
		}
		round++
		return all, nil
	}
}
