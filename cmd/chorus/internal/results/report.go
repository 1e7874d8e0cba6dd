// Package results writes the reports of package perf as chorus perf prints them: the tables of nccl-tests, JSON, CSV,
// the format of Go's benchmarks, and a page of HTML. It compares a report with an earlier one.
// Its charts, which other commands draw too, are SVG that is readable on light and dark backgrounds and needs no network.
package results

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/perf"
)

// title describes the run in one line.
func title(r *perf.Report) string {
	ranks := fmt.Sprint(r.Ranks, " ranks")
	if r.Ranks == 1 {
		ranks = "1 rank"
	}
	by := "NCCL " + r.NCCL
	if r.Strategy != "" && r.Strategy != string(comm.NCCLOnly) {
		by += ", strategy " + r.Strategy
	}
	if r.InOrder {
		by += ", deterministic"
	}
	return fmt.Sprintf("%s, %s, %s, %s/%s, host %s", ranks, r.Device, by, runtime.GOOS, runtime.GOARCH, r.Host)
}

// WriteJSON writes the report, without the environment, with the field names of
// nccl-tests' JSON.
func WriteJSON(r *perf.Report, w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

var csvHead = []string{"operation", "ranks", "size", "count", "type", "redop", "root", "in_place", "time_us", "alg_bw", "bus_bw", "p50_us", "p99_us", "wrong", "strategy", "chosen"}

// WriteCSV writes a line for each side of each row.
func WriteCSV(r *perf.Report, w io.Writer) error {
	out := csv.NewWriter(w)
	if r.Pairs != nil {
		return writePairsCSV(r.Pairs, out)
	}
	_ = out.Write(csvHead) // Error below returns the error
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			wrong := ""
			if m.Wrong != nil {
				wrong = strconv.FormatInt(*m.Wrong, 10)
			}
			_ = out.Write([]string{
				row.Operation, strconv.Itoa(r.Ranks), strconv.Itoa(row.Bytes), strconv.Itoa(row.Count), row.Type, row.Reduction,
				strconv.Itoa(row.Root), strconv.FormatBool(i == 1), plain(m.Time), plain(m.AlgBW), plain(m.BusBW), plain(m.P50), plain(m.P99), wrong, row.Strategy, strconv.FormatBool(row.Chosen),
			})
		}
	}
	out.Flush()
	return out.Error()
}

// writeCSV writes a line for each pair.
func writePairsCSV(m *perf.Pairs, out *csv.Writer) error {
	_ = out.Write([]string{"from", "to", "size", "bandwidth", "latency_us"})
	for a, row := range m.Bandwidth {
		for b, bw := range row {
			if a != b {
				_ = out.Write([]string{strconv.Itoa(a), strconv.Itoa(b), strconv.Itoa(m.Bytes), plain(bw), plain(m.Latency[a][b])})
			}
		}
	}
	out.Flush()
	return out.Error()
}

func plain(x float64) string { return strconv.FormatFloat(x, 'g', 6, 64) }

