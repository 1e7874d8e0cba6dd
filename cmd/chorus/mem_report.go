package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/gochorus/chorus/cmd/chorus/internal/memplot"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/safefile"
)

// A replayReport is the output of chorus mem replay. Its embedded numbers
// summarize all traces: the total number of calls, their mean time, and the peaks
// of the trace with the highest reserved memory.
type replayReport struct {
	Backend string `json:"backend"`
	Device  int    `json:"device"`
	Conf    string `json:"conf"`
	Note    string `json:"note,omitempty"`
	replayNumbers
	Traces []traceReport `json:"traces"`

	repeat int
}

type traceReport struct {
	File    string `json:"file"`
	Trace   string `json:"trace"`
	Streams int    `json:"streams"`
	replayNumbers
}

type replayNumbers struct {
	Ops                   int     `json:"ops"`
	NsPerOp               float64 `json:"ns_per_op"`
	ColdNsPerOp           float64 `json:"cold_ns_per_op"`
	PeakAllocated         int64   `json:"peak_allocated"`
	PeakReserved          int64   `json:"peak_reserved"`
	RecordedPeakAllocated int64   `json:"recorded_peak_allocated"`
	RecordedPeakReserved  int64   `json:"recorded_peak_reserved"`
	AllocatedRatio        float64 `json:"allocated_ratio"` // replayed / recorded; 0 if nothing was recorded
	ReservedRatio         float64 `json:"reserved_ratio"`
	Fragmentation         float64 `json:"fragmentation"`
}

// replay replays one trace on the device.
func (r *replayReport) replay(dev *device.Device, t fileTrace, plot string) (err error) {
	a, err := memtrace.OnDevice(dev, t.Streams)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	got, err := memtrace.Replay(t.Trace, a, &memtrace.Config{Repeat: r.repeat, Curve: plot != ""})
	if err != nil {
		return fmt.Errorf("mem replay: %s: %w", t.file, err)
	}
	r.add(t, got)
	if plot == "" {
		return nil
	}
	return draw(plot, t, got, fmt.Sprintf("%s:%d", r.Backend, r.Device))
}

func (r *replayReport) add(t fileTrace, got *memtrace.Result) {
	n := replayNumbers{
		Ops: got.Ops, NsPerOp: got.PerOp(), ColdNsPerOp: got.ColdPerOp(),
		PeakAllocated: got.Peaks.Allocated, PeakReserved: got.Peaks.Reserved,
		RecordedPeakAllocated: t.Recorded.Allocated, RecordedPeakReserved: t.Recorded.Reserved,
		AllocatedRatio: ratio(got.Peaks.Allocated, t.Recorded.Allocated), ReservedRatio: ratio(got.Peaks.Reserved, t.Recorded.Reserved),
		Fragmentation: got.Fragmentation(),
	}
	r.Traces = append(r.Traces, traceReport{File: t.file, Trace: t.Name, Streams: t.Streams, replayNumbers: n})
	ops := r.Ops + n.Ops
	mean := func(all, one float64) float64 {
		return (all*float64(r.Ops) + one*float64(n.Ops)) / float64(max(ops, 1))
	}
	warm, cold := mean(r.NsPerOp, n.NsPerOp), mean(r.ColdNsPerOp, n.ColdNsPerOp)
	if n.PeakReserved >= r.PeakReserved {
		r.replayNumbers = n
	}
	r.Ops, r.NsPerOp, r.ColdNsPerOp = ops, warm, cold
}

func ratio(a, b int64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func (r *replayReport) json(out io.Writer) error {
	return encode(out, r)
}

func (r *replayReport) print(out io.Writer) error {
	if r.Note != "" {
		fmt.Fprintf(out, "%s\n\n", r.Note)
	}
	for i, t := range r.Traces {
		if i > 0 {
			fmt.Fprintln(out)
		}
		fmt.Fprintf(out, "%s, %s: calls %d, streams %d, on %s:%d\n", t.File, t.Trace, t.Ops, t.Streams, r.Backend, r.Device)
		if err := r.table(out, &t.replayNumbers); err != nil {
			return err
		}
		fmt.Fprintf(out, "fragmentation %.2f%%: 1 - allocated / reserved, at the peak of reserved memory\n", 100*t.Fragmentation)
		if r.repeat > 0 {
			fmt.Fprintf(out, "%.1f ns a call, the median of %d runs; %.1f ns in the first run, with an empty cache\n", t.NsPerOp, r.repeat, t.ColdNsPerOp)
		} else {
			fmt.Fprintf(out, "%.1f ns a call in one run, with an empty cache\n", t.ColdNsPerOp)
		}
	}
	return nil
}

// table prints the replayed peaks beside the recorded peaks.
func (r *replayReport) table(out io.Writer, n *replayNumbers) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "PEAK IN BYTES\tREPLAYED\tRECORDED\tRATIO\t\n")
	fmt.Fprintf(w, "allocated\t%d\t%d\t%.4f\t\n", n.PeakAllocated, n.RecordedPeakAllocated, n.AllocatedRatio)
	fmt.Fprintf(w, "reserved\t%d\t%d\t%.4f\t\n", n.PeakReserved, n.RecordedPeakReserved, n.ReservedRatio)
	return w.Flush()
}

// plotWriters write a plot in the format of the file's extension.
var plotWriters = map[string]func(*memplot.Plot, io.Writer) error{
	".svg":  (*memplot.Plot).WriteSVG,
	".html": (*memplot.Plot).WriteHTML,
}

// draw writes the plot of a replay.
func draw(name string, t fileTrace, got *memtrace.Result, where string) error {
	allocated, reserved := make([]int64, len(got.Curve)), make([]int64, len(got.Curve))
	for i, p := range got.Curve {
		allocated[i], reserved[i] = p.Allocated, p.Reserved
	}
	p := &memplot.Plot{
		Title:  fmt.Sprintf("%s, %s, replayed on %s", filepath.Base(t.file), t.Name, where),
		Note:   fmt.Sprintf("%d calls on %d streams; fragmentation %.2f%% at the peak of reserved memory", got.Ops, t.Streams, 100*got.Fragmentation()),
		XLabel: "allocator calls",
		Step:   got.CurveStep,
		Areas: []memplot.Area{
			{Name: "reserved", Values: reserved},
			{Name: "allocated", Values: allocated},
		},
		Lines: []memplot.Line{
			{Name: "recorded: reserved", Value: t.Recorded.Reserved},
			{Name: "recorded: allocated", Value: t.Recorded.Allocated},
		},
	}
	file, err := safefile.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(plotWriters[strings.ToLower(filepath.Ext(name))](p, file), file.Close())
}
