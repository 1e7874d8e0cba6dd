package perf

import (
	"fmt"
	"os"
	"runtime"
	"strings"
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
