// Command chorus starts jobs on GPUs and inspects and measures machines; see chorus help.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	out := &countingWriter{out: plain.NewWriter(os.Stdout)} // file and host names may contain control characters
	root.SetOut(out)
	command, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	if out.n == 0 && printsJSON(command) {
		_ = encode(out, struct {
			Error string `json:"error"`
		}{plain.Lines(err.Error())})
	}
	var code exitCode
	if errors.As(err, &code) { // the command has printed the reason
		return int(code)
	}
	fmt.Fprintf(os.Stderr, "chorus: %s\n", plain.Lines(err.Error()))
	return codeOf(err)
}

// printsJSON reports whether the output of a command is one JSON value. If such a command fails before it has written anything,
// its output is an object with the error, so that programs can read the output of each command.
func printsJSON(c *cobra.Command) bool {
	yes, err := c.Flags().GetBool("json")
	return err == nil && yes
}

// A countingWriter counts the bytes that it passes on.
type countingWriter struct {
	out io.Writer
	n   int
}

func (w *countingWriter) Write(b []byte) (int, error) {
	n, err := w.out.Write(b)
	w.n += n
	return n, err
}

// encode writes the report of a command in JSON.
func encode(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
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
