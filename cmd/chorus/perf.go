package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/perf"
	"github.com/gochorus/chorus/internal/safefile"
)

const perfLong = `Measure collectives as NVIDIA's nccl-tests do, without MPI and without a compiler.

Operations: %s;
all: all of these that the number of ranks allows. pairs: the bandwidth and the
latency between every two ranks, with -b, -n, -w and -g only.

By itself it measures the GPUs of this machine in one process, with a thread for
each. With more processes, start it by chorus run, torchrun, Slurm or MPI:

  chorus run -- chorus perf all_reduce

Rank 0 prints. chorus run writes the rank before each line, so what other programs
are to read goes to a file, by --output.

Columns and definitions are those of nccl-tests: time is the mean over the ranks of
many operations in a row, algbw is the data over the time, and busbw is what crosses
a GPU's link; 1 GB is 10^9 bytes. p50 and p99 are of single operations, timed on the
device, of the slowest rank each. #wrong counts elements that are not exactly as they
should be. The last column is the part of the link's bandwidth, by the product's name or
--link, that the faster side of a row reaches; the verdict is by the rows of 64 MiB and
more. Without -e there is one size; with -e each is 1M more than the one before, or -f
times as large.

The exit code is 0 if everything was right; 1 if elements were wrong, rows were
slower than the baseline, or something failed; and 64 for mistakes in the flags.`

const perfExample = `  chorus perf all_reduce -b 8 -e 1G -f 2
  chorus perf all_gather reduce_scatter -g 2 -d bfloat16 -G 20
  chorus perf all -b 1M -e 1G -f 4 --html report.html
  chorus perf pairs
  chorus perf all_reduce --format json > today.json
  chorus perf all_reduce --baseline today.json
  chorus perf all_reduce -b 8 -e 4M -f 4 -G 20 --strategies`

// perfFlags are the flags of chorus perf.
type perfFlags struct {
	min, max, step  string
	factor          int
	iters, warmups  int
	checks          int
	dtype, red      string
	root            string
	graph, register int
	gpus            int
	format          string
	output          string
	html            string
	baseline        string
	tolerance       float64
	link            float64
	strategies      bool
}

