package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/internal/analyze"
)

const analyzeLong = `Find the rank or the hardware that made a job hang, from the flight recorders of all ranks.

Set CHORUS_NCCL_TRACE_FILE to a prefix, such as /shared/trace-, before the job starts. Each
process then writes its recorders to a file when an operation times out or the job loses a
process. Copy the files of all hosts into one folder. PyTorch's dumps (TORCH_FR_DUMP_TEMP_FILE)
are accepted too, as pickles or JSON, if their names still end in the rank. So is the output of
ncclras --format=json (NCCL 2.28.7 and newer), in which running jobs may have unequal counts.

The command compares the operations of the ranks in each group: the operation, type, size,
reduction and root. Then it finds the ranks that other ranks wait for. The first paragraph of the
output is the verdict. Other findings and a table of each group follow. A state is what the process
observed before it wrote the file: an operation that is not known to have completed may have
completed. Remove the files of earlier runs first.

The exit code is 0 if there is no difference, 1 if there is a finding, and 64 for a mistake in
the command line.`

func newAnalyzeCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "analyze [flags] path...",
		Short:   "Find the cause of a hang in the flight recorders of all ranks",
		Long:    analyzeLong,
		Example: "  chorus analyze traces/\n  chorus analyze --json trace-0 trace-1 trace-2",
		RunE: func(c *cobra.Command, paths []string) error {
			if len(paths) == 0 {
				return usageError(c, errors.New("no file or folder given"))
			}
			job, err := analyze.Load(paths)
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
	return c
}
