package main

import "github.com/spf13/cobra"

func newMemCommand() *cobra.Command {
	c := parentCommand("mem", "Analyze the use of device memory")
	c.AddCommand(newReplayCommand(), newLedgerCommand())
	return c
}
