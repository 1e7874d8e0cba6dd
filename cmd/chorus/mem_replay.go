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

const replayLong = `Play the recorded calls of an allocator again on Chorus's, and show what they take
in time and memory beside what was recorded.

A file is a snapshot that memory.Snapshot has written, or torch's
memory._dump_snapshot, as a pickle or JSON, with a trace for each device whose
history was recorded; or JSON with "events", each [action, address, size, stream,
time in µs]; or JSON with "sequences" of calls and statistics. It may be
compressed by gzip.

The first run begins with an empty cache: the peaks are its, and its time is
shown apart. Fragmentation is the part of the reserved memory that was not
allocated when the most was reserved. A free counts once, where the streams are
past it. Recorded peaks that a file does not have are summed up from its events:
that of allocated memory then has the sizes as they were asked for.

No kernel runs and no byte is copied.`

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
		Short:   "Play a recorded trace of allocations again",
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
	fs.StringVar(&f.backend, "backend", "auto", "cuda, virtual, or auto: what "+env.Backend.Name+" says, or virtual devices without a GPU")
	fs.IntVar(&f.device, "device", 0, "ordinal of the device")
	fs.StringVar(&f.conf, "conf", "", "the allocator's options, such as expandable_segments:True ("+env.AllocConf.Name+")")
	fs.IntVar(&f.repeat, "repeat", 5, "runs after the first")
	fs.IntVar(&f.sequence, "sequence", -1, "play only this trace of each file, from 0 on; -1: all")
	fs.BoolVar(&f.asJSON, "json", false, "print JSON")
	fs.StringVar(&f.plot, "plot", "", "draw the memory over the calls into a file, .svg or .html")
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
	case f.plot != "" && drawers[strings.ToLower(filepath.Ext(f.plot))] == nil:
		return usageError(c, fmt.Errorf("--plot %q: want a name that ends in .svg or .html", f.plot))
	}
	return nil
}

func (f *replayFlags) run(out io.Writer, files []string) error {
	traces, err := f.read(files)
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

// open opens the devices, and returns what is to be said about them.
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

func (f *replayFlags) read(files []string) ([]fileTrace, error) {
	var all []fileTrace
	for _, name := range files {
		list, err := readTraces(name)
		if err != nil {
			return nil, fmt.Errorf("mem replay: %s: %w", name, err)
		}
		if f.sequence >= len(list) {
			return nil, &launch.UsageError{Reason: fmt.Sprintf("--sequence %d: %s has %d traces, counted from 0", f.sequence, name, len(list))}
		}
		if f.sequence >= 0 {
			list = list[f.sequence : f.sequence+1]
		}
		for _, t := range list {
			all = append(all, fileTrace{t, name})
		}
	}
	return all, nil
}

func readTraces(name string) ([]*memtrace.Trace, error) {
	file, err := safefile.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return memtrace.Read(file)
}
