package launch

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/safe"
)

// Devices describes the devices of this host. Each worker gets one.
type Devices struct {
	Count   int
	Backend string   // "cuda" or "virtual"
	Note    string   // one line for the user, or ""
	Env     []string // NAME=value that workers need to find the same devices
}

// Config describes the workers to start.
type Config struct {
	// Program is the program and its arguments.
	Program []string
	// Procs is the number of workers on this host; 0 means one for each device.
	Procs int
	// Devices are the devices of this host.
	Devices Devices
	// Cluster describes the job. Run sets LocalSize and Notify.
	Cluster job.Config
	// Grace is the time from the loss of a worker until the others are asked to
	// stop. Until then they can report and exit. After the same time again, they
	// are killed. 0 means 10 s.
	Grace time.Duration
	// NoPrefix omits the prefix "[rank 2] " of each line.
	NoPrefix bool
	// Raw copies lines byte for byte. Otherwise control characters are quoted.
	Raw bool
	// JSON writes the launcher's own lines as JSON objects, with the names of log/slog for time, level and
	// text, and the job, the host and the rank.
	JSON bool
	// LogDir receives a copy of each rank's output in <LogDir>/<job>/rank-<n>.out
	// and .err, and in rank-<n>.restart-<k>.out and .err after restart k. In a job whose
	// program calls cluster.Run, a worker that comes later has new-<host>-<local rank>
	// instead of rank-<n>. A slash in the name of the job or host is written as %2F. A file
	// that another running launcher writes is an error. If LogDir is empty, no copy is written.
	LogDir string
	// Stdout and Stderr receive the workers' output. Stderr also receives messages. They may be the
	// same writer, which then gets one call at a time.
	Stdout, Stderr io.Writer
	// Joined is called when all hosts have joined. Run calls its result before the agent is
	// closed. Joined may be nil.
	Joined func(*job.Agent) (leave func())
	// Exited is called for each worker that has ended. Its reason is "ok", "code" (another exit code than
	// 0), "signal", "killed" or "stopped". A worker is killed by the launcher because it did not answer or its
	// host is excluded, and stopped with the job or after another worker had failed. A failure is counted
	// when it is known whether it is the first one. It may be nil.
	Exited func(reason string)
	// Restarted is called for each worker that was started again. It may be nil.
	Restarted func()
	// Signals delivers the signals that the process receives.
	Signals <-chan os.Signal
}

// Exit codes of Run, besides the workers' exit codes and 128+n for signal n.
const (
	ExitFailed       = 1   // a worker or host was lost without an exit code, or the launcher failed
	ExitUsage        = 64  // mistake in the command line, or command lines of the hosts differ
	ExitUnavailable  = 69  // some hosts of the job did not join in time
	ExitAuth         = 77  // the seeds have another secret or another job
	ExitNotRunnable  = 126 // the program exists and cannot be executed
	ExitNotFound     = 127 // the program does not exist
	exitSignalOffset = 128
)

const defaultGrace = 10 * time.Second

// A UsageError is a mistake in the command line.
type UsageError struct{ Reason string }

func (e *UsageError) Error() string { return e.Reason }

// complete validates the config and fills in defaults.
func (cfg *Config) complete() (Config, error) {
	c := *cfg
	if len(c.Program) == 0 {
		return c, &UsageError{"no program: write it after --"}
	}
	if c.Grace == 0 {
		c.Grace = defaultGrace
	}
	if c.Grace < 0 {
		return c, &UsageError{fmt.Sprintf("the grace period is %v: want more than 0 (--grace or %s)", c.Grace, env.Grace.Name)}
	}
	if c.Procs < 0 {
		return c, &UsageError{fmt.Sprintf("%d processes: want 0 or more", c.Procs)}
	}
	if c.Procs == 0 {
		c.Procs = c.Devices.Count
	}
	if c.Procs == 0 {
		return c, &UsageError{"this host has no device, so there is no process to start"}
	}
	if c.Procs > c.Devices.Count && (env.ShareGPUs.Value() != "yes" || c.Devices.Count == 0) {
		return c, &UsageError{fmt.Sprintf("%d processes on the %d %s devices of this host: two ranks cannot share a device; use --nproc-per-node %d or fewer, or %s=yes for tests",
			c.Procs, c.Devices.Count, c.Devices.Backend, c.Devices.Count, env.ShareGPUs.Name)}
	}
	c.Cluster.LocalSize = c.Procs
	c.oneAtATime()
	return c, nil
}

