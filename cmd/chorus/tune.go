package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/results"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/perf"
)

const tuneLong = `Measure all strategies of each collective, and record the fastest one for each size.

The strategies are NCCL, NCCL's kernels for symmetric windows, each algorithm of the
Chorus kernels, and copy engines if all ranks belong to one process. Groups with the
strategy "tuned" (CHORUS_COMM_STRATEGY=tuned, or comm.Tuned) use the result.

The result is written to chorus/tuning.json in the user's cache directory, or to
CHORUS_TUNING_FILE. The file has a section for each GPU model, number of GPUs and layout
of processes. A section is out of date if NCCL, the driver or the Chorus kernels change:
groups then measure again, and refuse a file that CHORUS_TUNING_FILE names.

Started alone, the command measures the GPUs of this machine in one process. For jobs
with one process for each GPU, measure in such a job:

  chorus run -- chorus tune

Run nothing else on the GPUs at the same time. chorus perf --strategies compares the
choice in the file with all strategies.`

const tuneExample = `  chorus tune
  chorus tune --dry-run
  chorus tune -g 2 -d float,half -o sum -e 16M`

// tuneFlags are the flags of chorus tune.
type tuneFlags struct {
	gpus       int
	max        string
	types, ops string
	output     string
	format     string
	dry        bool
}

func newTuneCommand() *cobra.Command {
	var f tuneFlags
	c := &cobra.Command{
		Use:     "tune [flags]",
		Short:   "Find the fastest strategy of each collective for tuned groups",
		Long:    tuneLong,
		Example: tuneExample,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := f.config()
			if err != nil {
				return usageError(c, err)
			}
			return interruptible(c, func(ctx context.Context, out io.Writer) error { return f.run(ctx, out, cfg) })
		},
	}
	fs := c.Flags()
	fs.SortFlags = false
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one if the job has several processes")
	fs.StringVarP(&f.max, "maxbytes", "e", "", "largest size in bytes, of an all-reduce or of one rank's part; default: 1G for an all-reduce or for all parts together")
	fs.StringVarP(&f.types, "datatype", "d", "float,bfloat16", "element types of reductions, named as in nccl-tests, separated by commas")
	fs.StringVarP(&f.ops, "op", "o", "sum,max", "reductions, separated by commas: sum, prod, max, min, avg")
	fs.BoolVar(&f.dry, "dry-run", false, "list of the measurements and of the output file, without measuring or writing")
	fs.StringVar(&f.output, "output", "", "output file, instead of the file that groups read")
	fs.StringVar(&f.format, "format", "text", "output format: text, or json with the content of the file")
	return c
}

// config validates the flags. Its error is a mistake of the user.
func (f *tuneFlags) config() (*comm.TuneConfig, error) {
	c := &comm.TuneConfig{}
	var err error
	if f.max != "" {
		if c.MaxBytes, err = perf.ParseBytes(f.max); err == nil && c.MaxBytes < 16 {
			err = fmt.Errorf("%q: want 16 or more", f.max)
		}
		if err != nil {
			return nil, fmt.Errorf("-e: %w", err)
		}
	}
	if c.Types, err = distinct("-d", f.types, perf.ParseTypes); err != nil {
		return nil, err
	}
	if c.Ops, err = distinct("-o", f.ops, parseTunable); err != nil {
		return nil, err
	}
	switch {
	case f.format != "text" && f.format != "json":
		return nil, fmt.Errorf("--format %q: want text or json", f.format)
	case f.gpus < 0:
		return nil, fmt.Errorf("-g %d: want 1 or more, or 0 for all", f.gpus)
	}
	return c, nil
}

// distinct parses the names in the value of a flag, which are separated by commas.
func distinct[T comparable](flag, names string, parse func(name string) ([]T, error)) (all []T, err error) {
	for _, name := range strings.Split(names, ",") {
		list, err := parse(name)
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w", flag, name, err)
		}
		for _, x := range list {
			if slices.Contains(all, x) {
				return nil, fmt.Errorf("%s %q: %s is given twice", flag, names, name)
			}
			all = append(all, x)
		}
	}
	return all, nil
}

func parseTunable(name string) ([]comm.Op, error) {
	i := slices.IndexFunc(tunable, func(op comm.Op) bool { return op.String() == name })
	if i < 0 {
		return nil, fmt.Errorf("want some of %v, separated by commas", tunable)
	}
	return tunable[i : i+1], nil
}

var tunable = []comm.Op{comm.Sum, comm.Prod, comm.Max, comm.Min, comm.Avg}

