// Command chorus starts jobs on GPUs and inspects and measures machines; see chorus help.
package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/plain"
)

// commands make the sub-commands, in the order of the help.
var commands = []func() *cobra.Command{
	newRunCommand,
	newStatusCommand,
	newInfoCommand,
	newDoctorCommand,
	newAnalyzeCommand,
	newTimelineCommand,
	newMemCommand,
	newPerfCommand,
	newTuneCommand,
	newLoadCommand,
	newCheckpointCommand,
	newVersionCommand,
}

func main() {
	launch.Guard()
	os.Exit(run(os.Args[1:]))
}

// run returns the exit code for a command line.
func run(args []string) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(plain.NewWriter(os.Stdout)) // file and host names may contain control characters
	err := root.Execute()
	if err == nil {
		return 0
	}
	var code exitCode
	if errors.As(err, &code) { // the command has printed the reason
		return int(code)
	}
	fmt.Fprintf(os.Stderr, "chorus: %s\n", plain.Lines(err.Error()))
	return codeOf(err)
}

// codeOf returns the exit code for an error that is not an exitCode.
func codeOf(err error) int {
	var usage *launch.UsageError
	if errors.As(err, &usage) {
		return launch.ExitUsage
	}
	return launch.ExitFailed
}

// An exitCode is the error of a command that has already printed the reason.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "chorus",
		Short:         "Run programs on many GPUs together",
		Version:       version(),
		SilenceErrors: true, // run prints them
		SilenceUsage:  true, // a page of usage would hide the error
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return &launch.UsageError{Reason: fmt.Sprintf("unknown command %q; see chorus help", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(usageError)
	for _, c := range commands {
		root.AddCommand(c())
	}
	return root
}

// parentCommand makes a command that only has commands. Using it alone is a mistake.
func parentCommand(use, short string) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError(c, fmt.Errorf("unknown command %q", args[0]))
			}
			var names []string
			for _, sub := range c.Commands() {
				names = append(names, sub.Name())
			}
			return usageError(c, fmt.Errorf("no command given: want %s", strings.Join(names, ", ")))
		},
	}
}

// noArgs rejects arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError(cmd, fmt.Errorf("unknown argument %q", args[0]))
	}
	return nil
}

// usageError marks an error as a mistake in the command line and names the help.
func usageError(cmd *cobra.Command, err error) error {
	return &launch.UsageError{Reason: fmt.Sprintf("%v; see %s --help", err, cmd.CommandPath())}
}
