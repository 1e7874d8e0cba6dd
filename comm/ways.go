package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// ways are what a rank has to carry collectives out, beside NCCL, and the rule by which
// it chooses. It is the rank's nccl.Substitute.
type ways struct {
	own      *fabric.Rank    // nil where there are none
	window   *window         // likewise
	engines  bool            // there are copy engines that reach all ranks, which are here
	opened   Strategy        // for which it was
	exchange fabric.Exchange // with the other ranks, until all are open
	rule     atomic.Pointer[rule]
}

// A rule chooses among the ways, alike on all ranks.
type rule struct {
	strategy Strategy
	tuning   *index   // nil where there is none
	only     Strategy // in place of tuning, while that is measured; 0 is none
}

// use changes the strategy.
func (k *ways) use(s Strategy) { k.rule.Store(&rule{strategy: s, tuning: k.rule.Load().tuning}) }

// only uses one strategy for all that it can.
func (k *ways) only(s Strategy) {
	k.rule.Store(&rule{strategy: Tuned, tuning: k.rule.Load().tuning, only: s})
}

// choose returns what carries x out: the first of the rule's that can. What is no
// all-reduce has no choice among the algorithms of own kernels.
func (k *ways) choose(x nccl.Collective) Strategy {
	s := k.first(x)
	if s.algorithm() && x.Kind != nccl.AllReduceKind {
		return OwnKernels
	}
	return s
}

func (k *ways) first(x nccl.Collective) Strategy {
	r := k.rule.Load()
	switch {
	case x.Kind == 0: // an operation that is always NCCL's
		return NCCLOnly
	case r.strategy != Tuned:
		return k.orNCCL(r.strategy, x, ownLimit(x))
	case r.only != 0:
		return k.orNCCL(r.only, x, ownMost)
	}
	for _, s := range r.tuning.find(x) {
		if s == NCCLOnly || k.can(s, x, ownMost) {
			return s
		}
	}
	return NCCLOnly
}

// orNCCL returns s where that can.
func (k *ways) orNCCL(s Strategy, x nccl.Collective, most int) Strategy {
	if k.can(s, x, most) {
		return s
	}
	return NCCLOnly
}

// can reports whether x can be carried out by s, own kernels up to so many bytes where
// they have the choice among their algorithms.
func (k *ways) can(s Strategy, x nccl.Collective, most int) bool {
	switch s {
	case OwnKernels:
		return k.own != nil && bytesOf(x) <= most && k.takes(s, x)
	case OneShot, TwoShotPackets, TwoShot, TwoShotLines:
		return k.own != nil && (x.Kind == nccl.AllReduceKind || bytesOf(x) <= most) && k.takes(s, x)
	case Windows:
		return k.window != nil && k.window.fits(x)
	case CopyEngines:
		return k.engines && x.Together && (x.Kind == nccl.AllGatherKind || x.Kind == nccl.AllToAllKind) && x.Count > 0
	}
	return false
}

func (k *ways) takes(s Strategy, x nccl.Collective) bool {
	raw, ok := ownRaw(s, x)
	return ok && k.own.Takes(&raw)
}

// bytesOf returns how many bytes of an operation count: all of an all-reduce or a
// broadcast, and one rank's part of the others.
func bytesOf(x nccl.Collective) int { return x.Count * x.DType.Size() }

// Takes is for nccl.Substitute.
func (k *ways) Takes(x nccl.Collective) nccl.Service {
	switch k.choose(x) {
	case NCCLOnly:
		return nccl.Nothing
	case Windows:
		return nccl.Lending
	case CopyEngines:
		return nccl.Whole
	}
	return nccl.Instead
}

// Enqueue is for nccl.Substitute.
func (k *ways) Enqueue(s *stream.Stream, x nccl.Collective) error {
	raw, _ := ownRaw(k.choose(x), x)
	return k.own.Enqueue(s, &raw)
}

// Lend is for nccl.Substitute.
func (k *ways) Lend(s *stream.Stream, x nccl.Collective) (dst, src uint64, err error) {
	return k.window.lend(s, x)
}

// Return is for nccl.Substitute.
func (k *ways) Return(s *stream.Stream, x nccl.Collective, taken bool) error {
	return k.window.back(s, x, taken)
}

// Together is for nccl.Substitute.
func (k *ways) Together(ss []*stream.Stream, xs []nccl.Collective) error {
	return exchange(ss, xs)
}

// Abort is for nccl.Substitute.
func (k *ways) Abort() {
	if k.own != nil {
		k.own.Abort()
	}
}

// openWays opens what the strategy needs, as far as it can be had.
func (g *Group) openWays(ctx context.Context, s Strategy, exchange func(rank int) fabric.Exchange) error {
	if s == NCCLOnly || g.size == 1 {
		return nil
	}
	for i := range g.members {
		g.members[i].ways = &ways{opened: s, exchange: exchange(g.members[i].comm.Rank())}
	}
	var err error
	switch s {
	case Windows:
		err = g.openWindows(ctx)
	case CopyEngines:
		err = g.openEngines()
	case Tuned:
		if err = g.openOwn(ctx, s, ownMost); err == nil {
			err = g.openWindows(ctx)
		}
		if err == nil {
			err = g.openEngines()
		}
	default:
		err = g.openOwn(ctx, s, ownBytes*16/15) // so that as many fit in lines
	}
	if err != nil {
		return err
	}
	for i := range g.members {
		m := &g.members[i]
		if m.ways.own == nil && m.ways.window == nil && !m.ways.engines {
			m.ways = nil
			continue
		}
		m.ways.exchange = nil
		m.ways.rule.Store(&rule{strategy: s})
		m.comm.Substitute(m.stream, m.ways)
	}
	return nil
}

// openOn opens a way on all local ranks at once, and gives it up on all where it is not
// supported, which is no error: it is so on all ranks alike. After other errors closeWays
// gives it up, when nothing uses it any more.
func (g *Group) openOn(ctx context.Context, what string, open func(context.Context, *member) error, giveUp func(*member) error) error {
	eg, ctx := errgroup.WithContext(ctx)
	for i := range g.members {
		eg.Go(func() error { return open(ctx, &g.members[i]) })
	}
	err := eg.Wait()
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("comm: %s: %w", what, err)
	}
	var errs []error
	for i := range g.members {
		if err != nil {
			errs = append(errs, giveUp(&g.members[i]))
		}
	}
	return errors.Join(errs...)
}

// closeWays gives up what openWays made, when nothing is in flight or all was aborted.
// Where that could not be it is left: to wait for the stream would have no end.
func (g *Group) closeWays() error {
	errs := make([]error, len(g.members))
	var all sync.WaitGroup
	for i := range g.members {
		if m := &g.members[i]; !m.comm.LeftAlone() {
			all.Go(func() { errs[i] = m.ways.close() })
		}
	}
	all.Wait()
	return errors.Join(errs...)
}

func (k *ways) close() error {
	if k == nil {
		return nil
	}
	return errors.Join(k.own.Close(), k.window.close())
}
