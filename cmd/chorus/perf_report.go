package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/perf"
)

// perfWriters write a report whole; the text is written as it comes.
var perfWriters = map[string]func(*perf.Report, io.Writer) error{
	"text":  (*perf.Report).WriteEnd,
	"json":  (*perf.Report).WriteJSON,
	"csv":   (*perf.Report).WriteCSV,
	"bench": (*perf.Report).WriteBench,
}

// measure runs the plan and writes what came of it.
func (f *perfFlags) measure(ctx context.Context, out io.Writer, g *comm.Group, p *perfPlan, first bool) error {
	text := f.format == "text"
	r, err := f.collect(ctx, out, g, p, text)
	if err != nil {
		return err
	}
	if f.link > 0 {
		r.SetLink(f.link)
	}
	if err := perfWriters[f.format](r, out); err != nil {
		return err
	}
	if first && f.html != "" {
		if err := writePage(f.html, r); err != nil {
			return err
		}
	}
	return f.result(out, r, p, text)
}

// collect measures, and writes the tables as they grow.
func (f *perfFlags) collect(ctx context.Context, out io.Writer, g *comm.Group, p *perfPlan, text bool) (*perf.Report, error) {
	if p.pairs {
		r, err := perf.MeasurePairs(ctx, g, &perf.PairPlan{Bytes: p.Sizes.Max, Iterations: p.Iterations, Warmups: p.Warmups})
		if err != nil || !text {
			return r, err
		}
		return r, errors.Join(r.WriteHead(out), r.Pairs.WriteText(out))
	}
	if err := p.Check(g.Size()); err != nil {
		return nil, &launch.UsageError{Reason: err.Error()}
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

// result is the exit code, with a word on the baseline.
func (f *perfFlags) result(out io.Writer, r *perf.Report, p *perfPlan, text bool) error {
	if !text {
		out = os.Stderr
	}
	if p.baseline != nil {
		both, missing, err := r.Compare(p.baseline)
		if err != nil {
			return fmt.Errorf("--baseline %s: %w", f.baseline, err)
		}
		slower, err := perf.WriteChanges(out, both, missing, f.tolerance)
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

func writePage(name string, r *perf.Report) error {
	file, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return errors.Join(r.WriteHTML(file), file.Close())
}
