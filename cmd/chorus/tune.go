package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/perf"
)

const tuneLong = `Measure which strategy carries out which collective the fastest, and write it down.

The strategies are NCCL, its kernels for symmetric windows, Chorus's own kernels by each
of their algorithms, and copy engines, where all ranks are of one process. Groups whose
strategy is tuned (CHORUS_COMM_STRATEGY=tuned, or comm.Tuned) go by the file:
chorus/tuning.json in the user's cache folder, or CHORUS_TUNING_FILE. It has a part for
each kind and number of GPUs and each layout of processes, and is out of date when NCCL,
the driver or Chorus's kernels are others.

By itself it measures the GPUs of this machine in one process. For jobs of a process a
GPU, measure in such a job:

  chorus run -- chorus tune

Nothing else may run on the GPUs meanwhile. chorus perf --strategies shows what the file
chooses beside all that there is.`

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
		Short:   "Measure the strategies of collectives, for groups that go by the fastest",
		Long:    tuneLong,
		Example: tuneExample,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := f.config()
			if err != nil {
				return usageError(c, err)
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return f.run(ctx, c.OutOrStdout(), cfg)
		},
	}
	fs := c.Flags()
	fs.SortFlags = false
	fs.IntVarP(&f.gpus, "ngpus", "g", 0, "GPUs of this process; 0: all, or one in a job of several processes")
	fs.StringVarP(&f.max, "maxbytes", "e", "", "largest size, of an all-reduce or of one rank's part; left out: 1G of an all-reduce or of all parts together")
	fs.StringVarP(&f.types, "datatype", "d", "float,bfloat16", "element types of what is reduced, as nccl-tests names them, with commas")
	fs.StringVarP(&f.ops, "op", "o", "sum,max", "reductions, with commas: sum, prod, max, min, avg")
	fs.BoolVar(&f.dry, "dry-run", false, "say what would be measured and where it would be written, and do neither")
	fs.StringVar(&f.output, "output", "", "the file to write to, instead of the one that groups go by")
	fs.StringVar(&f.format, "format", "text", "what to print: text, or json for what is written")
	return c
}

// config turns the flags into what to measure. The error is a mistake of the user.
func (f *tuneFlags) config() (*comm.TuneConfig, error) {
	c := &comm.TuneConfig{}
	if f.max != "" {
		n, err := perf.ParseBytes(f.max)
		if err == nil && n < 16 {
			err = fmt.Errorf("%q: want 16 or more", f.max)
		}
		if err != nil {
			return nil, fmt.Errorf("-e: %w", err)
		}
		c.MaxBytes = n
	}
	for _, name := range strings.Split(f.types, ",") {
		list, err := perf.ParseDTypes(name)
		if err != nil {
			return nil, fmt.Errorf("-d: %w", err)
		}
		for _, t := range list {
			if slices.Contains(c.Types, t) {
				return nil, fmt.Errorf("-d %q: %s is given twice", f.types, name)
			}
			c.Types = append(c.Types, t)
		}
	}
	for _, name := range strings.Split(f.ops, ",") {
		i := slices.IndexFunc(tunable, func(op comm.Op) bool { return op.String() == name })
		if i < 0 {
			return nil, fmt.Errorf("-o %q: want some of %v with commas", name, tunable)
		}
		if slices.Contains(c.Ops, tunable[i]) {
			return nil, fmt.Errorf("-o %q: %s is given twice", f.ops, name)
		}
		c.Ops = append(c.Ops, tunable[i])
	}
	switch {
	case f.format != "text" && f.format != "json":
		return nil, fmt.Errorf("--format %q: want text or json", f.format)
	case f.gpus < 0:
		return nil, fmt.Errorf("-g %d: want 1 or more, or 0 for all", f.gpus)
	}
	return c, nil
}

var tunable = []comm.Op{comm.Sum, comm.Prod, comm.Max, comm.Min, comm.Avg}

