package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/memory"
)

const loadLong = `Load safetensors checkpoints to GPUs, and show how fast and by which way.

A file is a safetensors file, an index of several (model.safetensors.index.json), or a
folder that has either. What is given together is one checkpoint.

By itself it loads to all GPUs of this machine, or -g of them. In a job of several
processes each has one GPU:

  chorus run -- chorus load model.safetensors

The plan says what each of them gets: replicate is everything; shard:D is a part of
each tensor along dimension D, -1 being the last, and all of one that has too few
dimensions; own is whole tensors, so that each GPU has about as many bytes. Each byte
of the files is read once.

--verify reads everything back from the GPUs and compares its SHA-256 with that of the
same bytes of the files; --digests compares the files with recorded digests first, a
JSON object of "sha256" by tensor, alone or in an object.

1 GB is 10^9 bytes. The exit code is 0 if everything is there and right, 1 if not, and
64 for mistakes in the flags.`

const loadExample = `  chorus load model.safetensors --verify
  chorus load checkpoint/ -g 8 --plan shard:0 --dtype bfloat16
  chorus load checkpoint/ --times 5 --engine direct --json`

// loadFlags are the flags of chorus load.
type loadFlags struct {
	gpus    int
	plan    string
	dtype   string
	engine  string
	threads int
	times   int
	verify  bool
	digests string
	asJSON  bool
	quiet   bool
}

