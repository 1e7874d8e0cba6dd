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
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

var (
	errNoGroup = errors.New("perf: no group given")
	errNoPlan  = errors.New("perf: no plan given")
)

// Run measures the plan on all ranks of the group, like nccl-tests. All ranks call Run with the
// same plan. On rank 0 it calls row for each row as soon as it is measured; row
// may be nil. The Report is the same on all ranks. If an operation fails or ctx
// ends, Run stops and closes the group; the Report then has the rows before that and the error.
// Run uses the group's streams, and returns when they are idle. No other work may be on them, because the times
// would include it.
func Run(ctx context.Context, g *comm.Group, p *Plan, row func(*Row)) (*Report, error) {
	switch {
	case g == nil:
		return nil, errNoGroup
	case p == nil:
		return nil, errNoPlan
	}
	full, err := p.complete()
	if err != nil {
		return nil, err
	}
	if p.Strategies {
		return full.runStrategies(ctx, g)
	}
	return full.run(ctx, g, row)
}

// run measures a complete plan.
func (p *Plan) run(ctx context.Context, g *comm.Group, row func(*Row)) (*Report, error) {
	jobs, err := p.jobs(g.Size())
	if err != nil {
		return nil, err
	}
	if p.only != nil {
		jobs = slices.DeleteFunc(jobs, func(j job) bool { return !p.only(j) })
	}
	// Ranks with different plans would wait for each other.
	same := *p
	same.only = nil
	if err := route.GroupOf(g).CheckSame(ctx, "perf", fmt.Sprintf("the flags %+v", same)); err != nil {
		_ = g.Shutdown(ctx)
		return nil, err
	}
	r, err := Describe(g)
	if err != nil {
		return nil, err
	}
	r.Plan = &same
	if len(jobs) == 0 {
		return r, nil
	}
	if r.GPUs, err = gpusOf(ctx, g); err != nil {
		return nil, err
	}
	err = r.run(ctx, g, p, jobs, row)
	r.sumUp()
	if err != nil {
		r.Error, r.Verdict = err.Error(), nil
	}
	return r, err
}

// run measures the jobs on all local ranks.
func (r *Report) run(ctx context.Context, g *comm.Group, p *Plan, jobs []job, row func(*Row)) error {
	bytes := 0
	for _, j := range jobs {
		bytes = max(bytes, j.layout.size()*j.dtype.Size())
	}
	return spmd(ctx, g, (bytes+step-1)/step*step, p.Register, func(ctx context.Context, x *rank) error {
		for _, j := range jobs {
			one, err := x.row(ctx, p, j)
			if err != nil {
				return err
			}
			if x.c.Rank() != g.Rank() {
				continue // another local rank returns the same row
			}
			r.Rows = append(r.Rows, one)
			if row != nil && x.c.Rank() == 0 {
				row(one)
			}
		}
		return nil
	})
}

// spmd runs fn for all local ranks concurrently, each on a locked OS thread,
// with buffers of the given size, until the first error, which cancels the
// others.
func spmd(ctx context.Context, g *comm.Group, bytes int, reg int, fn func(context.Context, *rank) error) error {
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan error, 1)
	// Closing the group aborts operations that use the buffers or wait for another rank.
	stop := context.AfterFunc(ctx, func() {
		broken := g.Err() // names the failed rank
		_ = g.Close()
		ended <- broken
	})
	ranks, shared := make([]*rank, g.Locals()), &localState{localCalls: make([][]issue, g.Locals()), batch: route.GroupOf(g).NewBatch()}
	onThreads(len(ranks), func(i int) {
		var err error
		if ranks[i], err = newRank(ctx, g, i, shared, bytes, reg); err == nil {
			err = fn(ctx, ranks[i])
		}
		if err != nil {
			cancel(err)
		}
	})
	var err error
	if !stop() {
		err = <-ended
		if cause := context.Cause(asked); err == nil || cause != nil && errors.Is(err, nccl.ErrorRemote) {
			// A broken connection is a consequence of the cancellation.
			err = cmp.Or(cause, context.Cause(ctx)) // the first error; the others are consequences
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

// onThreads calls fn with each number below n concurrently, each on a locked OS thread.
func onThreads(n int, fn func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			fn(i)
		})
	}
	wg.Wait()
}

// runStrategies runs the plan once for each strategy of a group with the strategy
// comm.Tuned. Each run contains the rows that the strategy supports. A row names
// its strategy and tells whether the group's tuning chooses it.
func (p *Plan) runStrategies(ctx context.Context, g *comm.Group) (*Report, error) {
	var all *Report
	for _, s := range g.Strategies() {
		if s == comm.Tuned {
			continue
		}
		if err := route.GroupOf(g).UseWhole(ctx, string(s)); err != nil {
			return nil, err
		}
		q := *p
		q.together = s == comm.CopyEngines // copy engines need the operations of all ranks at once
		q.only = func(j job) bool { return route.GroupOf(g).Chosen(p.collective(j)) == string(s) }
		r, err := q.run(ctx, g, nil)
		if err != nil {
			return nil, fmt.Errorf("by %s: %w", s, err)
		}
		for _, row := range r.Rows {
			row.Strategy = string(s)
		}
		if all == nil {
			all = r
			continue
		}
		all.Rows = append(all.Rows, r.Rows...)
	}
	if err := all.choose(ctx, g, p); err != nil {
		return nil, err
	}
	all.AvgBusBW, all.Wrong = 0, 0
	all.sumUp()
	return all, nil
}

// choose marks the rows whose strategy the group's tuning chooses, and sorts rows
// of the same operation and size together.
func (r *Report) choose(ctx context.Context, g *comm.Group, p *Plan) error {
	if slices.Contains(g.Strategies(), comm.Tuned) {
		if err := g.Use(ctx, comm.Tuned); err != nil {
			return err
		}
	}
	r.Strategy = string(g.Strategy())
	jobs, err := p.jobs(g.Size())
	if err != nil {
		return err
	}
	var rows []*Row
	for _, j := range jobs {
		name, chosen := j.describe().Name(false), route.GroupOf(g).Chosen(p.collective(j))
		for _, row := range r.Rows {
			plain := *row
			plain.Strategy = ""
			if plain.Name(false) == name {
				row.Chosen = row.Strategy == chosen
				rows = append(rows, row)
			}
		}
	}
	r.Rows = rows
	return nil
}

// collective returns the job as comm describes it to choose a strategy, for one
// call that issues for all local ranks. Its Kind is 0 if comm has no strategies for it.
func (p *Plan) collective(j job) collective.Op {
	kinds := map[kind]collective.Kind{
		allReduce: collective.AllReduce, allGather: collective.AllGather, reduceScatter: collective.ReduceScatter,
		broadcast: collective.Broadcast, allToAll: collective.AllToAll,
	}
	x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: kinds[j.op.kind], DType: j.dtype, N: j.layout.param, Captured: p.Launches > 0}}, Together: true}
	if j.op.reduces {
		x.Reduction = collective.Reduction(j.red.raw())
	}
	if j.dtype == memory.Invalid || j.red == mulSum {
		x.Kind = 0 // comm has no strategies for mulSum
	}
	return x
}
