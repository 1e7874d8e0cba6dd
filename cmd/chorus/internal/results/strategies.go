package results

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/gochorus/chorus/perf"
)

// WriteStrategies writes the out-of-place times of the strategies side by side,
// in µs. A star marks the chosen strategy, an arrow each faster one.
func WriteStrategies(r *perf.Report, w io.Writer) error {
	for rows := r.Rows; len(rows) > 0; {
		n := 1
		for n < len(rows) && tableOf(rows[n]) == tableOf(rows[0]) {
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

// tableOf identifies the table that a row belongs to.
func tableOf(r *perf.Row) string {
	name := fmt.Sprintf("%s %s", r.Operation, r.Type)
	if r.Reduction != "none" {
		name += " " + r.Reduction
	}
	if r.Root >= 0 {
		name += fmt.Sprint(", root ", r.Root)
	}
	return name
}

// strategyTable builds a table from rows; the rows of one size are consecutive.
func strategyTable(rows []*perf.Row) *StrategyTable {
	b := &StrategyTable{Title: tableOf(rows[0])}
	chosen := 0.0
	for i, row := range rows {
		if !slices.Contains(b.Columns, row.Strategy) {
			b.Columns = append(b.Columns, row.Strategy)
		}
		if i == 0 || row.Bytes != rows[i-1].Bytes {
			b.Rows = append(b.Rows, StrategyRow{row.Bytes, map[string]string{}})
			chosen = timeOfChosen(row, rows)
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
func timeOfChosen(r *perf.Row, rows []*perf.Row) float64 {
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
