package perf

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/memory"
)

// runStrategies runs the plan once for each strategy of a group with the strategy
// comm.Tuned. Each run contains the rows that the strategy supports. A row names
// its strategy and tells whether the group's tuning chooses it.
func (p *Plan) runStrategies(ctx context.Context, g *comm.Group) (*Report, error) {
	var all *Report
	for _, s := range g.Strategies() {
		if s == comm.Tuned {
			continue
		}
		if err := groups.Of(g).UseWhole(ctx, string(s)); err != nil {
			return nil, err
		}
		q := *p
		q.together = s == comm.CopyEngines // copy engines need the operations of all ranks at once
		q.only = func(j job) bool { return groups.Of(g).Chosen(p.collective(j)) == string(s) }
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
		name, chosen := j.describe().Name(false), groups.Of(g).Chosen(p.collective(j))
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
	kinds := map[kind]flight.Kind{
		allReduce: flight.AllReduce, allGather: flight.AllGather, reduceScatter: flight.ReduceScatter,
		broadcast: flight.Broadcast, allToAll: flight.AllToAll,
	}
	x := collective.Op{Op: flight.Op{Request: flight.Request{Kind: kinds[j.op.kind], DType: j.dtype, N: j.layout.param, Captured: p.Launches > 0}}, Together: true}
	if j.op.reduces {
		x.Reduction = flight.Reduction(j.red.raw())
	}
	if j.dtype == memory.Invalid || j.red == mulSum {
		x.Kind = 0 // comm has no strategies for mulSum
	}
	return x
}
