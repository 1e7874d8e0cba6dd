package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// openOwn lets Chorus's own kernels carry out what they are faster at, where the
// strategy says so and the devices can. exchange gives each local rank its exchange with
// the others.
func (g *Group) openOwn(ctx context.Context, cfg *Config, exchange func(rank int) fabric.Exchange) error {
	s, err := cfg.strategy()
	if err != nil || s != OwnKernels || g.size == 1 {
		return err
	}
	eg, ctx := errgroup.WithContext(ctx)
	for i := range g.members {
		m := &g.members[i]
		eg.Go(func() (err error) {
			rank := m.comm.Rank()
			m.own, err = fabric.Open(ctx, m.stream, rank, g.size, exchange(rank), &fabric.Config{Bytes: ownBytes})
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		err = errors.Join(err, g.closeOwn())
		if errors.Is(err, errors.ErrUnsupported) {
			return nil // on all ranks alike
		}
		return fmt.Errorf("comm: own kernels: %w", err)
	}
	for i := range g.members {
		m := &g.members[i]
		m.comm.Substitute(m.stream, ownKernels{m.own})
	}
	return nil
}

// closeOwn gives up what openOwn made, when nothing is in flight or all was aborted.
func (g *Group) closeOwn() error {
	errs := make([]error, len(g.members))
	var all sync.WaitGroup
	for i := range g.members {
		all.Go(func() { errs[i] = g.members[i].own.Close() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// ownKernels are a rank's, in NCCL's place.
type ownKernels struct{ rank *fabric.Rank }

// Up to how many bytes own kernels are used: of an all-reduce, and of one rank's part of
// the others. NCCL is not slower from about there on.
var (
	ownBytes     = 4 << 20
	ownPartBytes = 64 << 10
)

var ownKinds = map[nccl.CollectiveKind]fabric.Kind{
	nccl.AllReduceKind: fabric.AllReduces, nccl.BroadcastKind: fabric.Broadcasts, nccl.AllGatherKind: fabric.AllGathers,
	nccl.ReduceScatterKind: fabric.ReduceScatters, nccl.AllToAllKind: fabric.AllToAlls,
}

var ownOps = map[nccl.Op]fabric.Op{
	nccl.Sum: fabric.Sum, nccl.Prod: fabric.Prod, nccl.Max: fabric.Max, nccl.Min: fabric.Min, nccl.Avg: fabric.Avg,
}

// Takes is for nccl.Substitute.
func (k ownKernels) Takes(x nccl.Collective) bool {
	raw, ok := k.raw(x)
	return ok && k.rank.Takes(&raw)
}

// Enqueue is for nccl.Substitute.
func (k ownKernels) Enqueue(s *stream.Stream, x nccl.Collective) error {
	raw, _ := k.raw(x)
	return k.rank.Enqueue(s, &raw)
}

// Abort is for nccl.Substitute.
func (k ownKernels) Abort() { k.rank.Abort() }

func (k ownKernels) raw(x nccl.Collective) (raw fabric.Raw, ok bool) {
	op, ok := ownOps[x.Op]
	most := ownPartBytes
	if x.Kind == nccl.AllReduceKind {
		most = ownBytes
	}
	return fabric.Raw{Kind: ownKinds[x.Kind], DType: x.DType, Op: op, Root: x.Root, Count: x.Count, Dst: x.Dst, Src: x.Src},
		ok && x.Count*x.DType.Size() <= most
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
