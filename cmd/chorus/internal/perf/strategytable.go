package perf

import (
	"fmt"
	"io"
	"text/tabwriter"
)

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
