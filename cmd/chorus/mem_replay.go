package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/backend"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/safefile"
	"github.com/gochorus/chorus/memory"
)

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
	case !slices.Contains([]string{backend.Auto, backend.CUDA, backend.Virtual}, f.backend):
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
	if f.backend == backend.Auto {
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

// read reads the files. The caller closes the recordings, also after an error.
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
	file, err := safefile.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return memtrace.Read(file)
}
