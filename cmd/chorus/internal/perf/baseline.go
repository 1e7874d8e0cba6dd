package perf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/gochorus/chorus/comm"
)

// ReadReport reads the output of WriteJSON.
func ReadReport(r io.Reader) (*Report, error) {
	var x Report
	dec := json.NewDecoder(r)
	if err := dec.Decode(&x); err != nil {
		return nil, fmt.Errorf("not a report of chorus perf --format json: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("unexpected data after the report: the file is damaged")
	}
	if x.Form != form {
		return nil, fmt.Errorf("report format %d: this version reads format %d; measure again", x.Form, form)
	}
	for i, row := range x.Rows {
		if row == nil || row.Operation == "" || row.OutOfPlace == nil {
			return nil, fmt.Errorf("result %d of the report has no operation or no out_of_place: the file is damaged", i+1)
		}
		for _, m := range row.Sides() {
			if !(m.Time > 0) {
				return nil, fmt.Errorf("result %d of the report (%s, %d bytes) has the time %v: the file is damaged", i+1, row.Operation, row.Bytes, m.Time)
			}
		}
	}
	return &x, nil
}

// A Change is one side of a row, now and in an earlier run.
type Change struct {
	Name        string
	Before, Now float64 // µs
}

// Ratio returns the present time divided by the earlier time.
func (c Change) Ratio() float64 { return c.Now / c.Before }

// Comparable returns the reason why a run of the plan on the group cannot be
// compared with an earlier report, or nil. strategies tells whether the run
// measures each strategy.
func (base *Report) Comparable(g *comm.Group, p *Plan, strategies bool) error {
	r, err := describe(g)
	if err != nil {
		return err
	}
	r.Plan = p.summary()
	if err := r.checkSettings(base); err != nil {
		return err
	}
	if base.Wrong > 0 {
		return errWrong
	}
	jobs, err := p.jobs(g.Size())
	if err != nil {
		return err
	}
	planned := map[string]bool{}
	for _, j := range jobs {
		planned[j.describe().name(false)] = true
	}
	for _, row := range base.Rows {
		plain := *row
		plain.Strategy = ""
		if planned[plain.name(false)] && strategies == (row.Strategy != "") {
			return nil
		}
	}
	return errNoCommonRow
}

// errWrong rejects a baseline with wrong results: its times are meaningless.
var errWrong = errors.New("the baseline has wrong results: use a baseline without wrong results")

// errNoCommonRow rejects a baseline without a row in common.
var errNoCommonRow = errors.New("the baseline has none of the rows of this run: compare the operations, types, reductions, roots, sizes and --strategies of both runs")

// checkSettings returns the reason why two reports cannot be compared: different machines
// or different measurement settings.
func (r *Report) checkSettings(base *Report) error {
	for _, d := range []struct {
		what      string
		was, isnt any
	}{
		{"ranks", base.Ranks, r.Ranks}, {"device", base.Device, r.Device}, {"backend", base.Backend, r.Backend},
		{"ranks of a process", base.Locals, r.Locals},
	} {
		if d.was != d.isnt {
			return fmt.Errorf("the baseline has another setting: %s %v in the baseline, %v here", d.what, d.was, d.isnt)
		}
	}
	if base.Plan == nil || r.Plan == nil || base.Plan.Launches > 0 != (r.Plan.Launches > 0) || base.Plan.Register != r.Plan.Register {
		return errors.New("the baseline has other settings for graphs (-G) or registration (-R)")
	}
	return nil
}

// Compare returns the rows that both reports have, and the names of rows that r lacks.
func (r *Report) Compare(base *Report) (both []Change, missing []string, err error) {
	if err := r.checkSettings(base); err != nil {
		return nil, nil, err
	}
	if base.Wrong > 0 {
		return nil, nil, errWrong
	}
	now := map[string]*Measure{}
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			now[row.name(i == 1)] = m
		}
	}
	for _, row := range base.Rows {
		for i, m := range row.Sides() {
			name := row.name(i == 1)
			if mine := now[name]; mine != nil {
				both = append(both, Change{name, m.Time, mine.Time})
			} else {
				missing = append(missing, name)
			}
		}
	}
	if len(both) == 0 {
		return nil, nil, errNoCommonRow
	}
	return both, missing, nil
}

// WriteChanges writes the rows that changed by more than tolerance, slower rows
// first, and returns the number of slower rows.
func WriteChanges(w io.Writer, both []Change, missing []string, tolerance float64) (slower int, err error) {
	faster := 0
	for _, c := range both {
		switch {
		case c.Ratio() > 1+tolerance:
			slower++
		case c.Ratio() < 1-tolerance:
			faster++
		}
	}
	if _, err := fmt.Fprintf(w, "# Baseline             : %d rows equal within %.0f %%, %d faster, %d slower, %d not measured now\n",
		len(both)-faster-slower, 100*tolerance, faster, slower, len(missing)); err != nil {
		return slower, err
	}
	for _, c := range both {
		if c.Ratio() > 1+tolerance {
			if _, err := fmt.Fprintf(w, "#   slower: %s: %s us, was %s (%.2f times)\n", c.Name, short(c.Now), short(c.Before), c.Ratio()); err != nil {
				return slower, err
			}
		}
	}
	return slower, nil
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