func newLoadCommand() *cobra.Command {
	var f loadFlags
	c := &cobra.Command{
		Use:     "load [flags] file...",
		Short:   "Load safetensors checkpoints to GPUs",
		Long:    loadLong,
		Example: loadExample,
		RunE: func(c *cobra.Command, files []string) error {
			l, err := f.check(files)
			if err != nil {
				return usageError(c, err)
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return l.run(ctx, c.OutOrStdout())
		},
	}
	fs := c.Flags()
	fs.SortFlags = false
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one in a job of several processes")
	fs.StringVar(&f.plan, "plan", "replicate", "what each GPU gets: replicate, shard:DIMENSION or own")
	fs.StringVar(&f.dtype, "dtype", "", "convert floating-point tensors to this type, such as bfloat16")
	fs.StringVar(&f.engine, "engine", "auto", "the way from the files: auto, cached, direct or cufile")
	fs.IntVar(&f.threads, "threads", 0, "threads for each GPU; 0: by the number of cores")
	fs.IntVar(&f.times, "times", 1, "load so many times; the summary has the median")
	fs.BoolVar(&f.verify, "verify", false, "read everything back and compare SHA-256 with the files")
	fs.StringVar(&f.digests, "digests", "", "compare the files with the digests of this JSON file first")
	fs.BoolVar(&f.asJSON, "json", false, "print the summary as JSON")
	fs.BoolVarP(&f.quiet, "quiet", "q", false, "show no progress")
	return c
}

// A loading is what the flags ask for.
type loading struct {
	loadFlags
	files []string
	cfg   gds.LoadConfig
	file  gds.FileConfig
	dim   int  // of a plan that shards
	own   bool // the plan
}

var loadEngines = []gds.Engine{gds.Auto, gds.Cached, gds.Direct, gds.CuFile}

// floats are the types that --dtype converts from and to.
var floats = []memory.DType{memory.Float16T, memory.BFloat16T, memory.Float32, memory.Float64, memory.Float8E4M3T, memory.Float8E5M2T}

// check turns the flags into what to do. The error is a mistake of the user.
func (f *loadFlags) check(files []string) (*loading, error) {
	l := &loading{loadFlags: *f, files: files, file: gds.FileConfig{Threads: f.threads}}
	i := slices.IndexFunc(loadEngines, func(e gds.Engine) bool { return e.String() == f.engine })
	dim, shards := strings.CutPrefix(f.plan, "shard:")
	var err error
	if shards {
		l.dim, err = strconv.Atoi(dim)
	}
	l.own = f.plan == "own"
	switch {
	case len(files) == 0:
		return nil, errors.New("no file given")
	case f.gpus < 0:
		return nil, fmt.Errorf("-g %d: want 1 or more", f.gpus)
	case i < 0:
		return nil, fmt.Errorf("--engine %q: want auto, cached, direct or cufile", f.engine)
	case err != nil || !shards && !l.own && f.plan != "replicate":
		return nil, fmt.Errorf("--plan %q: want replicate, shard:DIMENSION or own", f.plan)
	case f.times < 1 || f.threads < 0:
		return nil, fmt.Errorf("--times %d, --threads %d: want 1 or more, and 0 or more", f.times, f.threads)
	case f.verify && f.dtype != "":
		return nil, errors.New("--verify compares bytes, which --dtype changes: leave one out")
	}
	l.file.Engine = loadEngines[i]
	return l, l.convert()
}

// convert makes --dtype a function.
func (l *loading) convert() error {
	if l.dtype == "" {
		return nil
	}
	i := slices.IndexFunc(floats, func(t memory.DType) bool { return t.String() == l.dtype })
	if i < 0 {
		return fmt.Errorf("--dtype %q: want one of %v", l.dtype, floats)
	}
	l.cfg.DType = func(t gds.Info) memory.DType {
		if slices.Contains(floats, t.DType) {
			return floats[i]
		}
		return memory.Invalid
	}
	return nil
}

// planFor makes --plan a function for a checkpoint.
func (l *loading) planFor(c *gds.Checkpoint, ranks int) gds.Plan {
	if l.own {
		return owners(c.Infos(), ranks)
	}
	if l.plan == "replicate" {
		return nil
	}
	return func(t gds.Info) gds.Placement {
		if n := len(t.Shape); l.dim >= n || l.dim < -n {
			return gds.Replicate()
		}
		return gds.Shard(l.dim)
	}
}

// owners gives each tensor, the largest first, to the rank that has the least.
func owners(infos []gds.Info, ranks int) gds.Plan {
	slices.SortStableFunc(infos, func(a, b gds.Info) int { return cmp.Compare(b.Bytes(), a.Bytes()) })
	has := make([]int64, ranks)
	owner := map[string]int{}
	for _, t := range infos {
		least := slices.Index(has, slices.Min(has))
		owner[t.Name] = least
		has[least] += t.Bytes()
	}
	return func(t gds.Info) gds.Placement { return gds.Own(owner[t.Name]) }
}

// run joins the other ranks, loads, and shows where rank 0 is.
func (l *loading) run(ctx context.Context, out io.Writer) error {
	c, err := gds.OpenSafetensorsWith(&l.file, l.files...)
	if err != nil {
		return err
	}
	defer c.Close()
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	devs, note, err := ranksOf(sess, l.gpus)
	if err != nil {
		return err
	}
	first := sess.Rank() == 0
	if first && note != "" {
		fmt.Fprintln(os.Stderr, "chorus: load:", note)
	}
	if l.digests != "" && first {
		if err := checkDigests(ctx, c, l.digests); err != nil {
			return err
		}
	}
	to, err := l.target(ctx, sess, devs)
	if err != nil {
		return err
	}
	defer to.close()
	r, err := l.load(ctx, c, to, first)
	if err != nil {
		return err
	}
	r.Note = note
	if first {
		if err := r.write(out, l.asJSON); err != nil {
			return err
		}
	}
	return errors.Join(to.leave(ctx), sess.Shutdown(ctx))
}

// load loads as often as was asked for, and verifies what came last.
func (l *loading) load(ctx context.Context, c *gds.Checkpoint, to *loadTarget, first bool) (*loadReport, error) {
	cfg := l.cfg
	cfg.Plan = l.planFor(c, to.ranks)
	r := &loadReport{Files: l.files, Tensors: len(c.Infos()), Bytes: c.Bytes(), Ranks: to.ranks, Plan: l.plan, DType: l.dtype}
	for n := range l.times {
		bar := newBar(os.Stderr, first && !l.quiet)
		cfg.Progress = bar.show
		begun := time.Now()
		all, err := to.load(ctx, c, &cfg)
		took := time.Since(begun)
		bar.end()
		if err != nil {
			return nil, err
		}
		r.Seconds = append(r.Seconds, took.Seconds())
		if n == l.times-1 && l.verify {
			err = l.checkAll(ctx, c, all, r)
		}
		for _, w := range all {
			r.MaxRankBytes = max(r.MaxRankBytes, int64(w.Bytes()))
			err = errors.Join(err, w.Close())
		}
		if err != nil {
			return nil, err
		}
	}
	r.finish(c)
	return r, nil
}

func (l *loading) checkAll(ctx context.Context, c *gds.Checkpoint, all []*gds.Weights, r *loadReport) error {
	begun := time.Now()
	for _, w := range all {
		if err := c.Verify(ctx, w); err != nil {
			return err
		}
		r.Verified += len(w.Names())
	}
	r.VerifySeconds = time.Since(begun).Seconds()
	return nil
}