// run joins the other ranks and measures, and on rank 0 writes the file and
// prints.
func (f *tuneFlags) run(ctx context.Context, out io.Writer, cfg *comm.TuneConfig) error {
	path := f.output
	if path == "" {
		var err error
		if path, err = comm.TuningFile(); err != nil {
			return err
		}
	}
	m, err := attach(ctx, f.gpus)
	if err != nil {
		return err
	}
	defer m.Close()
	if m.isFirst() {
		if err := f.canSave(ctx, path); err != nil { // fail before the measurement
			return err
		}
	}
	g, err := m.group(ctx, &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
	if err != nil {
		return err
	}
	defer g.Close()
	m.printNote("tune")
	if len(g.Strategies()) == 1 {
		return errors.New("tune: there is only one strategy here: collectives need two GPUs; Chorus kernels need GPUs of one host with peer access, windows need NCCL 2.27.3")
	}
	t, err := f.measure(ctx, g, cfg)
	if err == nil && m.isFirst() {
		err = f.report(ctx, out, t, path)
	}
	if err != nil {
		return err
	}
	return m.leave(ctx, g)
}

// canSave checks that the file can be written, or, in a dry run, read.
func (f *tuneFlags) canSave(ctx context.Context, path string) error {
	if !f.dry {
		return route.CanSave(ctx, path)
	}
	_, err := comm.LoadTuning(path, comm.Site{})
	return err
}

// measure returns the tuning, without times in a dry run.
func (f *tuneFlags) measure(ctx context.Context, g *comm.Group, cfg *comm.TuneConfig) (*comm.Tuning, error) {
	if !f.dry {
		return comm.Tune(ctx, g, cfg)
	}
	at, err := g.Site()
	if err != nil {
		return nil, err
	}
	plan := route.PlanConfig{MaxBytes: cfg.MaxBytes, Types: cfg.Types}
	for _, o := range cfg.Ops {
		plan.Ops = append(plan.Ops, collective.Reduction(o))
	}
	list, err := route.GroupOf(g).TunePlan(plan)
	return &comm.Tuning{For: at, Choices: list}, err
}

// report writes the file and prints the result.
func (f *tuneFlags) report(ctx context.Context, out io.Writer, t *comm.Tuning, path string) error {
	if !f.dry {
		if err := t.Save(ctx, path); err != nil {
			return err
		}
	}
	if f.format == "json" {
		return encode(out, t)
	}
	at := t.For
	fmt.Fprintf(out, "# chorus tune: %d ranks, %d in each process, hosts: %d, %s, %s, NCCL %s, Chorus kernels %s\n", at.Ranks, at.Locals, at.Hosts, at.GPU, at.Driver, at.NCCL, at.Kernels)
	if err := writeTuning(out, t, f.dry); err != nil {
		return err
	}
	where := "written to"
	if f.dry {
		where = "nothing was measured; the result would be written to"
	}
	_, err := fmt.Fprintf(out, "# %s %s\n", where, path)
	return err
}

// writeTuning writes a table of strategies for each operation, in which a star
// marks the fastest.
func writeTuning(out io.Writer, t *comm.Tuning, dry bool) error {
	for choices := t.Choices; len(choices) > 0; {
		n := 1
		for n < len(choices) && titleOf(&choices[n]) == titleOf(&choices[0]) {
			n++
		}
		if err := strategyTable(choices[:n], dry).Write(out); err != nil {
			return err
		}
		choices = choices[n:]
	}
	_, err := fmt.Fprintln(out, "#")
	return err
}

func titleOf(c *comm.Choice) string {
	return strings.TrimSpace(strings.Join([]string{c.Operation, c.Type, c.Reduction}, " "))
}

// strategyTable builds a table of the choices of one operation.
func strategyTable(choices []comm.Choice, dry bool) *results.StrategyTable {
	b := &results.StrategyTable{Title: titleOf(&choices[0])}
	var columns []comm.Strategy
	for _, c := range choices {
		row := results.StrategyRow{Bytes: c.Bytes, Cells: map[string]string{}}
		for i, x := range c.Times {
			if !slices.Contains(columns, x.Strategy) {
				columns = append(columns, x.Strategy)
			}
			switch {
			case dry:
				row.Cells[string(x.Strategy)] = "? "
			case i == 0:
				row.Cells[string(x.Strategy)] = results.Cell(x.Micros, "*")
			default:
				row.Cells[string(x.Strategy)] = results.Cell(x.Micros, " ")
			}
		}
		b.Rows = append(b.Rows, row)
	}
	slices.SortFunc(columns, func(a, b comm.Strategy) int {
		return slices.Index(route.Names[:], string(a)) - slices.Index(route.Names[:], string(b))
	})
	for _, s := range columns {
		b.Columns = append(b.Columns, string(s))
	}
	return b
}
