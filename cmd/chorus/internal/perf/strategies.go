package perf

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/memory"
)

// RunStrategies runs the plan once for each strategy of a group with the strategy
// comm.Tuned. Each run contains the rows that the strategy supports. A row names
// its strategy and tells whether the group's tuning chooses it.
func RunStrategies(ctx context.Context, g *comm.Group, p *Plan) (*Report, error) {
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
		r, err := Run(ctx, g, &q, nil)
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
		name, chosen := j.describe().name(false), groups.Of(g).Chosen(p.collective(j))
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
	if j.dtype == memory.Invalid || j.red == MulSum {
		x.Kind = 0 // comm has no strategies for MulSum
	}
	return x
}

// WriteStrategies writes the out-of-place times of the strategies side by side,
// in µs. A star marks the chosen strategy, an arrow each faster one.
func (r *Report) WriteStrategies(w io.Writer) error {
	for rows := r.Rows; len(rows) > 0; {
		n := 1
		for n < len(rows) && rows[n].table() == rows[0].table() {
			n++
		}
		if err := strategyTable(rows[:n]).Write(w); err != nil {
			return err
		}
		rows = rows[n:]
	}
	_, err := fmt.Fprint(w, "#\n# * chosen, < faster than the chosen one\n")
	return err
}

// table identifies the table that a row belongs to.
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

// strategyTable builds a table from rows; the rows of one size are consecutive.
func strategyTable(rows []*Row) *StrategyTable {
	b := &StrategyTable{Title: rows[0].table()}
	chosen := 0.0
	for i, row := range rows {
		if !slices.Contains(b.Columns, row.Strategy) {
			b.Columns = append(b.Columns, row.Strategy)
		}
		if i == 0 || row.Bytes != rows[i-1].Bytes {
			b.Rows = append(b.Rows, StrategyRow{row.Bytes, map[string]string{}})
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

// timeOfChosen returns the time of the chosen row of the same size, or 0.
func (r *Row) timeOfChosen(rows []*Row) float64 {
	for _, row := range rows {
		if row.Chosen && row.Bytes == r.Bytes {
			return row.OutOfPlace.Time
		}
	}
	return 0
}

// A StrategyTable is a table of one operation with a column for each strategy.
type StrategyTable struct {
	Title   string
	Columns []string
	Rows    []StrategyRow
}

// A StrategyRow is one size. Cells maps a column to its text, which ends in a mark
// of one character.
type StrategyRow struct {
	Bytes int
	Cells map[string]string
}

// Write writes the table.
func (b *StrategyTable) Write(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "#\n# %s, us\n", b.Title); err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "#      bytes\t") // Flush returns the error
	for _, name := range b.Columns {
		fmt.Fprint(t, name, " \t")
	}
	fmt.Fprintln(t)
	for _, row := range b.Rows {
		fmt.Fprint(t, row.Bytes, "\t")
		for _, name := range b.Columns {
			cell := row.Cells[name]
			if cell == "" {
				cell = "- "
			}
			fmt.Fprint(t, cell, "\t")
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// Cell formats a time and appends a mark.
func Cell(us float64, mark string) string { return short(us) + mark }
