package perf

import (
	"context"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/nccl"
)

// A Report holds the results, the plan and the machine. Its JSON has the field names of nccl-tests where
// they have the field, and does not contain the environment.
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
	GPUs     []GPU     `json:"gpus,omitempty"` // by rank
	Plan     *Plan     `json:"plan,omitempty"`
	Rows     []*Row    `json:"results,omitempty"`
	Pairs    *Pairs    `json:"pairs,omitempty"`

	AvgBusBW float64  `json:"average_bus_bandwidth"` // mean over all sides of all rows, as in nccl-tests
	Wrong    int64    `json:"out_of_bounds"`
	Link     float64  `json:"link_bandwidth,omitempty"` // of a GPU in one direction, 10^9 bytes a second; 0: unknown
	Verdict  *Verdict `json:"verdict,omitempty"`

	Error string `json:"error,omitempty"` // why the measurement ended early
}

// Form is the format number of a report's JSON.
const Form = 1

// Describe returns a report with the machine and the group, but no results,
// without communicating.
func Describe(g *comm.Group) (*Report, error) {
	if g == nil {
		return nil, errNoGroup
	}
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
		Form: Form, Time: time.Now().UTC().Truncate(time.Second), Host: host, Backend: dev.System().Backend(), Device: name,
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

// A GPU identifies the device of a rank, so that a verdict names what to repair.
type GPU struct {
	Rank    int    `json:"rank"`
	Host    string `json:"host"`
	UUID    string `json:"uuid"` // as nvidia-smi prints it
	PCI     string `json:"pci"`  // such as 0000:1b:00.0
	Product string `json:"product"`
}

// String returns, for example, "GPU-8f6d… (0000:1b:00.0) of host n1, rank 3".
func (x GPU) String() string {
	return fmt.Sprintf("%s (%s) of host %s, rank %d", x.UUID, x.PCI, x.Host, x.Rank)
}

// gpusOf gathers the GPUs of all ranks.
func gpusOf(ctx context.Context, g *comm.Group) ([]GPU, error) {
	mine, err := localGPUs(g)
	if err != nil {
		return nil, err
	}
	all, err := comm.GatherValues(ctx, g, nil, mine...)
	safe.Record(&all)
	return all, err
}

// localGPUs identifies the devices of the local ranks.
func localGPUs(g *comm.Group) ([]GPU, error) {
	devs := make([]*device.Device, g.Locals())
	for i := range devs {
		devs[i] = g.Device(i)
	}
	list, err := describeDevices(devs, g.Rank())
	for i := range list {
		list[i].Rank = g.Communicator(i).Rank()
	}
	return list, err
}

// describeDevices identifies devices, the first of which has a rank.
func describeDevices(devs []*device.Device, first int) ([]GPU, error) {
	host := env.HostName.Value()
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			return nil, err
		}
	}
	list := make([]GPU, len(devs))
	for i, d := range devs {
		p, err := d.Properties()
		if err != nil {
			return nil, err
		}
		list[i] = GPU{Rank: first + i, Host: host, UUID: p.UUID, PCI: p.PCIBusID, Product: p.Name}
	}
	return list, nil
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

// A Verdict tells whether the results are correct and as fast as expected.
type Verdict struct {
	OK     bool   `json:"ok"`
	Reason string `json:"reason"`
}

// largeBytes is the minimum size for an operation to saturate a link.
const largeBytes = 64 << 20

// expected returns the fraction of the link's bandwidth that large operations
// should reach. Two ranks reach less, because NCCL gives a pair fewer channels.
func expected(ranks int) float64 {
	if ranks == 2 {
		return 0.5
	}
	return 0.65
}

// judge returns the verdict of a report, or nil if it has too little data.
func (r *Report) judge() *Verdict {
	switch {
	case r.Wrong > 0:
		return &Verdict{false, fmt.Sprintf("%d elements are wrong: do not trust any result of this machine", r.Wrong)}
	case r.Ranks == 1:
		return &Verdict{false, "one rank: the operations are copies within a GPU and do not measure a bus bandwidth"}
	case r.Backend != "cuda":
		return &Verdict{true, "results correct (virtual devices: timings are not meaningful)"}
	case r.Pairs != nil:
		return r.Pairs.judge()
	case r.Link == 0:
		return nil
	}
	best, of := 0.0, ""
	low := math.Inf(1)
	lowOf := ""
	for op, bw := range r.best() {
		if bw > best {
			best, of = bw, op
		}
		if bw < low {
			low, lowOf = bw, op
		}
	}
	if best == 0 {
		return nil
	}
	text := fmt.Sprintf("%s reaches %.0f GB/s, %.0f %% of the link's %.0f", of, best, 100*best/r.Link, r.Link)
	if want := expected(r.Ranks) * r.Link; low < want {
		return &Verdict{false, fmt.Sprintf("%s; %s reaches only %.0f GB/s, expected %.0f: check the links (chorus perf pairs) and other programs on the GPUs", text, lowOf, low, want)}
	}
	return &Verdict{true, text + ", as expected"}
}

// best returns the highest bus bandwidth of each operation at large sizes.
func (r *Report) best() map[string]float64 {
	best := map[string]float64{}
	for _, row := range r.Rows {
		if row.Bytes < largeBytes || strings.HasPrefix(row.Operation, "hypercube") {
			continue
		}
		for _, m := range row.Sides() {
			best[row.Operation] = max(best[row.Operation], m.BusBW)
		}
	}
	return best
}

func (m *Pairs) judge() *Verdict {
	slow := m.Slow()
	if len(slow) == 0 {
		least, median, most := spreadOf(m.all())
		return &Verdict{true, fmt.Sprintf("all pairs similar: %.1f to %.1f GB/s, median %.1f", least, most, median)}
	}
	names := make([]string, len(slow))
	for i, p := range slow {
		names[i] = fmt.Sprintf("%d→%d (%.1f GB/s)", p[0], p[1], m.Bandwidth[p[0]][p[1]])
	}
	return &Verdict{false, fmt.Sprintf("slower than %.0f %% of the median of %.1f GB/s: %s", 100*slowPart, m.median(), strings.Join(names, ", "))}
}

// Name returns a unique name for a side of a row, in the form of Go's benchmarks.
func (r *Row) Name(inPlace bool) string {
	parts := []string{camel(r.Operation), "type=" + r.Type}
	if r.Reduction != moves.String() {
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
