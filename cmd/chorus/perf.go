package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/results"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/perf"
)

const perfLong = `Measure and check collectives like NVIDIA's nccl-tests, without MPI or a compiler.

Operations:
  %s
  all    every operation above that supports the number of ranks
  pairs  bandwidth and latency between every two ranks; only -b, -n, -w and -g apply

Started alone, the command measures the GPUs of this machine in one process, with a
thread for each. To use more processes, start it with chorus run, torchrun, Slurm or MPI:

  chorus run -- chorus perf all_reduce

Rank 0 prints. chorus run adds the rank at the start of each line: use --output if
another program reads the results.

Columns have the definitions of nccl-tests. 1 GB is 10^9 bytes.
  time      mean time of an operation in µs, over all ranks and iterations
  algbw     size / time
  busbw     bandwidth on a GPU's link
  p50, p99  percentiles of single operations, timed on the device, on the slowest rank
  #wrong    elements that differ from the expected value
  link      busbw of the faster side of the row / bandwidth of the link, which the
            product's name or --link gives; the verdict uses the rows from 64 MiB on
Without -e there is one size. With -e, each size is 1M larger than the one before, or
-f times as large.

The exit code is 0 if all results were right; 1 if elements were wrong, a row was slower
than the baseline, or an error occurred; and 64 for a mistake in the flags. After Ctrl-C
it is 130.`

const perfExample = `  chorus perf all_reduce -b 8 -e 1G -f 2
  chorus perf all_gather reduce_scatter -g 2 -d bfloat16 -G 20
  chorus perf all -b 1M -e 1G -f 4 --html report.html
  chorus perf pairs
  chorus perf all_reduce --format json > today.json
  chorus perf all_reduce --baseline today.json
  chorus perf all_reduce -b 8 -e 4M -f 4 -G 20 --strategies
  chorus perf all_reduce -b 1K -e 256M -f 4 --deterministic`

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
	deterministic   bool
}

func newPerfCommand() *cobra.Command {
	var f perfFlags
	c := &cobra.Command{
		Use:     "perf [flags] operation...",
		Short:   "Measure and check collectives, like nccl-tests",
		Long:    fmt.Sprintf(perfLong, strings.Join(perf.Operations(), ", ")),
		Example: perfExample,
		RunE: func(c *cobra.Command, ops []string) error {
			if !c.Flags().Changed("maxbytes") {
				f.max = f.min
			}
			if c.Flags().Changed("stepbytes") && c.Flags().Changed("stepfactor") {
				return usageError(c, errors.New("-i with -f: sizes grow by a number of bytes or by a factor: leave one out"))
			}
			plan, err := f.plan(ops)
			if err == nil && plan.pairs {
				err = pairsFlags(c)
			}
			if err != nil {
				return usageError(c, err)
			}
			return interruptible(c, func(ctx context.Context, out io.Writer) error { return f.run(ctx, out, plan) })
		},
	}
	f.add(c)
	return c
}

func (f *perfFlags) add(c *cobra.Command) {
	fs := c.Flags()
	fs.SortFlags = false
	fs.StringVarP(&f.min, "minbytes", "b", "32M", "smallest size in bytes; units K, M, G")
	fs.StringVarP(&f.max, "maxbytes", "e", "", "largest size in bytes; default: the smallest size")
	fs.StringVarP(&f.step, "stepbytes", "i", "1M", "step between sizes in bytes")
	fs.IntVarP(&f.factor, "stepfactor", "f", 0, "factor between sizes, instead of -i")
	fs.IntVarP(&f.iters, "iters", "n", 20, "timed operations for each size")
	fs.IntVarP(&f.warmups, "warmup_iters", "w", 1, "untimed operations before each measurement")
	fs.IntVarP(&f.checks, "check", "c", 1, "number of checks of each result; 0: none")
	fs.StringVarP(&f.dtype, "datatype", "d", "float", "element type, named as in nccl-tests, or all")
	fs.StringVarP(&f.red, "op", "o", "sum", "reduction: sum, prod, max, min, avg, mulsum, or all")
	fs.StringVarP(&f.root, "root", "r", "0", "root rank of rooted operations, or all")
	fs.IntVarP(&f.graph, "cudagraph", "G", 0, "launches of a graph with the operations of a row; 0: no graph")
	fs.IntVarP(&f.register, "local_register", "R", 0, "registration of buffers allocated by NCCL: 0 none, 1 local buffers, 2 symmetric windows")
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one if the job has several processes")
	fs.BoolVar(&f.strategies, "strategies", false, "side-by-side measurement of all strategies, with the choice of the tuning")
	fs.BoolVar(&f.deterministic, "deterministic", false, "deterministic reductions: in rank order, with the same bits for all sizes")
	fs.StringVar(&f.format, "format", "text", "output format: text, json, csv, or bench for benchstat")
	fs.StringVar(&f.output, "output", "", "file for the output; default: standard output")
	fs.StringVar(&f.html, "html", "", "file for an HTML page with plots")
	fs.StringVar(&f.baseline, "baseline", "", "output of an earlier run with --format json to compare with; a slower row fails")
	fs.Float64Var(&f.tolerance, "tolerance", 0.1, "tolerated slowdown of a row against the baseline, as a fraction")
	fs.Float64Var(&f.link, "link", 0, "bandwidth of a GPU's link in one direction in GB/s; 0: by the product's name")
}

