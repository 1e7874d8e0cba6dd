package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/perf"
)

// Read reads the output of WriteJSON.
func Read(r io.Reader) (*perf.Report, error) {
	var x perf.Report
	dec := json.NewDecoder(r)
	if err := dec.Decode(&x); err != nil {
		return nil, fmt.Errorf("not a report of chorus perf --format json: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("unexpected data after the report: the file is damaged")
	}
	if x.Form != perf.Form {
		return nil, fmt.Errorf("report format %d: this version reads format %d; measure again", x.Form, perf.Form)
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
// compared with an earlier report, or nil.
func Comparable(base *perf.Report, g *comm.Group, p *perf.Plan) error {
	r, err := perf.Describe(g)
	if err != nil {
		return err
	}
	r.Plan = p
	if err := checkSettings(r, base); err != nil {
		return err
	}
	if base.Wrong > 0 {
		return errWrong
	}
	rows, err := p.Rows(g.Size())
	if err != nil {
		return err
	}
	planned := map[string]bool{}
	for _, row := range rows {
		planned[row.Name(false)] = true
	}
	for _, row := range base.Rows {
		plain := *row
		plain.Strategy = ""
		if planned[plain.Name(false)] && p.Strategies == (row.Strategy != "") {
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
func checkSettings(r, base *perf.Report) error {
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
func Compare(r, base *perf.Report) (both []Change, missing []string, err error) {
	if err := checkSettings(r, base); err != nil {
		return nil, nil, err
	}
	if base.Wrong > 0 {
		return nil, nil, errWrong
	}
	now := map[string]*perf.Measure{}
	for _, row := range r.Rows {
		for i, m := range row.Sides() {
			now[row.Name(i == 1)] = m
		}
	}
	for _, row := range base.Rows {
		for i, m := range row.Sides() {
			name := row.Name(i == 1)
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
