package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/safe"
)

const statusLong = `Show the state of a job that chorus run has started: its epoch and hosts, and for each
rank the progress of its collectives, the operation in flight and its age, memory and GPU
sensors. Ranks that are behind come first, with the time since they are behind.

The command runs on any host of the job, as the user of the job or as root, and in the same
container. It talks to chorus run through a Unix socket, so it needs no secret. It also works
if the job hangs: a process that does not answer within a second is listed as silent. If
several jobs run on this host, choose one by --job, and if they have the same name by --pid.

With --ras it shows a running job of PyTorch, vLLM or another program that uses NCCL 2.28.7 or newer,
which need not use Chorus. NCCL's RAS service listens at localhost:28028 on each host of the job
(NCCL_RAS_ADDR). The command asks it twice within some seconds. Ranks that have launched fewer or
other operations than the others, and do not go on, hold the job up. Processes that do not answer,
and errors of communicators, come first. Sends and receives are not among the counts.

A rate is the average between two readings. A completed collective may be shown as
in flight for up to a second if the driver does not answer.`

type statusFlags struct {
	monitor.Choice
	ras           string
	pause         time.Duration
	watch, asJSON bool
}

func newStatusCommand() *cobra.Command {
	var f statusFlags
	cmd := &cobra.Command{
		Use:   "status [flags]",
		Short: "Show the progress of a running job, and which rank is behind",
		Long:  statusLong,
		Example: `  chorus status
  chorus status --watch
  chorus status --job mnist --json
  chorus status --ras localhost:28028`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case f.ras == "" && cmd.Flags().Changed("ras"):
				return usageError(cmd, errors.New("--ras is empty: want HOST:PORT"))
			case f.ras != "" && (f.watch || f.Choice != monitor.Choice{}):
				return usageError(cmd, errors.New("--ras excludes --watch, --job and --pid"))
			case f.pause <= 0:
				return usageError(cmd, fmt.Errorf("--pause is %v: want more than 0", f.pause))
			case f.watch && f.asJSON:
				return usageError(cmd, errors.New("--watch and --json exclude each other"))
			case f.watch && !isTerminal(os.Stdout):
				return usageError(cmd, errors.New("--watch needs a terminal as its output"))
			}
			return interruptible(cmd, f.run)
		},
	}
	addChoice(cmd, &f.Choice)
	cmd.Flags().StringVar(&f.ras, "ras", "", "address of NCCL's RAS service, to show a job that need not use Chorus, such as localhost:28028")
	cmd.Flags().DurationVar(&f.pause, "pause", 3*time.Second, "time between the two questions of --ras")
	cmd.Flags().BoolVar(&f.watch, "watch", false, "output that is renewed each second, until Ctrl-C")
	cmd.Flags().BoolVar(&f.asJSON, "json", false, "output in JSON")
	return cmd
}

// addChoice adds the flags that choose a job.
func addChoice(cmd *cobra.Command, which *monitor.Choice) {
	cmd.Flags().StringVar(&which.Job, "job", "", "name of the job, if several jobs run on this host")
	cmd.Flags().IntVar(&which.PID, "pid", 0, "process ID of a chorus run of the job on this host, if several jobs have the name")
}

func (f *statusFlags) run(ctx context.Context, out io.Writer) error {
	if f.ras != "" {
		return f.foreign(ctx, out)
	}
	client, j, err := monitor.Find(ctx, f.Choice)
	if err != nil {
		return err
	}
	if f.watch {
		return watch(ctx, client, j)
	}
	if j.Interval == 0 { // the first reading of the job has no rates
		if next, err := client.Next(ctx, 0); err == nil {
			j = next
		}
	}
	if f.asJSON {
		return encode(out, j)
	}
	return j.Print(out, 0)
}

// foreign shows a job by NCCL's RAS service.
func (f *statusFlags) foreign(ctx context.Context, out io.Writer) error {
	if _, _, err := net.SplitHostPort(f.ras); err != nil {
		return usage(fmt.Errorf("--ras %q: %w: want HOST:PORT", f.ras, err))
	}
	s, err := analyze.WatchRAS(ctx, f.ras, f.pause)
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = fmt.Errorf("%w: NCCL 2.28.7 and newer listen at NCCL_RAS_ADDR (localhost:28028) on each host of the job, unless NCCL_RAS_ENABLE is 0", err)
	}
	if err != nil {
		return err
	}
	if f.asJSON {
		return encode(out, s)
	}
	return s.Print(out)
}