// A perfPlan is a validated command line.
type perfPlan struct {
	perf.Plan
	pairs bool
}

// pairsFlags rejects flags that do not apply to pairs.
func pairsFlags(c *cobra.Command) error {
	for _, name := range []string{"maxbytes", "stepbytes", "stepfactor", "check", "datatype", "op", "root", "cudagraph", "local_register", "baseline", "strategies", "deterministic"} {
		if c.Flags().Changed(name) {
			return fmt.Errorf("--%s does not apply to pairs", name)
		}
	}
	return nil
}

// plan validates the flags. Its error is a mistake of the user.
func (f *perfFlags) plan(ops []string) (*perfPlan, error) {
	p := &perfPlan{}
	if err := f.operations(p, ops); err != nil {
		return nil, err
	}
	if err := f.parse(p); err != nil {
		return nil, err
	}
	switch {
	case perfWriters[f.format] == nil:
		return nil, fmt.Errorf("--format %q: want text, json, csv or bench", f.format)
	case f.gpus < 0:
		return nil, fmt.Errorf("-g %d: want 1 or more, or 0 for all", f.gpus)
	case f.output != "" && f.html != "" && filepath.Clean(f.output) == filepath.Clean(f.html):
		return nil, fmt.Errorf("--output and --html are both %s: want different files", filepath.Clean(f.html))
	case !(f.tolerance > 0):
		return nil, fmt.Errorf("--tolerance %v: want a fraction above 0, such as 0.1", f.tolerance)
	case !(f.link >= 0) || math.IsInf(f.link, 0):
		return nil, fmt.Errorf("--link %v: want a bandwidth in GB/s", f.link)
	case f.strategies && f.register != 0:
		return nil, errors.New("--strategies with -R: the strategies include windows and need unregistered memory: leave -R out")
	case p.pairs:
		return p, p.pairPlan().Check(2)
	}
	return p, (&perf.Plan{Operations: []string{"all_reduce"}, Types: []string{"int8"}, MinBytes: p.MinBytes, MaxBytes: p.MaxBytes, StepBytes: p.StepBytes, StepFactor: p.StepFactor, Iterations: 1}).Check(1)
}

// parse sets the values of the plan that flags have.
func (f *perfFlags) parse(p *perfPlan) (err error) {
	for _, x := range []struct {
		flag, text string
		to         *int
	}{{"-b", f.min, &p.MinBytes}, {"-e", f.max, &p.MaxBytes}, {"-i", f.step, &p.StepBytes}} {
		n, err := perf.ParseBytes(x.text)
		if err != nil {
			return fmt.Errorf("%s: %w", x.flag, err)
		}
		*x.to = n
	}
	if p.MaxBytes < 1 {
		return fmt.Errorf("sizes from %d to %d bytes: want at least 1, and the smallest first", p.MinBytes, p.MaxBytes)
	}
	if _, err := perf.ParseTypes(f.dtype); err != nil {
		return fmt.Errorf("-d: %w", err)
	}
	p.StepFactor, p.Types, p.Reductions, p.Strategies = f.factor, []string{f.dtype}, []string{f.red}, f.strategies
	if err := (&perf.Plan{Operations: []string{"all_reduce"}, Reductions: p.Reductions, MinBytes: 4, Iterations: 1}).Check(1); err != nil {
		return fmt.Errorf("-o: %w", err)
	}
	if p.Root, err = strconv.Atoi(f.root); f.root == "all" {
		p.Root = perf.AllRoots
	} else if err != nil || p.Root < 0 {
		return fmt.Errorf("-r %q: want a rank or all", f.root)
	}
	p.Iterations, p.Warmups, p.Checks, p.Launches = f.iters, f.warmups, f.checks, f.graph
	p.Register = f.register
	return nil
}

func (p *perfPlan) pairPlan() *perf.PairPlan {
	return &perf.PairPlan{Bytes: p.MaxBytes, Iterations: p.Iterations, Warmups: p.Warmups}
}