func newPerfCommand() *cobra.Command {
	var f perfFlags
	names := make([]string, len(perf.Operations))
	for i, o := range perf.Operations {
		names[i] = o.Name
	}
	c := &cobra.Command{
		Use:     "perf [flags] operation...",
		Short:   "Measure and check collectives, as nccl-tests does",
		Long:    fmt.Sprintf(perfLong, strings.Join(names, ", ")),
		Example: perfExample,
		RunE: func(c *cobra.Command, ops []string) error {
			if !c.Flags().Changed("maxbytes") {
				f.max = f.min
			}
			plan, err := f.plan(ops)
			if err == nil && plan.pairs {
				err = pairsFlags(c)
			}
			if err != nil {
				return usageError(c, err)
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return f.run(ctx, c.OutOrStdout(), plan)
		},
	}
	fs := c.Flags()
	fs.SortFlags = false
	fs.StringVarP(&f.min, "minbytes", "b", "32M", "smallest size")
	fs.StringVarP(&f.max, "maxbytes", "e", "", "largest size; left out: the smallest")
	fs.StringVarP(&f.step, "stepbytes", "i", "1M", "bytes from one size to the next")
	fs.IntVarP(&f.factor, "stepfactor", "f", 0, "each size so many times the one before, instead of -i")
	fs.IntVarP(&f.iters, "iters", "n", 20, "operations in a row")
	fs.IntVarP(&f.warmups, "warmup_iters", "w", 1, "operations before")
	fs.IntVarP(&f.checks, "check", "c", 1, "how often the result of each row is checked; 0: not")
	fs.StringVarP(&f.dtype, "datatype", "d", "float", "element type as nccl-tests names it, or all")
	fs.StringVarP(&f.red, "op", "o", "sum", "sum, prod, max, min, avg, mulsum, or all")
	fs.StringVarP(&f.root, "root", "r", "0", "root of the operations that have one, or all")
	fs.IntVarP(&f.graph, "cudagraph", "G", 0, "capture the operations of a row into a graph and launch it so many times")
	fs.IntVarP(&f.register, "local_register", "R", 0, "take the buffers from NCCL and register them: 1 as local buffers, 2 as symmetric windows")
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one in a job of several processes")
	fs.BoolVar(&f.strategies, "strategies", false, "measure every strategy that can, side by side, and which one the tuning chooses")
	fs.StringVar(&f.format, "format", "text", "what to print: text, json, csv, or bench for benchstat")
	fs.StringVar(&f.output, "output", "", "write to a file what --format says")
	fs.StringVar(&f.html, "html", "", "write a page with plots to a file")
	fs.StringVar(&f.baseline, "baseline", "", "compare with an earlier run's --format json, and fail where it is slower")
	fs.Float64Var(&f.tolerance, "tolerance", 0.1, "by which part a row may be slower than the baseline")
	fs.Float64Var(&f.link, "link", 0, "what a GPU's link does in one direction in GB/s; 0: by the product's name")
	return c
}

// A perfPlan is what the flags ask for.
type perfPlan struct {
	perf.Plan
	pairs bool
}

// pairsFlags refuses flags that mean nothing for pairs.
func pairsFlags(c *cobra.Command) error {
	for _, name := range []string{"maxbytes", "stepbytes", "stepfactor", "check", "datatype", "op", "root", "cudagraph", "local_register", "baseline", "strategies"} {
		if c.Flags().Changed(name) {
			return fmt.Errorf("--%s means nothing for pairs", name)
		}
	}
	return nil
}

// plan turns the flags into what to measure. The error is a mistake of the user.
func (f *perfFlags) plan(ops []string) (*perfPlan, error) {
	p := &perfPlan{}
	if err := f.operations(p, ops); err != nil {
		return nil, err
	}
	for _, x := range []struct {
		flag, text string
		to         *int
	}{{"-b", f.min, &p.Sizes.Min}, {"-e", f.max, &p.Sizes.Max}, {"-i", f.step, &p.Sizes.Step}} {
		n, err := perf.ParseBytes(x.text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", x.flag, err)
		}
		*x.to = n
	}
	p.Sizes.Factor = f.factor
	var err error
	if p.DTypes, err = perf.ParseDTypes(f.dtype); err != nil {
		return nil, fmt.Errorf("-d: %w", err)
	}
	if p.Reductions, err = perf.ParseReductions(f.red); err != nil {
		return nil, fmt.Errorf("-o: %w", err)
	}
	if p.Root, err = strconv.Atoi(f.root); f.root == "all" {
		p.Root = perf.AllRoots
	} else if err != nil || p.Root < 0 {
		return nil, fmt.Errorf("-r %q: want a rank or all", f.root)
	}
	p.Iterations, p.Warmups, p.Checks, p.Launches = f.iters, f.warmups, f.checks, f.graph
	p.Register = perf.Registration(f.register)
	switch {
	case perfWriters[f.format] == nil:
		return nil, fmt.Errorf("--format %q: want text, json, csv or bench", f.format)
	case f.gpus < 0:
		return nil, fmt.Errorf("-g %d: want 1 or more, or 0 for all", f.gpus)
	case f.output != "" && f.html != "" && filepath.Clean(f.output) == filepath.Clean(f.html):
		return nil, fmt.Errorf("--output and --html are both %s: want two files", filepath.Clean(f.html))
	case !(f.tolerance > 0):
		return nil, fmt.Errorf("--tolerance %v: want a part above 0, such as 0.1", f.tolerance)
	case !(f.link >= 0) || math.IsInf(f.link, 0):
		return nil, fmt.Errorf("--link %v: want GB/s", f.link)
	case f.strategies && f.register != 0:
		return nil, errors.New("--strategies with -R: windows are one of the strategies, on memory that is not registered")
	case p.pairs:
		return p, p.pairPlan().Check(2)
	}
	return p, p.Sizes.Check()
}

func (p *perfPlan) pairPlan() *perf.PairPlan {
	return &perf.PairPlan{Bytes: p.Sizes.Max, Iterations: p.Iterations, Warmups: p.Warmups}
}

func (f *perfFlags) operations(p *perfPlan, names []string) error {
	if len(names) == 0 {
		return errors.New("no operation given")
	}
	for _, name := range names {
		switch name {
		case "all":
			p.Operations, p.Fitting = append(p.Operations, perf.Operations...), true
		case "pairs":
			p.pairs = true
		default:
			o, err := perf.Find(name)
			if err != nil {
				return fmt.Errorf("%w, all or pairs", err)
			}
			p.Operations = append(p.Operations, o)
		}
	}
	if p.pairs && len(p.Operations) > 0 {
		return errors.New("pairs is measured by itself")
	}
	for i, o := range p.Operations {
		if slices.Contains(p.Operations[:i], o) {
			return fmt.Errorf("%s is given twice", o.Name)
		}
	}
	return nil
}

// mostReport bounds the bytes of a baseline: a report has some hundred a row.
const mostReport = 64 << 20

// earlier reads the baseline.
func (f *perfFlags) earlier() (*perf.Report, error) {
	if f.baseline == "" {
		return nil, nil
	}
	text, err := safefile.Read(f.baseline, mostReport)
	if err != nil {
		return nil, fmt.Errorf("--baseline: %w", err)
	}
	r, err := perf.ReadReport(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("--baseline %s: %w", f.baseline, err)
	}
	return r, nil
}

// run joins the other ranks, measures, and writes where rank 0 is.
func (f *perfFlags) run(ctx context.Context, out io.Writer, p *perfPlan) error {
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	t, err := f.target(out, sess.Rank() == 0)
	if err != nil {
		return err
	}
	defer t.close()
	devs, note, err := ranksOf(sess, f.gpus)
	if err != nil {
		return err
	}
	if !p.pairs {
		if err := p.Check(max(sess.Size(), len(devs))); err != nil {
			return usage(err)
		}
	}
	var cfg *comm.Config
	if f.strategies {
		cfg = &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}}
	}
	g, err := joinRanks(ctx, sess, devs, cfg)
	if err != nil {
		return err
	}
	defer g.Close()
	if sess.Rank() == 0 && note != "" {
		fmt.Fprintln(os.Stderr, "chorus: perf:", note)
	}
	if g.Size() == 1 {
		fmt.Fprintln(os.Stderr, "chorus: perf: one rank has nobody to talk to: give it more GPUs (-g) or more processes (chorus run)")
	}
	if f.strategies && slices.Contains(g.Strategies(), comm.Tuned) {
		if err := comm.FindTuning(ctx, g); err != nil {
			return err
		}
	}
	if err := f.measure(ctx, t, g, p); err != nil {
		return err
	}
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	return sess.Shutdown(ctx)
}