// WriteBench writes the format of go test -bench for benchstat.
func WriteBench(r *perf.Report, w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "goos: linux\npkg: chorus/perf\ncpu: %s\n", r.Device)
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			fmt.Fprintf(&b, "Benchmark%s-%d\t%d\t%.1f ns/op\t%.3f algbw-GB/s\t%.3f busbw-GB/s\t%.1f p99-ns\n",
				row.Name(i == 1), r.Ranks, r.Plan.Iterations, m.Time*1e3, m.AlgBW, m.BusBW, m.P99*1e3)
		}
	}
	if m := r.Pairs; m != nil {
		for from, row := range m.Bandwidth {
			for to, bw := range row {
				if from != to {
					fmt.Fprintf(&b, "BenchmarkPairs/from=%d/to=%d/bytes=%d\t1\t%.3f GB/s\t%.1f ping-ns\n", from, to, m.Bytes, bw, m.Latency[from][to]*1e3)
				}
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// A Table writes rows in the format of nccl-tests, with the median and the 99th
// percentile of single operations appended.
type Table struct {
	w    io.Writer
	link float64
	op   string // of the previous row
}

// NewTable returns a table that writes to w row by row. link is the bandwidth of
// a GPU's link in one direction in GB/s, or 0 if unknown.
func NewTable(w io.Writer, link float64) *Table { return &Table{w: w, link: link} }

const tableHead = `#
#                                                              out-of-place                       in-place          out-of-place         in-place    best of
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong     p50      p99     p50      p99    link
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)           (us)     (us)    (us)     (us)     (%)
`

// Head writes the lines above all tables. If the link is unknown, it derives the
// link from the product's name.
func (t *Table) Head(g *comm.Group) error {
	r, err := perf.Describe(g)
	if err != nil {
		return err
	}
	if t.link == 0 {
		t.link = r.Link
	}
	return WriteHead(r, t.w)
}

// Row writes a row, and the table head before the first row of an operation.
func (t *Table) Row(r *perf.Row) error {
	in := r.InPlace
	if t.op != r.Operation {
		t.op = r.Operation
		if _, err := fmt.Fprintf(t.w, "#\n# %s\n%s", r.Operation, tableHead); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(t.w, "%12d %12d %8s %6s %6d %s %s  %s  %s %7s\n",
		r.Bytes, r.Count, r.Type, r.Reduction, r.Root, side(r.OutOfPlace), side(in), quantiles(r.OutOfPlace), quantiles(in), part(r, t.link))
	return err
}

// part returns the fraction of the link that the faster side of a row uses.
func part(r *perf.Row, link float64) string {
	if link == 0 {
		return "N/A"
	}
	best := 0.0
	for _, m := range r.Sides() {
		best = max(best, m.BusBW)
	}
	return strconv.FormatFloat(100*best/link, 'f', 1, 64)
}

func side(m *perf.Measure) string {
	if m == nil {
		return fmt.Sprintf("%7s %7s %7s %6s", "N/A", "N/A", "N/A", "N/A")
	}
	wrong := "N/A"
	if m.Wrong != nil {
		wrong = strconv.FormatInt(*m.Wrong, 10)
	}
	return fmt.Sprintf("%7s %7.2f %7.2f %6s", short(m.Time), m.AlgBW, m.BusBW, wrong)
}

func quantiles(m *perf.Measure) string {
	if m == nil {
		return fmt.Sprintf("%7s %8s", "N/A", "N/A")
	}
	return fmt.Sprintf("%7s %8s", short(m.P50), short(m.P99))
}

// short formats a time in the width of a column.
func short(us float64) string {
	switch {
	case us >= 100000:
		return strconv.FormatFloat(us, 'f', 0, 64)
	case us >= 1000:
		return strconv.FormatFloat(us, 'f', 1, 64)
	}
	return strconv.FormatFloat(us, 'f', 2, 64)
}

// WriteEnd writes the lines below the tables.
func WriteEnd(r *perf.Report, w io.Writer) error {
	var b strings.Builder
	switch {
	case len(r.Rows) == 0:
	case r.Plan.Checks == 0:
		b.WriteString("# Out of bounds values : not checked\n")
	case r.Wrong == 0:
		b.WriteString("# Out of bounds values : 0 OK\n")
	default:
		fmt.Fprintf(&b, "# Out of bounds values : %d FAILED\n", r.Wrong)
	}
	if len(r.Rows) > 0 {
		fmt.Fprintf(&b, "# Avg bus bandwidth    : %.5g GB/s", r.AvgBusBW)
		if r.Link > 0 {
			fmt.Fprintf(&b, " (mean of all sizes; the link has %.0f GB/s)", r.Link)
		}
		b.WriteString("\n")
	}
	if v := r.Verdict; v != nil {
		fmt.Fprintf(&b, "# Verdict              : %s: %s\n", map[bool]string{true: "good", false: "NOT GOOD"}[v.OK], v.Reason)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteHead writes the lines above the tables.
func WriteHead(r *perf.Report, w io.Writer) error {
	_, err := fmt.Fprintf(w, "# chorus perf: %s\n", title(r))
	return err
}

// WritePairs writes the matrices of the pairs.
func WritePairs(m *perf.Pairs, w io.Writer) error {
	if _, err := fmt.Fprintf(w, "# from row to column, GB/s, %d bytes one way\n", m.Bytes); err != nil {
		return err
	}
	if err := matrix(w, m.Bandwidth, "%.1f"); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "#\n# half a round trip of %d bytes, us\n", perf.LatencyBytes); err != nil {
		return err
	}
	return matrix(w, m.Latency, "%.2f")
}

func matrix(w io.Writer, m [][]float64, format string) error {
	t := tabwriter.NewWriter(w, 6, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "#\t")
	for i := range m {
		fmt.Fprintf(t, "%d\t", i)
	}
	for i, row := range m {
		fmt.Fprintf(t, "\n%d\t", i)
		for j, x := range row {
			if i == j {
				fmt.Fprint(t, "-\t")
			} else {
				fmt.Fprintf(t, format+"\t", x)
			}
		}
	}
	fmt.Fprintln(t)
	return t.Flush()
}

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