func (f *perfFlags) operations(p *perfPlan, names []string) error {
	if len(names) == 0 {
		return errors.New("no operation given")
	}
	for _, name := range names {
		switch name {
		case "all":
			p.Operations, p.Fitting = append(p.Operations, perf.Operations()...), true
		case "pairs":
			p.pairs = true
		default:
			name = strings.TrimSuffix(name, "_perf")
			if !slices.Contains(perf.Operations(), name) {
				return fmt.Errorf("unknown operation %q: want one of %s, all or pairs", name, strings.Join(perf.Operations(), ", "))
			}
			p.Operations = append(p.Operations, name)
		}
	}
	if p.pairs && len(p.Operations) > 0 {
		return errors.New("pairs cannot be combined with other operations")
	}
	for i, o := range p.Operations {
		if slices.Contains(p.Operations[:i], o) {
			return fmt.Errorf("%s is given twice", o)
		}
	}
	return nil
}

// mostReport limits the size of a baseline: a row of a report has a few hundred bytes.
const mostReport = 64 << 20

// readBaseline reads the baseline.
func (f *perfFlags) readBaseline() (*perf.Report, error) {
	if f.baseline == "" {
		return nil, nil
	}
	text, err := safe.Read(f.baseline, mostReport)
	if err != nil {
		return nil, fmt.Errorf("--baseline: %w", err)
	}
	if err := safe.CheckObjects(text); err != nil {
		return nil, fmt.Errorf("--baseline %s: it has %w", f.baseline, err)
	}
	r, err := results.Read(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("--baseline %s: %w", f.baseline, err)
	}
	return r, nil
}

// config returns the options of the group.
func (f *perfFlags) config() *comm.Config {
	cfg := &comm.Config{}
	if f.strategies {
		cfg.Strategy, cfg.Tuning = comm.Tuned, &comm.Tuning{}
	}
	if f.deterministic {
		cfg.Deterministic = &comm.Order{}
	}
	return cfg
}

// run joins the other ranks and measures, and prints the results on rank 0.
func (f *perfFlags) run(ctx context.Context, out io.Writer, p *perfPlan) error {
	m, err := attach(ctx, f.gpus)
	if err != nil {
		return err
	}
	defer m.Close()
	t, err := f.target(out, m.isFirst())
	if err != nil {
		return err
	}
	defer t.close()
	if !p.pairs {
		if err := p.Check(max(m.Size(), len(m.devs))); err != nil {
			return usage(err)
		}
	}
	g, err := m.group(ctx, f.config())
	if err != nil {
		return err
	}
	defer g.Close()
	m.printNote("perf")
	if g.Size() == 1 {
		fmt.Fprintln(os.Stderr, "chorus: perf: a collective needs two ranks: use more GPUs (-g) or more processes (chorus run)")
	}
	if f.strategies && slices.Contains(g.Strategies(), comm.Tuned) {
		if err := comm.SetTuning(ctx, g, nil); err != nil {
			return err
		}
	}
	if err := f.measure(ctx, t, g, p); err != nil {
		return err
	}
	return m.leave(ctx, g)
}

// perfWriters write a complete report. For text that is only the end: the tables
// were printed as they grew.
var perfWriters = map[string]func(*perf.Report, io.Writer) error{
	"text":  results.WriteEnd,
	"json":  results.WriteJSON,
	"csv":   results.WriteCSV,
	"bench": results.WriteBench,
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
		if err := results.Comparable(t.baseline, g, &p.Plan); err != nil {
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
		if err := results.WriteHTML(r, t.page); err != nil {
			return err
		}
	}
	return errors.Join(f.result(t, r), t.finish())
}

// writeIncomplete writes the report of a measurement that ended early, except
// the tables of text, which were printed already.
func (f *perfFlags) writeIncomplete(t *perfTarget, r *perf.Report) error {
	var errs []error
	if f.format != "text" {
		errs = append(errs, perfWriters[f.format](r, t.out))
	}
	if t.page != nil {
		errs = append(errs, results.WriteHTML(r, t.page))
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
		return r, errors.Join(results.WriteHead(r, out), results.WritePairs(r.Pairs, out))
	}
	if f.strategies {
		r, err := perf.Run(ctx, g, &p.Plan, nil)
		if err != nil || !text {
			return r, err
		}
		return r, errors.Join(results.WriteHead(r, out), results.WriteStrategies(r, out))
	}
	if !text {
		return perf.Run(ctx, g, &p.Plan, nil)
	}
	t := results.NewTable(out, f.link)
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
		both, missing, err := results.Compare(r, t.baseline)
		if err != nil {
			return fmt.Errorf("--baseline %s: %w", f.baseline, err)
		}
		slower, err := results.WriteChanges(t.remarks, both, missing, f.tolerance)
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
