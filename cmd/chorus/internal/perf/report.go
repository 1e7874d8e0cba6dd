package perf

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/nccl"
)

// A Report holds the results, the plan and the machine.
type Report struct {
	Form     int       `json:"form"` // format number of this file
	Time     time.Time `json:"start_time"`
	Host     string    `json:"host"` // host of rank 0
	Backend  string    `json:"backend"`
	Device   string    `json:"device"` // device of rank 0
	NCCL     string    `json:"nccl_version"`
	Strategy string    `json:"strategy"` // strategy of the group
	InOrder  bool      `json:"deterministic,omitempty"`
	Ranks    int       `json:"ranks"`
	Locals   int       `json:"ranks_of_process"`
	Plan     *Summary  `json:"plan,omitempty"`
	Rows     []*Row    `json:"results,omitempty"`
	Pairs    *Pairs    `json:"pairs,omitempty"`

	AvgBusBW float64  `json:"average_bus_bandwidth"` // mean over all sides of all rows, as in nccl-tests
	Wrong    int64    `json:"out_of_bounds"`
	Link     float64  `json:"link_bandwidth,omitempty"` // of a GPU in one direction, 10^9 bytes a second; 0: unknown
	Verdict  *Verdict `json:"verdict,omitempty"`

	Error string `json:"error,omitempty"` // why the measurement ended early
}

// form is the format number of a report's JSON.
const form = 1

// A Summary is the plan with names, for JSON.
type Summary struct {
	Operations []string `json:"operations"`
	DTypes     []string `json:"types"`
	Reductions []string `json:"redops"`
	Root       int      `json:"root"` // -1: all roots
	MinBytes   int      `json:"min_bytes"`
	MaxBytes   int      `json:"max_bytes"`
	StepBytes  int      `json:"step_bytes"`
	StepFactor int      `json:"step_factor"`
	Iterations int      `json:"iterations"`
	Warmups    int      `json:"warmup_iterations"`
	Launches   int      `json:"graph_launches"`
	Checks     int      `json:"checks"`
	Register   int      `json:"registration"`
}

func (p *Plan) summary() *Summary {
	s := &Summary{
		Root: p.Root, MinBytes: p.Sizes.Min, MaxBytes: p.Sizes.Max, StepBytes: p.Sizes.Step, StepFactor: p.Sizes.Factor, Iterations: p.Iterations, Warmups: p.Warmups,
		Launches: p.Launches, Checks: p.Checks, Register: int(p.Register),
	}
	for _, o := range p.Operations {
		s.Operations = append(s.Operations, o.Name)
	}
	for _, t := range p.DTypes {
		s.DTypes = append(s.DTypes, dtypeName(t))
	}
	for _, r := range p.Reductions {
		s.Reductions = append(s.Reductions, r.String())
	}
	return s
}

// describe returns a report with the machine and the group, but no results.
func describe(g *comm.Group) (*Report, error) {
	dev := g.Device(0)
	name, err := dev.Name()
	if err != nil {
		return nil, err
	}
	version, err := nccl.Version(dev)
	if err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return &Report{
		Form: form, Time: time.Now().UTC().Truncate(time.Second), Host: host, Backend: dev.System().Backend(), Device: name,
		NCCL: version, Strategy: string(g.Strategy()), InOrder: g.Deterministic() != nil, Ranks: g.Size(), Locals: g.Locals(), Link: LinkOf(name),
	}, nil
}

// sumUp computes the totals from the rows.
func (r *Report) sumUp() {
	n := 0
	for _, row := range r.Rows {
		for _, m := range row.Sides() {
			r.AvgBusBW += m.BusBW
			n++
			if m.Wrong != nil {
				r.Wrong += *m.Wrong
			}
		}
	}
	if n > 0 {
		r.AvgBusBW /= float64(n)
	}
	r.Verdict = r.judge()
}

// SetLink sets the bandwidth of a GPU's link and recomputes the verdict.
func (r *Report) SetLink(gbs float64) {
	r.Link = gbs
	r.Verdict = r.judge()
}

// Sides returns the measured sides of a row: out of place, then in place if measured.
func (r *Row) Sides() []*Measure {
	if r.InPlace == nil {
		return []*Measure{r.OutOfPlace}
	}
	return []*Measure{r.OutOfPlace, r.InPlace}
}

// title describes the run in one line.
func (r *Report) title() string {
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

// links maps substrings of product names to the bandwidth of a GPU's NVLinks in
// one direction, in 10^9 bytes a second. It omits products with optional NVLinks.
var links = []struct {
	name string
	gbs  float64
}{
	{"B300", 900}, {"B200", 900}, {"GB300", 900}, {"GB200", 900}, {"H20", 450}, {"H100", 450}, {"GH200", 450},
	{"H800", 200}, {"A100", 300}, {"A800", 200}, {"V100", 150},
}

// LinkOf returns the link bandwidth of a GPU with a product name, or 0 if unknown.
func LinkOf(name string) float64 {
	if strings.Contains(name, "PCIe") || strings.Contains(name, "NVL") {
		return 0
	}
	for _, l := range links {
		if strings.Contains(name, l.name) {
			return l.gbs
		}
	}
	return 0
}

// WriteJSON writes the report with the field names of nccl-tests' JSON. It does
// not contain the environment.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

var csvHead = []string{"operation", "ranks", "size", "count", "type", "redop", "root", "in_place", "time_us", "alg_bw", "bus_bw", "p50_us", "p99_us", "wrong", "strategy", "chosen"}

// WriteCSV writes a line for each side of each row.
func (r *Report) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	if r.Pairs != nil {
		return r.Pairs.writeCSV(out)
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
func (m *Pairs) writeCSV(out *csv.Writer) error {
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
func (r *Report) WriteBench(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "goos: linux\npkg: chorus/perf\ncpu: %s\n", r.Device)
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			fmt.Fprintf(&b, "Benchmark%s-%d\t%d\t%.1f ns/op\t%.3f algbw-GB/s\t%.3f busbw-GB/s\t%.1f p99-ns\n",
				row.name(i == 1), r.Ranks, r.Plan.Iterations, m.Time*1e3, m.AlgBW, m.BusBW, m.P99*1e3)
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

// name returns a unique benchmark name for a side of a row.
func (r *Row) name(inPlace bool) string {
	parts := []string{camel(r.Operation), "type=" + r.Type}
	if r.Reduction != Moves.String() {
		parts = append(parts, "redop="+r.Reduction)
	}
	if r.Root >= 0 {
		parts = append(parts, fmt.Sprint("root=", r.Root))
	}
	if r.Strategy != "" {
		parts = append(parts, "strategy="+r.Strategy)
	}
	if inPlace {
		parts = append(parts, "inplace")
	}
	return strings.Join(append(parts, fmt.Sprint("bytes=", r.Bytes)), "/")
}

// camel converts all_reduce to AllReduce.
func camel(name string) string {
	var b strings.Builder
	for _, part := range strings.Split(name, "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
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
