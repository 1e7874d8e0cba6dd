package perf

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/gochorus/chorus/comm"
)

// A Report is what was measured, and where.
type Report struct {
	Form     int       `json:"form"` // of this file
	Time     time.Time `json:"start_time"`
	Host     string    `json:"host"` // of rank 0
	Backend  string    `json:"backend"`
	Device   string    `json:"device"` // of rank 0
	NCCL     string    `json:"nccl_version"`
	Strategy string    `json:"strategy"` // of the group
	Ranks    int       `json:"ranks"`
	Locals   int       `json:"ranks_of_process"`
	Plan     *Summary  `json:"plan,omitempty"`
	Rows     []*Row    `json:"results,omitempty"`
	Pairs    *Pairs    `json:"pairs,omitempty"`

	AvgBusBW float64  `json:"average_bus_bandwidth"` // over all sides of all rows, as nccl-tests
	Wrong    int64    `json:"out_of_bounds"`
	Link     float64  `json:"link_bandwidth,omitempty"` // of a GPU in one direction, 10^9 bytes a second; 0: not known
	Verdict  *Verdict `json:"verdict,omitempty"`
}

// form is the number of the form of a report's JSON.
const form = 1

// A Summary is the plan in names.
type Summary struct {
	Operations []string `json:"operations"`
	DTypes     []string `json:"types"`
	Reductions []string `json:"redops"`
	Root       int      `json:"root"` // -1: all
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

// describe begins a report with what is known before.
func describe(g *comm.Group) (*Report, error) {
	dev := g.Device(0)
	name, err := dev.Name()
	if err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return &Report{
		Form: form, Time: time.Now().UTC().Truncate(time.Second), Host: host, Backend: dev.System().Backend(), Device: name,
		NCCL: g.Communicator(0).Version(), Strategy: g.Strategy().String(), Ranks: g.Size(), Locals: g.Locals(), Link: LinkOf(name),
	}, nil
}

// sumUp fills in what follows from the rows.
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

// SetLink says what a GPU's link can do, and judges by it.
func (r *Report) SetLink(gbs float64) {
	r.Link = gbs
	r.Verdict = r.judge()
}

// Sides are the measures of a row that there are: out of place, and then in place.
func (r *Row) Sides() []*Measure {
	if r.InPlace == nil {
		return []*Measure{r.OutOfPlace}
	}
	return []*Measure{r.OutOfPlace, r.InPlace}
}

// title says in a line what ran where.
func (r *Report) title() string {
	ranks := fmt.Sprint(r.Ranks, " ranks")
	if r.Ranks == 1 {
		ranks = "1 rank"
	}
	by := "NCCL " + r.NCCL
	if r.Strategy != "" && r.Strategy != comm.NCCLOnly.String() {
		by += ", strategy " + r.Strategy
	}
	return fmt.Sprintf("%s, %s, %s, %s/%s, host %s", ranks, r.Device, by, runtime.GOOS, runtime.GOARCH, r.Host)
}

// links are the bandwidths of a GPU's links to the others of its host in one
// direction, 10^9 bytes a second, by what the product's name has. Cards whose links
// are an option are not here.
var links = []struct {
	name string
	gbs  float64
}{
	{"B300", 900}, {"B200", 900}, {"GB300", 900}, {"GB200", 900}, {"H20", 450}, {"H100", 450}, {"GH200", 450},
	{"H800", 200}, {"A100", 300}, {"A800", 200}, {"V100", 150},
}

// LinkOf returns what the links of a GPU of that name can do, or 0.
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
