package comm

import (
	"context"
	"log/slog"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
)

// openOwn opens the ranks' own kernels, each with so much room, where the devices can do
// what the strategy needs.
func (g *Group) openOwn(ctx context.Context, s Strategy, bytes int) error {
	open := func(ctx context.Context, m *member) (err error) {
		m.ways.own, err = fabric.Open(ctx, m.stream, m.comm.Rank(), g.size, m.ways.exchange, &fabric.Config{Bytes: bytes})
		if err != nil {
			return err
		}
		if err = m.ways.own.Supports(ownAlgorithms[s]); err != nil {
			slog.Warn("chorus: the strategy cannot be had, so NCCL carries out all collectives", "strategy", s.String(), "rank", m.comm.Rank(), "error", err)
		}
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

var ownAlgorithms = [strategies]fabric.Algorithm{OneShot: fabric.OneShot, TwoShotPackets: fabric.TwoShotPackets, TwoShot: fabric.TwoShot, TwoShotLines: fabric.TwoShotLines}

// ownRaw is x as own kernels have it, and reports whether they know its reduction.
func ownRaw(s Strategy, x nccl.Collective) (raw fabric.Raw, ok bool) {
	op, ok := ownOps[x.Op]
	return fabric.Raw{Kind: ownKinds[x.Kind], Algorithm: ownAlgorithms[s], DType: x.DType, Op: op, Root: x.Root, Count: x.Count, Dst: x.Dst, Src: x.Src}, ok
}