// Log writes one line of the launcher itself to cfg.Stderr. The level is
// "INFO", "WARN" or "ERROR", and rank is the rank that the line is about, or
// nil. The caller makes sure that lines do not mix.
func (cfg *Config) Log(level string, rank *int, text string) {
	text = safe.Lines(text)
	if !cfg.JSON {
		fmt.Fprintf(cfg.Stderr, "chorus: %s\n", text)
		return
	}
	if warning, ok := strings.CutPrefix(text, "warning: "); ok {
		level, text = "WARN", warning
	}
	host := cmp.Or(cfg.Cluster.Host, env.HostName.Value())
	if host == "" {
		host, _ = os.Hostname() // "" is the best that is known
	}
	attrs := []slog.Attr{slog.String("job", cfg.Cluster.Job), slog.String("host", host)}
	if rank != nil {
		attrs = append(attrs, slog.Int("rank", *rank))
	}
	var l slog.Level
	_ = l.UnmarshalText([]byte(level)) // the level of the caller is one of slog's
	slog.New(slog.NewJSONHandler(cfg.Stderr, nil)).LogAttrs(context.Background(), l, text, attrs...)
}

// program returns the path of the program's file.
func program(name string) (path string, code int, err error) {
	path, err = exec.LookPath(name)
	switch {
	case err == nil:
		return path, 0, nil
	case errors.Is(err, os.ErrPermission):
		return "", ExitNotRunnable, fmt.Errorf("cannot run %s: no permission to execute it", name)
	case errors.Is(err, syscall.EISDIR):
		return "", ExitNotRunnable, fmt.Errorf("cannot run %s: it is a directory", name)
	case errors.Is(err, exec.ErrDot):
		return "", ExitNotRunnable, fmt.Errorf("cannot run %s from the current directory: write ./%[1]s", name)
	}
	return "", ExitNotFound, fmt.Errorf("cannot find the program %s", name)
}

// whyNot explains why an existing program did not start. If the interpreter of a
// script is missing, the kernel only reports that "the file does not exist".
func whyNot(path string, err error) error {
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, openErr := safe.Open(path)
	if openErr != nil {
		return err
	}
	defer f.Close()
	line, _ := bufio.NewReaderSize(f, 512).ReadSlice('\n') // for a binary, arbitrary bytes
	if rest, script := bytes.CutPrefix(line, []byte("#!")); script {
		if words := bytes.Fields(rest); len(words) > 0 {
			return fmt.Errorf("%s: the interpreter %s of the script does not exist", path, words[0])
		}
	}
	return fmt.Errorf("%w: possibly the dynamic loader that the program was built for is missing", err)
}

// workerEnv returns the environment of worker number local: the launcher's
// environment, overridden by the variables of the devices and of the job.
func (cfg *Config) workerEnv(a *job.Agent, local int) []string {
	vars := append(os.Environ(), cfg.Devices.Env...)
	if _, set := os.LookupEnv("OMP_NUM_THREADS"); !set && cfg.Procs > 1 {
		// Like torchrun: otherwise a library in each process would start a thread
		// for every core of the machine.
		vars = append(vars, "OMP_NUM_THREADS=1")
	}
	vars = append(vars, env.Launcher.Name+"=chorus")
	return append(vars, a.WorkerEnv(local)...)
}
