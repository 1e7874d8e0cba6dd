package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/timeline"
	"github.com/gochorus/chorus/internal/safefile"
)

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
			f, err := safefile.Create(out)
			if err != nil {
				return fmt.Errorf("timeline: merge: %w", err)
			}
			w := bufio.NewWriter(f)
			if err := errors.Join(job.WriteTrace(w), w.Flush(), f.Close()); err != nil {
				return fmt.Errorf("timeline: merge: %w", err)
			}
			fmt.Fprintf(c.OutOrStdout(), "%s has the timelines of %d ranks: open it in https://ui.perfetto.dev\n", out, len(job.Ranks))
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

func loadTimeline(c *cobra.Command, args []string) (*timeline.Job, error) {
	if len(args) != 1 {
		return nil, usageError(c, errors.New("want one directory"))
	}
	if info, err := os.Stat(args[0]); err == nil && !info.IsDir() {
		return nil, usageError(c, fmt.Errorf("%s is not a directory", args[0]))
	}
	return timeline.Load(args[0])
}
