package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gochorus/chorus/cmd/chorus/internal/perf"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/launch"
)

// perfWriters write a complete report. For text that is only the end: the tables
// were printed as they grew.
var perfWriters = map[string]func(*perf.Report, io.Writer) error{
	"text":  (*perf.Report).WriteEnd,
	"json":  (*perf.Report).WriteJSON,
	"csv":   (*perf.Report).WriteCSV,
	"bench": (*perf.Report).WriteBench,
}

// A perfTarget holds rank 0's output files and baseline. On the other ranks it
// discards all output and has no baseline.
type perfTarget struct {
	out      io.Writer // in the format of --format
	remarks  io.Writer // the comparison with the baseline
	page     io.WriteCloser
	baseline *perf.Report
	closers  []io.Closer
}

// target opens the files before the measurement, so that a bad path fails early.
func (f *perfFlags) target(stdout io.Writer, first bool) (t *perfTarget, err error) {
	t = &perfTarget{out: io.Discard, remarks: io.Discard}
	if !first {
		return t, nil
	}
	if t.baseline, err = f.readBaseline(); err != nil {
		return nil, usage(err)
	}
	if t.out, t.remarks = stdout, stdout; f.format != "text" {
		t.remarks = os.Stderr
	}
	if f.output != "" {
		file, err := createLate(f.output)
		if err != nil {
			return nil, fmt.Errorf("--output: %w", err)
		}
		t.out, t.closers = file, append(t.closers, file)
	}
	if f.html != "" {
		if t.page, err = createLate(f.html); err != nil {
			t.close()
			return nil, fmt.Errorf("--html: %w", err)
		}
		t.closers = append(t.closers, t.page)
	}
	return t, nil
}

func (t *perfTarget) close() {
	for _, c := range t.closers {
		_ = c.Close() // finish returns the error
	}
}

// finish closes the files.
func (t *perfTarget) finish() error {
	var errs []error
	for _, c := range t.closers {
		errs = append(errs, c.Close())
	}
	t.closers = nil
	return errors.Join(errs...)
}

// measure runs the plan and writes the results.
func (f *perfFlags) measure(ctx context.Context, t *perfTarget, g *comm.Group, p *perfPlan) error {
	if t.baseline != nil {
		if err := t.baseline.Comparable(g, &p.Plan, f.strategies); err != nil {
			return usage(fmt.Errorf("--baseline %s: %w", f.baseline, err))
		}
	}
	r, err := f.collect(ctx, t.out, g, p)
	if r == nil {
		return err
	}
	if err != nil { // what was measured is kept
		return errors.Join(err, f.writeIncomplete(t, r), t.finish())
	}
	if f.link > 0 {
		r.SetLink(f.link)
	}
	if err := perfWriters[f.format](r, t.out); err != nil {
		return err
	}
	if t.page != nil {
		if err := r.WriteHTML(t.page); err != nil {
			return err
		}
	}
	return errors.Join(f.result(t, r), t.finish())
}

// writeIncomplete writes the report of a measurement that ended early. The tables of text were printed already.
func (f *perfFlags) writeIncomplete(t *perfTarget, r *perf.Report) error {
	var errs []error
	if f.format != "text" {
		errs = append(errs, perfWriters[f.format](r, t.out))
	}
	if t.page != nil {
		errs = append(errs, r.WriteHTML(t.page))
	}
	return errors.Join(errs...)
}

// collect measures, and prints the tables as they grow if the format is text.
func (f *perfFlags) collect(ctx context.Context, out io.Writer, g *comm.Group, p *perfPlan) (*perf.Report, error) {
	text := f.format == "text"
	if p.pairs {
		r, err := perf.MeasurePairs(ctx, g, p.pairPlan())
		if err != nil || !text {
			return r, err
		}
		return r, errors.Join(r.WriteHead(out), r.Pairs.WriteText(out))
	}
	if f.strategies {
		r, err := perf.RunStrategies(ctx, g, &p.Plan)
		if err != nil || !text {
			return r, err
		}
		return r, errors.Join(r.WriteHead(out), r.WriteStrategies(out))
	}
	if !text {
		return perf.Run(ctx, g, &p.Plan, nil)
	}
	t := perf.NewTable(out, f.link)
	if err := t.Head(g); err != nil {
		return nil, err
	}
	var lost error
	r, err := perf.Run(ctx, g, &p.Plan, func(row *perf.Row) { lost = errors.Join(lost, t.Row(row)) })
	return r, errors.Join(err, lost)
}

// result compares with the baseline and returns the exit code as an error.
func (f *perfFlags) result(t *perfTarget, r *perf.Report) error {
	if t.baseline != nil {
		both, missing, err := r.Compare(t.baseline)
		if err != nil {
			return fmt.Errorf("--baseline %s: %w", f.baseline, err)
		}
		slower, err := perf.WriteChanges(t.remarks, both, missing, f.tolerance)
		if err != nil {
			return err
		}
		if slower > 0 {
			return exitCode(launch.ExitFailed)
		}
	}
	if r.Wrong > 0 || r.Ranks == 1 {
		return exitCode(launch.ExitFailed)
	}
	return nil
}
