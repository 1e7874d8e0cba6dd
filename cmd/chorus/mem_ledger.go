package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
)

const ledgerLong = `Show what uses the device memory of each rank of a job that chorus run has started. The uses
are buffers, pools, graphs, the cache of the allocator, Chorus kernels, NCCL, and the rest.
memory.Ledger computes the values in the process of the rank. Memory of other processes
is in the rest.

The command finds the job as chorus status does.`

func newLedgerCommand() *cobra.Command {
	var job string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ledger [flags]",
		Short: "Show what uses the device memory of the ranks of a running job",
		Long:  ledgerLong,
		Example: `  chorus mem ledger
  chorus mem ledger --job mnist --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return interruptible(cmd, func(ctx context.Context, out io.Writer) error { return printLedger(ctx, out, job, asJSON) })
		},
	}
	cmd.Flags().StringVar(&job, "job", "", "name of the job, if several jobs run on this host")
	cmd.Flags().BoolVar(&asJSON, "json", false, "output in JSON: the devices of each rank")
	return cmd
}

func printLedger(ctx context.Context, out io.Writer, job string, asJSON bool) error {
	_, j, err := monitor.Find(ctx, job)
	if err != nil {
		return err
	}
	if asJSON {
		return encode(out, j.Ranks)
	}
	return j.PrintMemory(out)
}
