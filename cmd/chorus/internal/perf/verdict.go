package perf

import (
	"fmt"
	"math"
	"strings"
)

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
