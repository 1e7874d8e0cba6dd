package main

import "github.com/spf13/cobra"

func newMemCommand() *cobra.Command {
	c := parentCommand("mem", "Analyze the allocation of device memory")
	c.AddCommand(newReplayCommand())
	return c
}
