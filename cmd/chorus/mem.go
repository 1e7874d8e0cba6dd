package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/internal/launch"
)

func newMemCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "mem",
		Short: "Analyze the allocation of device memory",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return &launch.UsageError{Reason: fmt.Sprintf("unknown command %q; see %s --help", args[0], c.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newReplayCommand(), newLedgerCommand())
	return c
}