// run joins the other ranks, measures, and writes where rank 0 is.
func (f *tuneFlags) run(ctx context.Context, out io.Writer, cfg *comm.TuneConfig) error {
	path := f.output
	if path == "" {
		var err error
		if path, err = comm.TuningFile(); err != nil {
			return err
		}
	}
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	first := sess.Rank() == 0
	if first {
		if err := f.canSave(ctx, path); err != nil { // better known before
			return err
		}
	}
	devs, note, err := ranksOf(sess, f.gpus)
	if err != nil {
		return err
	}
	g, err := joinRanks(ctx, sess, devs, &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
	if err != nil {
		return err
	}
	defer g.Close()
	if first && note != "" {
		fmt.Fprintln(os.Stderr, "chorus: tune:", note)
	}
	if len(g.Strategies()) == 1 {
		return errors.New("tune: there is nothing to choose from: one GPU has nobody to talk to, and own kernels and windows need GPUs of one host that reach each other's memory, or NCCL 2.27.3")
	}
	t, err := f.measure(ctx, g, cfg)
	if err == nil && first {
		err = f.report(ctx, out, t, path)
	}
	if err != nil {
		return err
	}
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	return sess.Shutdown(ctx)
}

// canSave returns why the file cannot be written. A dry run only reads.
func (f *tuneFlags) canSave(ctx context.Context, path string) error {
	if !f.dry {
		return comm.CanSave(ctx, path)
	}
	_, err := comm.LoadTuning(path, comm.Site{})
	return err
}

// measure returns the tuning, without times if it is a dry run.
func (f *tuneFlags) measure(ctx context.Context, g *comm.Group, cfg *comm.TuneConfig) (*comm.Tuning, error) {
	if !f.dry {
		return comm.Tune(ctx, g, cfg)
	}
	at, err := g.Site()
	if err != nil {
		return nil, err
	}
	plan, err := comm.TunePlan(g, cfg)
	return &comm.Tuning{For: at, Choices: plan}, err
}

// report writes the file, and what is in it.
func (f *tuneFlags) report(ctx context.Context, out io.Writer, t *comm.Tuning, path string) error {
	if !f.dry {
		if err := t.Save(ctx, path); err != nil {
			return err
		}
	}
	if f.format == "json" {
		enc := json.NewEncoder(out)
		enc.SetIndent("", " ")
		return enc.Encode(t)
	}
	at := t.For
	fmt.Fprintf(out, "# chorus tune: %d ranks, %d of a process, hosts: %d, %s, %s, NCCL %s, own kernels %s\n", at.Ranks, at.Locals, at.Hosts, at.GPU, at.Driver, at.NCCL, at.Kernels)
	if err := writeTuning(out, t, f.dry); err != nil {
		return err
	}
	where := "written to"
	if f.dry {
		where = "nothing was measured; it would be written to"
	}
	_, err := fmt.Fprintf(out, "# %s %s\n", where, path)
	return err
}

// writeTuning writes a table of the strategies for each operation. The fastest has a star.
func writeTuning(out io.Writer, t *comm.Tuning, dry bool) error {
	for choices := t.Choices; len(choices) > 0; {
		n := 1
		for n < len(choices) && titleOf(&choices[n]) == titleOf(&choices[0]) {
			n++
		}
		if err := besides(choices[:n], dry).Write(out); err != nil {
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

// besides makes a table of the choices of an operation.
func besides(choices []comm.Choice, dry bool) *perf.Beside {
	b := &perf.Beside{Title: titleOf(&choices[0])}
	var columns []comm.Strategy
	for _, c := range choices {
		row := perf.BesideRow{Bytes: c.Bytes, Cells: map[string]string{}}
		for i, x := range c.Times {
			if !slices.Contains(columns, x.Strategy) {
				columns = append(columns, x.Strategy)
			}
			switch {
			case dry:
				row.Cells[x.Strategy.String()] = "? "
			case i == 0:
				row.Cells[x.Strategy.String()] = perf.Cell(x.Micros, "*")
			default:
				row.Cells[x.Strategy.String()] = perf.Cell(x.Micros, " ")
			}
		}
		b.Rows = append(b.Rows, row)
	}
	slices.Sort(columns)
	for _, s := range columns {
		b.Columns = append(b.Columns, s.String())
	}
	return b
}
