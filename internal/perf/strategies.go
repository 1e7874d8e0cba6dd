package perf

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// RunStrategies is Run once for each strategy of a group that was made with comm.Tuned,
// with the rows that the strategy can carry out: each has its name, and says whether the
// group's tuning chooses it.
func RunStrategies(ctx context.Context, g *comm.Group, p *Plan) (*Report, error) {
	var all *Report
	for _, s := range g.Strategies() {
		if s == comm.Tuned {
			continue
		}
		if err := g.UseWhole(ctx, s); err != nil {
			return nil, err
		}
		q := *p
		q.together = s == comm.CopyEngines // which needs all ranks' operations at once
		q.only = func(j job) bool { return g.Chosen(p.collective(j)) == s }
		r, err := Run(ctx, g, &q, nil)
		if err != nil {
			return nil, fmt.Errorf("by %s: %w", s, err)
		}
		for _, row := range r.Rows {
			row.Strategy = s.String()
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

// choose marks the rows whose strategy the group's tuning chooses, and puts those of one
// operation and size side by side.
func (r *Report) choose(ctx context.Context, g *comm.Group, p *Plan) error {
	if slices.Contains(g.Strategies(), comm.Tuned) {
		if err := g.Use(ctx, comm.Tuned); err != nil {
			return err
		}
	}
	r.Strategy = g.Strategy().String()
	jobs, err := p.jobs(g.Size())
	if err != nil {
		return err
	}
	var rows []*Row
	for _, j := range jobs {
		name, chosen := j.describe().name(false), g.Chosen(p.collective(j)).String()
		for _, row := range r.Rows {
			plain := *row
			plain.Strategy = ""
			if plain.name(false) == name {
				row.Chosen = row.Strategy == chosen
				rows = append(rows, row)
			}
		}
	}
	r.Rows = rows
	return nil
}

// collective is a job of the plan as comm chooses its strategy, where one call has it of
// all ranks; of no kind where there is no choice.
func (p *Plan) collective(j job) nccl.Collective {
	kinds := map[kind]nccl.CollectiveKind{
		allReduce: nccl.AllReduceKind, allGather: nccl.AllGatherKind, reduceScatter: nccl.ReduceScatterKind,
		broadcast: nccl.BroadcastKind, allToAll: nccl.AllToAllKind,
	}
	x := nccl.Collective{Kind: kinds[j.op.kind], DType: j.dtype, Count: j.layout.param, Together: true, Captured: p.Launches > 0}
	if j.op.reduces {
		x.Op = j.red.raw()
	}
	if j.dtype == memory.Invalid || j.red == MulSum {
		x.Kind = 0 // a reduction of its own
	}
	return x
}

// WriteStrategies writes the times of the strategies side by side, those out of place,
// in µs. The chosen one has a star, and those that were faster have an arrow.
func (r *Report) WriteStrategies(w io.Writer) error {
	for rows := r.Rows; len(rows) > 0; {
		n := 1
		for n < len(rows) && rows[n].table() == rows[0].table() {
			n++
		}
		if err := besides(rows[:n]).Write(w); err != nil {
			return err
		}
		rows = rows[n:]
	}
	_, err := fmt.Fprint(w, "#\n# * chosen, < faster than the chosen one\n")
	return err
}

// table is what the rows of one table have in common.
func (r *Row) table() string {
	name := fmt.Sprintf("%s %s", r.Operation, r.Type)
	if r.Reduction != Moves.String() {
		name += " " + r.Reduction
	}
	if r.Root >= 0 {
		name += fmt.Sprint(", root ", r.Root)
	}
	return name
}

// besides makes a table of rows, those of a size one behind the other.
func besides(rows []*Row) *Beside {
	b := &Beside{Title: rows[0].table()}
	chosen := 0.0
	for i, row := range rows {
		if !slices.Contains(b.Columns, row.Strategy) {
			b.Columns = append(b.Columns, row.Strategy)
		}
		if i == 0 || row.Bytes != rows[i-1].Bytes {
			b.Rows = append(b.Rows, BesideRow{row.Bytes, map[string]string{}})
			chosen = row.timeOfChosen(rows)
		}
		mark := " "
		switch {
		case row.Chosen:
			mark = "*"
		case row.OutOfPlace.Time < chosen:
			mark = "<"
		}
		b.Rows[len(b.Rows)-1].Cells[row.Strategy] = Cell(row.OutOfPlace.Time, mark)
	}
	return b
}

// timeOfChosen is that of the chosen row of the same size, or 0.
func (r *Row) timeOfChosen(rows []*Row) float64 {
	for _, row := range rows {
		if row.Chosen && row.Bytes == r.Bytes {
			return row.OutOfPlace.Time
		}
	}
	return 0
}