// Control sequences of terminals: they show and hide the other screen, move to its start, and
// clear the rest of a line or of the screen.
const (
	enterScreen, leaveScreen = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
	screenStart              = "\x1b[H"
	clearLine, clearRest     = "\x1b[K", "\x1b[J"
)

// watch shows the state each second until ctx or the job ends.
func watch(ctx context.Context, client *monitor.Client, j *monitor.Job) (err error) {
	fmt.Print(enterScreen)
	defer func() {
		fmt.Print(leaveScreen)
		if err == nil {
			fmt.Printf("job %s has ended\n", safe.Text(j.Job))
		}
	}()
	for {
		rows, columns := terminalSize(os.Stdout)
		var text strings.Builder
		if err := j.Print(&text, rows-1); err != nil {
			return err
		}
		fmt.Print(frame(text.String(), columns))
		next, err := client.Next(ctx, time.Second)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			if client.HasEnded() {
				return ctx.Err()
			}
			continue
		}
		j = next
	}
}

// frame returns the text for the whole screen, and cuts long lines, so that
// they take one row.
func frame(text string, columns int) string {
	var b strings.Builder
	b.WriteString(screenStart)
	for line := range strings.Lines(text) {
		r := []rune(safe.Text(strings.TrimSuffix(line, "\n")))
		b.WriteString(string(r[:min(len(r), columns)]) + clearLine + "\r\n")
	}
	return b.String() + clearRest
}

// terminalSize returns the size of a terminal, or a usual one if it is not known.
func terminalSize(f *os.File) (rows, columns int) {
	var size struct{ rows, columns, x, y uint16 }
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), syscall.TIOCGWINSZ, uintptr(unsafe.Pointer(&size)))
	if errno != 0 || size.rows < 2 || size.columns == 0 {
		return 24, 80
	}
	return int(size.rows), int(size.columns)
}

const timelineLong = `Read the files that CHORUS_TIMELINE or package timeline has recorded.

Set CHORUS_TIMELINE to a directory before the job starts. Each process then writes one file
there: when its streams ran kernels, copies, collectives and graphs, what the host waited for,
the events of the allocator, and nvtx ranges. Copy the files of all hosts into one directory.
Processes of a host share a clock. The clocks of hosts are compared by the ends of their common
collectives, so a shift of some microseconds between hosts remains.`

func newTimelineCommand() *cobra.Command {
	c := parentCommand("timeline", "Merge and summarize recorded timelines of all ranks")
	c.Long = timelineLong
	c.AddCommand(newTimelineMergeCommand(), newTimelineSummaryCommand())
	return c
}

func newTimelineMergeCommand() *cobra.Command {
	var out string
	c := &cobra.Command{
		Use:   "merge [flags] directory",
		Short: "Write one file with the timelines of all ranks for Perfetto",
		Long: `Write one file with the timelines of all ranks, in Chrome's JSON format. Open it in
https://ui.perfetto.dev. Each rank is a process and each stream a thread. Arrows lead from the
rank that arrived last in a collective to the other ranks, and from sends to receives.`,
		Example: "  CHORUS_TIMELINE=timeline chorus run -- ./train\n  chorus timeline merge timeline -o trace.json",
		RunE: func(c *cobra.Command, args []string) error {
			job, err := loadTimeline(c, args)
			if err != nil {
				return err
			}
			f, err := safe.Create(out)
			if err != nil {
				return fmt.Errorf("timeline: merge: %w", err)
			}
			w := bufio.NewWriter(f)
			if err := errors.Join(job.WriteTrace(w), w.Flush(), f.Close()); err != nil {
				return fmt.Errorf("timeline: merge: %w", err)
			}
			fmt.Fprintf(c.OutOrStdout(), "%s has the timelines of %d ranks: open it in https://ui.perfetto.dev\n", out, len(job.Ranks))
			if note := job.UnreadNote(); note != "" {
				fmt.Fprintln(c.OutOrStdout(), note)
			}
			return nil
		},
	}
	c.Flags().StringVarP(&out, "output", "o", "trace.json", "file to write")
	return c
}

func newTimelineSummaryCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "summary [flags] directory",
		Short: "Print how much of the communication is hidden behind kernels",
		Long: `Print shares of the time for each rank and each step:
  compute        kernels, copies or fills ran
  communication  collectives, sends or receives ran
  exposed        communication ran and nothing else
  overlap        both ran
  gaps           nothing ran

It also says how often each rank arrived last at a collective, and how long the others waited only
for this rank. The last rank is the one on whose stream the collective takes the shortest time, so
that the clocks of hosts do not matter.

Steps are nvtx ranges whose names begin with "step". If there are none, a step lasts from one
launch of a graph to the next. A range is a time of the host: end it after a wait for the device.
On CUDA a graph counts as compute, because its operations are not recorded one by one.`,
		Example: "  chorus timeline summary timeline",
		RunE: func(c *cobra.Command, args []string) error {
			job, err := loadTimeline(c, args)
			if err != nil {
				return err
			}
			if s := job.Summarize(); asJSON {
				return encode(c.OutOrStdout(), s)
			} else {
				return s.WriteText(c.OutOrStdout())
			}
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "report in JSON")
	return c
}

func loadTimeline(c *cobra.Command, args []string) (*analyze.Timeline, error) {
	if len(args) != 1 {
		return nil, usageError(c, errors.New("want one directory"))
	}
	if info, err := os.Stat(args[0]); err == nil && !info.IsDir() {
		return nil, usageError(c, fmt.Errorf("%s is not a directory", args[0]))
	}
	return analyze.LoadTimeline(args[0])
}

const analyzeLong = `Find the rank or the hardware that made a job hang, from the flight recorders of all ranks.

Set CHORUS_NCCL_TRACE_FILE to a prefix, such as /shared/trace-, before the job starts. Each
process then writes its recorders to a file when an operation times out or the job loses a
process. Copy the files of all hosts into one folder. PyTorch's dumps (TORCH_FR_DUMP_TEMP_FILE)
are accepted too, as pickles or JSON. So is the output of ncclras --format=json (NCCL 2.28.7 and
newer), in which running jobs may have unequal counts. Files may be compressed by gzip or zstd.

PyTorch's dumps do not contain their rank. It is taken from the name, if that has the rank as in
nccl_trace_rank_0, else from the sends and receives in the file, or because no other file has it.
--rank-pattern finds it in any other path, by the first group in parentheses. A verdict names
the file if its rank is not known. Files of several jobs in one folder are told apart by their
groups and by their names.

The command compares the operations of the ranks in each group: the operation, type, size,
reduction and root. Then it finds the ranks that other ranks wait for. The first paragraph of the
output is the verdict, with how sure it is and why it may be wrong. Other findings and a table of each group follow. A state is what the process
observed before it wrote the file: an operation that is not known to have completed may have
completed. Remove the files of earlier runs first.

The exit code is 0 if there is no difference, 1 if there is a finding, and 64 for a mistake in
the command line.`

func newAnalyzeCommand() *cobra.Command {
	var asJSON bool
	var pattern string
	c := &cobra.Command{
		Use:     "analyze [flags] path...",
		Short:   "Find the cause of a hang in the flight recorders of all ranks",
		Long:    analyzeLong,
		Example: "  chorus analyze traces/\n  chorus analyze --json trace-0 trace-1 trace-2\n  chorus analyze --rank-pattern 'node([0-9]+)/' dumps/node*/dump.pickle.zst",
		RunE: func(c *cobra.Command, paths []string) error {
			if len(paths) == 0 {
				return usageError(c, errors.New("no file or folder given"))
			}
			ranks, err := rankPattern(pattern)
			if err != nil {
				return usageError(c, err)
			}
			job, err := analyze.Load(paths, ranks)
			if err != nil {
				return err
			}
			r := job.Analyze()
			if asJSON {
				err = encode(c.OutOrStdout(), r)
			} else {
				err = r.WriteText(c.OutOrStdout())
			}
			if err == nil && r.Kind != analyze.KindNone {
				return errDifferent
			}
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "report in JSON")
	c.Flags().StringVar(&pattern, "rank-pattern", "", "regular expression whose first group is the rank in the path of a PyTorch dump")
	return c
}

// rankPattern compiles the flag; "" means none.
func rankPattern(text string) (*regexp.Regexp, error) {
	if text == "" {
		return nil, nil
	}
	re, err := regexp.Compile(text)
	if err == nil && re.NumSubexp() < 1 {
		err = errors.New("it has no group in parentheses, which stands for the rank")
	}
	if err != nil {
		return nil, fmt.Errorf("--rank-pattern %q: %w", text, err)
	}
	return re, nil
}
