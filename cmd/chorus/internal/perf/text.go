package perf

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/gochorus/chorus/comm"
)

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
	r, err := describe(g)
	if err != nil {
		return err
	}
	if t.link == 0 {
		t.link = r.Link
	}
	return r.WriteHead(t.w)
}

// Row writes a row, and the table head before the first row of an operation.
func (t *Table) Row(r *Row) error {
	in := r.InPlace
	if t.op != r.Operation {
		t.op = r.Operation
		if _, err := fmt.Fprintf(t.w, "#\n# %s\n%s", r.Operation, tableHead); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(t.w, "%12d %12d %8s %6s %6d %s %s  %s  %s %7s\n",
		r.Bytes, r.Count, r.Type, r.Reduction, r.Root, side(r.OutOfPlace), side(in), quantiles(r.OutOfPlace), quantiles(in), r.part(t.link))
	return err
}

// part returns the fraction of the link that the faster side of a row uses.
func (r *Row) part(link float64) string {
	if link == 0 {
		return "N/A"
	}
	best := 0.0
	for _, m := range r.Sides() {
		best = max(best, m.BusBW)
	}
	return strconv.FormatFloat(100*best/link, 'f', 1, 64)
}

func side(m *Measure) string {
	if m == nil {
		return fmt.Sprintf("%7s %7s %7s %6s", "N/A", "N/A", "N/A", "N/A")
	}
	wrong := "N/A"
	if m.Wrong != nil {
		wrong = strconv.FormatInt(*m.Wrong, 10)
	}
	return fmt.Sprintf("%7s %7.2f %7.2f %6s", short(m.Time), m.AlgBW, m.BusBW, wrong)
}

func quantiles(m *Measure) string {
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
func (r *Report) WriteEnd(w io.Writer) error {
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
func (r *Report) WriteHead(w io.Writer) error {
	_, err := fmt.Fprintf(w, "# chorus perf: %s\n", r.title())
	return err
}

// WriteText writes the matrices of the pairs.
func (m *Pairs) WriteText(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "# from row to column, GB/s, %d bytes one way\n", m.Bytes); err != nil {
		return err
	}
	if err := matrix(w, m.Bandwidth, "%.1f"); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "#\n# half a round trip of %d bytes, us\n", latencyBytes); err != nil {
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
