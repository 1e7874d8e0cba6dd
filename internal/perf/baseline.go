package perf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/gochorus/chorus/comm"
)

// ReadReport reads what WriteJSON has written.
func ReadReport(r io.Reader) (*Report, error) {
	var x Report
	dec := json.NewDecoder(r)
	if err := dec.Decode(&x); err != nil {
		return nil, fmt.Errorf("not a report of chorus perf --format json: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("there is more behind the report: the file is damaged")
	}
	if x.Form != form {
		return nil, fmt.Errorf("a report of form %d: this version reads form %d; measure it anew", x.Form, form)
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

// A Change is a side of a row beside the same one of an earlier run.
type Change struct {
	Name        string
	Before, Now float64 // µs
}

// Ratio is how many times as long it takes.
func (c Change) Ratio() float64 { return c.Now / c.Before }

// Comparable returns why a run of the plan on the group, of each strategy by itself or of
// the group's, cannot be compared with an earlier report, or nil.
func (base *Report) Comparable(g *comm.Group, p *Plan, strategies bool) error {
	r, err := describe(g)
	if err != nil {
		return err
	}
	r.Plan = p.summary()
	if err := r.like(base); err != nil {
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
	return errNothingAlike
}

// errWrong is of an earlier report whose times say nothing.
var errWrong = errors.New("the baseline has elements that were wrong: want one whose results were right")

// errNothingAlike is of reports that have no row in common.
var errNothingAlike = errors.New("the baseline has none of the rows that are measured now: other operations, types, reductions, roots or sizes, or it was measured with --strategies and this is not, or the reverse")

// like returns why two reports cannot be compared: they are of different machines, or
// were measured in different ways.
func (r *Report) like(base *Report) error {
	for _, d := range []struct {
		what      string
		was, isnt any
	}{
		{"ranks", base.Ranks, r.Ranks}, {"device", base.Device, r.Device}, {"backend", base.Backend, r.Backend},
		{"ranks of a process", base.Locals, r.Locals},
	} {
		if d.was != d.isnt {
			return fmt.Errorf("the baseline is of another setting: %s %v there, %v here", d.what, d.was, d.isnt)
		}
	}
	if base.Plan == nil || r.Plan == nil || base.Plan.Launches > 0 != (r.Plan.Launches > 0) || base.Plan.Register != r.Plan.Register {
		return errors.New("the baseline was measured in another way: with or without a graph or a registration")
	}
	return nil
}

// Compare returns the rows that both reports have, and those of base that r lacks.
func (r *Report) Compare(base *Report) (both []Change, missing []string, err error) {
	if err := r.like(base); err != nil {
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
		return nil, nil, errNothingAlike
	}
	return both, missing, nil
}

// WriteChanges writes the changes of more than a part, slower ones first said, and
// returns how many are slower.
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
	if _, err := fmt.Fprintf(w, "# Baseline             : %d rows alike within %.0f %%, %d faster, %d slower, %d not measured now\n",
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
