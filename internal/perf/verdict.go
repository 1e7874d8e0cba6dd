package perf

import (
	"fmt"
	"math"
	"strings"
)

// A Verdict says whether the figures are what such machines give.
type Verdict struct {
	OK     bool   `json:"ok"`
	Reason string `json:"reason"`
}

// largeBytes is from which size on a link can be filled.
const largeBytes = 64 << 20

// expected is the part of the link's bandwidth that large operations reach at least:
// two ranks do not fill it, since NCCL gives a pair fewer channels.
func expected(ranks int) float64 {
	if ranks == 2 {
		return 0.5
	}
	return 0.65
}

// judge finds the verdict of a report: nil where nothing can be said.
func (r *Report) judge() *Verdict {
	switch {
	case r.Wrong > 0:
		return &Verdict{false, fmt.Sprintf("%d elements are wrong: trust no figure and no result of this machine", r.Wrong)}
	case r.Ranks == 1:
		return &Verdict{false, "one rank has nobody to talk to: these are copies within a GPU, and no bus bandwidth"}
	case r.Backend != "cuda":
		return &Verdict{true, "virtual devices: the times mean nothing"}
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
		return &Verdict{false, fmt.Sprintf("%s; %s reaches only %.0f GB/s where %.0f is usual: look at the links (chorus perf pairs) and at what else runs", text, lowOf, low, want)}
	}
	return &Verdict{true, text + ", as usual"}
}

// best are the highest bus bandwidths of each operation's large sizes.
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
		return &Verdict{true, fmt.Sprintf("all pairs alike: %.1f to %.1f GB/s, median %.1f", least, most, median)}
	}
	names := make([]string, len(slow))
	for i, p := range slow {
		names[i] = fmt.Sprintf("%d→%d (%.1f GB/s)", p[0], p[1], m.Bandwidth[p[0]][p[1]])
	}
	return &Verdict{false, fmt.Sprintf("slower than %.0f %% of the median of %.1f GB/s: %s", 100*slowPart, m.median(), strings.Join(names, ", "))}
}
