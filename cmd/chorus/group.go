package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/internal/launch"
)

// interruptibleJSON is interruptible for a command whose output is one JSON value if asJSON is set: if
// the command fails before it has written anything, the output is an object with the error.
func interruptibleJSON(c *cobra.Command, asJSON bool, run func(ctx context.Context, out io.Writer) error) error {
	return interruptible(c, func(ctx context.Context, out io.Writer) error {
		counted := &countingWriter{out: out}
		err := run(ctx, counted)
		if err != nil && asJSON && counted.n == 0 {
			err = errors.Join(err, encode(out, struct {
				Error string `json:"error"`
			}{err.Error()}))
		}
		return err
	})
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
		dev, err := groups.OpenLocal(sys, m.LocalRank(), m.LocalSize())
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
