package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
	"github.com/gochorus/chorus/internal/plain"
)

const statusLong = `Show the state of a job that chorus run has started: its epoch and hosts, and for each
rank the progress of its collectives, the operation in flight and its age, memory and GPU
sensors. Ranks that are behind come first, with the time since they are behind.

The command runs on any host of the job, as the user of the job or as root, and in the same
container. It talks to chorus run through a Unix socket, so it needs no secret. It also works
if the job hangs: a process that does not answer within a second is listed as silent.

A rate is the average between two readings. A completed collective may be shown as
in flight for up to a second if the driver does not answer.`

type statusFlags struct {
	job           string
	watch, asJSON bool
}

func newStatusCommand() *cobra.Command {
	var f statusFlags
	cmd := &cobra.Command{
		Use:   "status [flags]",
		Short: "Show the progress of a running job, and which rank is behind",
		Long:  statusLong,
		Example: `  chorus status
  chorus status --watch
  chorus status --job mnist --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case f.watch && f.asJSON:
				return usageError(cmd, errors.New("--watch and --json exclude each other"))
			case f.watch && !isTerminal(os.Stdout):
				return usageError(cmd, errors.New("--watch needs a terminal as its output"))
			}
			return interruptible(cmd, f.run)
		},
	}
	cmd.Flags().StringVar(&f.job, "job", "", "name of the job, if several jobs run on this host")
	cmd.Flags().BoolVar(&f.watch, "watch", false, "output that is renewed each second, until Ctrl-C")
	cmd.Flags().BoolVar(&f.asJSON, "json", false, "output in JSON")
	return cmd
}

func (f *statusFlags) run(ctx context.Context, out io.Writer) error {
	client, j, err := monitor.Find(ctx, f.job)
	if err != nil {
		return err
	}
	if f.watch {
		return watch(ctx, client, j)
	}
	if j.Interval == 0 { // the first reading of the job has no rates
		if next, err := client.Next(ctx, 0); err == nil {
			j = next
		}
	}
	if f.asJSON {
		return encode(out, j)
	}
	return j.Print(out, 0)
}

// Control sequences of terminals: they show and hide the other screen, move to its start, and
// clear the rest of a line or of the screen.
const (
	enterScreen, leaveScreen = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
	screenStart              = "\x1b[H"
	clearLine, clearRest     = "\x1b[K", "\x1b[J"
)

// watch shows the state each second until ctx or the job ends.
func watch(ctx context.Context, client *monitor.Client, j *monitor.Job) (err error) {
	fmt.Print(enterScreen)
	defer func() {
		fmt.Print(leaveScreen)
		if err == nil {
			fmt.Printf("job %s has ended\n", plain.Text(j.Job))
		}
	}()
	for {
		rows, columns := terminalSize(os.Stdout)
		var text strings.Builder
		if err := j.Print(&text, rows-1); err != nil {
			return err
		}
		fmt.Print(frame(text.String(), columns))
		next, err := client.Next(ctx, time.Second)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			if _, _, gone := monitor.Find(ctx, j.Job); gone != nil {
				return ctx.Err()
			}
			continue
		}
		j = next
	}
}

// frame returns the text for the whole screen. Long lines are cut, so that they take one row.
func frame(text string, columns int) string {
	var b strings.Builder
	b.WriteString(screenStart)
	for line := range strings.Lines(text) {
		r := []rune(plain.Text(strings.TrimSuffix(line, "\n")))
		b.WriteString(string(r[:min(len(r), columns)]) + clearLine + "\r\n")
	}
	return b.String() + clearRest
}

// terminalSize returns the size of a terminal, or a usual one if it is not known.
func terminalSize(f *os.File) (rows, columns int) {
	var size struct{ rows, columns, x, y uint16 }
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), syscall.TIOCGWINSZ, uintptr(unsafe.Pointer(&size)))
	if errno != 0 || size.rows < 2 || size.columns == 0 {
		return 24, 80
	}
	return int(size.rows), int(size.columns)
}
