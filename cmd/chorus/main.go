// Command chorus starts jobs on GPUs and inspects and measures machines; see chorus help.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/safe"
)

// commands construct the subcommands, in the order that the help shows.
var commands = []func() *cobra.Command{
	newRunCommand,
	newStatusCommand,
	newInfoCommand,
	newDoctorCommand,
	newPreflightCommand,
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
	out := &countingWriter{out: safe.NewWriter(os.Stdout)} // file and host names may contain control characters
	root.SetOut(out)
	command, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	if out.n == 0 && printsJSON(command) {
		_ = encode(out, struct {
			Error string `json:"error"`
		}{safe.Lines(err.Error())})
	}
	var code exitCode
	if errors.As(err, &code) { // the command has printed the reason
		return int(code)
	}
	fmt.Fprintf(os.Stderr, "chorus: %s\n", safe.Lines(err.Error()))
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
	if _, bad := errors.AsType[settingError](err); bad {
		return exitSetting
	}
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
	strict(root)
	return root
}

// strict lets cobra's own commands, help and completion, refuse what they do not know. Cobra prints
// a page of help instead, and such a mistake in a script looks like success.
func strict(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "help":
			c.Args = func(c *cobra.Command, args []string) error {
				if topic, rest, err := root.Find(args); err != nil || topic == nil || len(rest) > 0 {
					return usageError(root, fmt.Errorf("unknown command %q", strings.Join(args, " ")))
				}
				return nil
			}
		case "completion":
			parent := parentCommand("", "")
			c.Args, c.RunE = parent.Args, parent.RunE
			for _, shell := range c.Commands() {
				shell.Args = noArgs
			}
		}
	}
}

// parentCommand returns a command that only has subcommands, so that using it
// alone is a mistake.
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

// interruptible calls run with a context that SIGINT and SIGTERM cancel. If run then fails, the
// exit code is the one of a shell, such as 130 for SIGINT. A second signal ends the process.
func interruptible(c *cobra.Command, run func(ctx context.Context, out io.Writer) error) error {
	ctx, cancel := context.WithCancelCause(c.Context())
	defer cancel(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	go func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			cancel(interruption{s.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	err := run(ctx, c.OutOrStdout())
	i, interrupted := errors.AsType[interruption](context.Cause(ctx))
	if err == nil || !interrupted {
		return err
	}
	fmt.Fprintf(os.Stderr, "chorus: %v\n", i)
	return exitCode(128 + int(i.signal))
}

// An interruption is the cause of a context that a signal has ended.
type interruption struct{ signal syscall.Signal }

func (i interruption) Error() string {
	return "interrupted by " + map[syscall.Signal]string{syscall.SIGINT: "SIGINT", syscall.SIGTERM: "SIGTERM"}[i.signal]
}

// A member is this process in its job, for commands that use GPUs together. Close leaves the
// job at once.
type member struct {
	*cluster.Session
	devs []*device.Device // of this process
	note string           // about the devices, to print; or ""
}

// attach joins the job and finds the devices of this process. In a job of several processes
// that is the device of its local rank. Otherwise these are the first gpus devices of this
// machine, or all devices if gpus is 0.
func attach(ctx context.Context, gpus int) (*member, error) {
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return nil, err
	}
	m := &member{Session: sess}
	if err := m.find(gpus); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func (m *member) find(gpus int) error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	m.devs, m.note = sys.Devices(), note
	switch {
	case m.Size() > 1 && gpus > 1:
		return &launch.UsageError{Reason: fmt.Sprintf("-g %d in a job of %d processes: each has one GPU; leave -g out", gpus, m.Size())}
	case m.Size() > 1:
		dev, err := route.OpenLocal(sys, m.LocalRank(), m.LocalSize())
		m.devs = []*device.Device{dev}
		return err
	case gpus > len(m.devs):
		return &launch.UsageError{Reason: fmt.Sprintf("-g %d: this machine has %d devices", gpus, len(m.devs))}
	case gpus > 0:
		m.devs = m.devs[:gpus]
	}
	return nil
}

// isFirst reports whether the process has rank 0, which prints.
func (m *member) isFirst() bool { return m.Rank() == 0 }

// printNote prints the note about the devices on rank 0.
func (m *member) printNote(command string) {
	if m.isFirst() && m.note != "" {
		fmt.Fprintf(os.Stderr, "chorus: %s: %s\n", command, m.note)
	}
}

// group creates the group of the devices of all processes.
func (m *member) group(ctx context.Context, cfg *comm.Config) (*comm.Group, error) {
	if m.Size() > 1 {
		return comm.Join(ctx, m.Session, m.devs[0], cfg)
	}
	return comm.Local(ctx, m.devs, cfg)
}

// leave shuts the group down and leaves the job, together with the other processes.
func (m *member) leave(ctx context.Context, g *comm.Group) error {
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	return m.Shutdown(ctx)
}

// A lateFile keeps its old content until the first write, so a measurement that
// fails early does not erase earlier results.
type lateFile struct {
	file  *os.File
	begun bool
}

// createLate opens a file and creates it if it does not exist.
func createLate(name string) (io.WriteCloser, error) {
	file, err := safe.Keep(name)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	// Only regular files have old content: a pipe or a terminal cannot be truncated.
	return &lateFile{file, !info.Mode().IsRegular()}, nil
}

func (f *lateFile) Write(p []byte) (int, error) {
	if !f.begun {
		if err := f.file.Truncate(0); err != nil {
			return 0, err
		}
		f.begun = true
	}
	return f.file.Write(p)
}

func (f *lateFile) Close() error { return f.file.Close() }
