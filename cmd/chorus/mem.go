package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
	"github.com/gochorus/chorus/cmd/chorus/internal/results"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
)

func newMemCommand() *cobra.Command {
	c := parentCommand("mem", "Analyze the use of device memory")
	c.AddCommand(newReplayCommand(), newLedgerCommand())
	return c
}

const ledgerLong = `Show what uses the device memory of each rank of a job that chorus run has started. The uses
are buffers, pools, graphs, the cache of the allocator, Chorus kernels, NCCL, and the rest.
memory.Ledger computes the values in the process of the rank. Memory of other processes
is in the rest.

The command finds the job as chorus status does.`

func newLedgerCommand() *cobra.Command {
	var which monitor.Choice
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ledger [flags]",
		Short: "Show what uses the device memory of the ranks of a running job",
		Long:  ledgerLong,
		Example: `  chorus mem ledger
  chorus mem ledger --job mnist --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return interruptible(cmd, func(ctx context.Context, out io.Writer) error { return printLedger(ctx, out, which, asJSON) })
		},
	}
	addChoice(cmd, &which)
	cmd.Flags().BoolVar(&asJSON, "json", false, "output in JSON: the devices of each rank")
	return cmd
}

func printLedger(ctx context.Context, out io.Writer, which monitor.Choice, asJSON bool) error {
	_, j, err := monitor.Find(ctx, which)
	if err != nil {
		return err
	}
	if asJSON {
		return encode(out, j.Ranks)
	}
	return j.PrintMemory(out)
}

const replayLong = `Replay a recorded trace of allocator calls on Chorus's allocator, and compare its time
and peak memory with the recorded values. No kernel runs and no data is copied.

Accepted files, optionally compressed with gzip:
  - a snapshot written by memory.Snapshot, or by torch's memory._dump_snapshot as a
    pickle or JSON, with one trace for each device whose history was recorded
  - JSON with "events": [action, address, size, stream, time in µs] each
  - JSON with "sequences" of calls and their statistics
A file has at most 2 GiB, uncompressed. A long trace takes some MiB of memory and a temporary
file.

The first run starts with an empty cache. Its peaks are the reported peaks, and its time
is reported separately. Fragmentation = 1 - allocated / reserved, measured at the peak
of reserved memory. A block is counted as free once all streams that used it have passed
the free. If a file has no recorded peaks, they are computed from its events; the peak
of allocated memory then uses requested sizes.`

const replayExample = `  chorus mem replay trace.json.gz
  chorus mem replay --conf expandable_segments:True --plot memory.svg snapshot.pickle
  chorus mem replay --backend virtual --sequence 0 --json alloc_stats.json.gz`

// replayFlags are the flags of chorus mem replay.
type replayFlags struct {
	backend  string
	device   int
	conf     string
	repeat   int
	sequence int
	asJSON   bool
	plot     string
}

func newReplayCommand() *cobra.Command {
	var f replayFlags
	c := &cobra.Command{
		Use:     "replay [flags] file...",
		Short:   "Replay a recorded trace of allocations",
		Long:    replayLong,
		Example: replayExample,
		RunE: func(c *cobra.Command, files []string) error {
			if err := f.check(c, files); err != nil {
				return err
			}
			return f.run(c.OutOrStdout(), files)
		},
	}
	fs := c.Flags()
	fs.StringVar(&f.backend, "backend", "auto", "backend: cuda, virtual, or auto: "+env.Backend.Name+" if set, else CUDA, or virtual devices on a machine without GPUs")
	fs.IntVar(&f.device, "device", 0, "device ordinal")
	fs.StringVar(&f.conf, "conf", "", "allocator options, such as expandable_segments:True ("+env.AllocConf.Name+")")
	fs.IntVar(&f.repeat, "repeat", 5, "number of runs after the first")
	fs.IntVar(&f.sequence, "sequence", -1, "index of the trace to replay from each file, starting at 0; -1: all")
	fs.BoolVar(&f.asJSON, "json", false, "output in JSON")
	fs.StringVar(&f.plot, "plot", "", ".svg or .html file for a plot of memory over calls")
	return c
}

func (f *replayFlags) check(c *cobra.Command, files []string) error {
	switch {
	case len(files) == 0:
		return usageError(c, errors.New("no file given"))
	case !slices.Contains([]string{gpu.Auto, gpu.CUDA, gpu.Virtual}, f.backend):
		return usageError(c, fmt.Errorf("--backend %q: want auto, cuda or virtual", f.backend))
	case f.sequence < -1:
		return usageError(c, fmt.Errorf("--sequence %d: want 0 or more, or -1 for all", f.sequence))
	case f.repeat < 0:
		return usageError(c, fmt.Errorf("--repeat %d: want 0 or more", f.repeat))
	case f.plot != "" && plotWriters[strings.ToLower(filepath.Ext(f.plot))] == nil:
		return usageError(c, fmt.Errorf("--plot %q: want a name that ends in .svg or .html", f.plot))
	}
	return nil
}

func (f *replayFlags) run(out io.Writer, files []string) error {
	recordings, traces, err := f.read(files)
	defer func() {
		for _, r := range recordings {
			_ = r.Close() // only a temporary file
		}
	}()
	if err != nil {
		return err
	}
	if f.plot != "" && len(traces) > 1 {
		return &launch.UsageError{Reason: fmt.Sprintf("--plot draws one trace, and there are %d: choose a file and its --sequence", len(traces))}
	}
	sys, note, err := f.open()
	if err != nil {
		return err
	}
	dev, err := sys.Open(f.device)
	if err != nil {
		return err
	}
	if f.conf != "" {
		if err := memory.SetAllocatorSettings(f.conf); err != nil {
			return usage(fmt.Errorf("--conf: %w", err))
		}
	}
	r := &replayReport{Backend: sys.Backend(), Device: f.device, Conf: f.conf, Note: note, repeat: f.repeat}
	for _, t := range traces {
		if err := r.replay(dev, t, f.plot); err != nil {
			return err
		}
	}
	if reports := sys.Reports(); len(reports) > 0 {
		return fmt.Errorf("virtual devices: %s", strings.Join(reports, "; "))
	}
	if f.asJSON {
		return r.json(out)
	}
	return r.print(out)
}

// open opens the devices and returns a note to print about them.
func (f *replayFlags) open() (*device.System, string, error) {
	if f.backend == gpu.Auto {
		return device.OrVirtual()
	}
	sys, err := device.NewSystem(&device.SystemConfig{Backend: f.backend})
	return sys, "", err
}

// A fileTrace is a trace with the name of its file.
type fileTrace struct {
	*memtrace.Trace
	file string
}

// read reads the files, and returns recordings that the caller closes, also
// after an error.
func (f *replayFlags) read(files []string) (recordings []*memtrace.Recording, traces []fileTrace, err error) {
	for _, name := range files {
		r, err := readTraces(name)
		if err != nil {
			return recordings, nil, fmt.Errorf("mem replay: %s: %w", name, err)
		}
		recordings = append(recordings, r)
		list := r.Traces
		if f.sequence >= len(list) {
			return recordings, nil, &launch.UsageError{Reason: fmt.Sprintf("--sequence %d: %s has %d traces, counted from 0", f.sequence, name, len(list))}
		}
		if f.sequence >= 0 {
			list = list[f.sequence : f.sequence+1]
		}
		for _, t := range list {
			traces = append(traces, fileTrace{t, name})
		}
	}
	return recordings, traces, nil
}

func readTraces(name string) (*memtrace.Recording, error) {
	file, err := safe.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return memtrace.Read(file)
}

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
var plotWriters = map[string]func(*results.Plot, io.Writer) error{
	".svg":  (*results.Plot).WriteSVG,
	".html": (*results.Plot).WriteHTML,
}

// draw writes the plot of a replay.
func draw(name string, t fileTrace, got *memtrace.Result, where string) error {
	allocated, reserved := make([]int64, len(got.Curve)), make([]int64, len(got.Curve))
	for i, p := range got.Curve {
		allocated[i], reserved[i] = p.Allocated, p.Reserved
	}
	p := &results.Plot{
		Title:  fmt.Sprintf("%s, %s, replayed on %s", filepath.Base(t.file), t.Name, where),
		Note:   fmt.Sprintf("%d calls on %d streams; fragmentation %.2f%% at the peak of reserved memory", got.Ops, t.Streams, 100*got.Fragmentation()),
		XLabel: "allocator calls",
		Step:   got.CurveStep,
		Areas: []results.Area{
			{Name: "reserved", Values: reserved},
			{Name: "allocated", Values: allocated},
		},
		Lines: []results.Line{
			{Name: "recorded: reserved", Value: t.Recorded.Reserved},
			{Name: "recorded: allocated", Value: t.Recorded.Allocated},
		},
	}
	file, err := safe.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(plotWriters[strings.ToLower(filepath.Ext(name))](p, file), file.Close())
}
