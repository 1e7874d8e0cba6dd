package perf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/nccl"
)

// Run measures what the plan says on the group, with every rank of it: all call Run
// with the same plan. row is called for each row as soon as it is there, where rank 0
// is, and may be nil. The Report is the same on all ranks. An operation that fails, or
// the end of ctx, ends it, and closes the group.
func Run(ctx context.Context, g *comm.Group, p *Plan, row func(*Row)) (*Report, error) {
	jobs, err := p.jobs(g.Size())
	if err != nil {
		return nil, err
	}
	if p.only != nil {
		jobs = slices.DeleteFunc(jobs, func(j job) bool { return !p.only(j) })
	}
	bytes := 0
	for _, j := range jobs {
		bytes = max(bytes, j.layout.size()*j.dtype.Size())
	}
	if err := agree(ctx, g, fmt.Sprintf("%+v", *p.summary())); err != nil {
		// Nobody leaves before all ranks have read the plans: the first to leave would be to blame.
		_ = g.Barrier(ctx)
		_ = g.Shutdown(ctx)
		return nil, err
	}
	r, err := describe(g)
	if err != nil {
		return nil, err
	}
	r.Plan = p.summary()
	if len(jobs) == 0 {
		return r, nil
	}
	err = spmd(ctx, g, (bytes+step-1)/step*step, p.Register, func(ctx context.Context, x *rank) error {
		for _, j := range jobs {
			one, err := x.row(ctx, p, j)
			if err != nil {
				return err
			}
			if x.c.Rank() != g.Rank() {
				continue // another one here tells the same
			}
			r.Rows = append(r.Rows, one)
			if row != nil && x.c.Rank() == 0 {
				row(one)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	r.sumUp()
	return r, nil
}

// agree returns an error on all ranks when they do not have the same plan: they would
// wait for each other.
func agree(ctx context.Context, g *comm.Group, plan string) error {
	all, err := comm.GatherValues(ctx, g, nil, slices.Repeat([]string{plan}, g.Locals())...)
	if err != nil {
		return err
	}
	for r, other := range all {
		if other != all[0] {
			return fmt.Errorf("rank 0 is to measure %s, rank %d %s: start all ranks with the same flags", all[0], r, other)
		}
	}
	return nil
}

// spmd runs fn for every local rank at the same time, each on an OS thread of its
// own, with buffers of so many bytes. The first error ends the others' waits.
func spmd(ctx context.Context, g *comm.Group, bytes int, reg Registration, fn func(context.Context, *rank) error) error {
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan error, 1)
	// It ends what still uses the buffers, and the calls that wait for another rank.
	stop := context.AfterFunc(ctx, func() {
		broken := g.Err() // which knows who was to blame
		_ = g.Close()
		ended <- broken
	})
	ranks, start := make([]*rank, g.Locals()), new(line)
	all := &ensemble{calls: make([][]func() error, len(ranks))}
	var wg sync.WaitGroup
	for i := range ranks {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var err error
			if ranks[i], err = newRank(ctx, g, i, start, all, bytes, reg); err == nil {
				err = fn(ctx, ranks[i])
			}
			if err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	var err error
	if !stop() {
		err = <-ended
		if cause := context.Cause(asked); err == nil || cause != nil && errors.Is(err, nccl.ErrorRemote) {
			// A connection that broke is no news where all were asked to end.
			err = cmp.Or(cause, context.Cause(ctx)) // the first, of which the others are consequences
		}
	}
	var errs []error
	for _, r := range ranks {
		errs = append(errs, r.close())
	}
	if err != nil {
		return err
	}
	return errors.Join(errs...)
}
