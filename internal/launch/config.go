package launch

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safefile"
)

// Devices says what this host has to give to workers, one device to each.
type Devices struct {
	Count   int
	Backend string   // "cuda" or "virtual"
	Note    string   // one line for the user, or ""
	Env     []string // NAME=value that workers need to find the same devices
}

// Config says what to run.
type Config struct {
	// Program is the program and its arguments.
	Program []string
	// Procs is how many workers this host has; 0 means one for each device.
	Procs int
	// Devices are this host's.
	Devices Devices
	// Cluster describes the job. LocalSize and Notify are set here.
	Cluster cluster.Config
	// Grace is how long workers have to end by themselves and say what they know when one
	// was lost, before they are asked to, and from then until they are killed; 0 means 10 s.
	Grace time.Duration
	// NoPrefix writes lines without "[rank 2] ".
	NoPrefix bool
	// Raw writes lines byte for byte. Without it, control characters are quoted.
	Raw bool
	// LogDir also gets each rank's output, in <LogDir>/<job>/rank-<n>.out and
	// .err; empty means none.
	LogDir string
	// Stdout and Stderr get the workers' output, and Stderr messages, too.
	Stdout, Stderr io.Writer
	// Signals are those that the process receives.
	Signals <-chan os.Signal
}

// Exit codes of Run, beside those of the workers and 128+n for signal n.
const (
	ExitFailed       = 1   // a worker or host was lost without an exit code, or the launcher failed
	ExitUsage        = 64  // the command line, what it asks for, or hosts that disagree
	ExitUnavailable  = 69  // the hosts of the job did not all come in time
	ExitAuth         = 77  // another secret, or another job
	ExitNotRunnable  = 126 // the program is there and cannot be run
	ExitNotFound     = 127 // the program is not there
	exitSignalOffset = 128
)

const defaultGrace = 10 * time.Second

// A UsageError is a mistake in what was asked for.
type UsageError struct{ Reason string }

func (e *UsageError) Error() string { return e.Reason }

// complete checks the config and fills in defaults.
func (cfg *Config) complete() (Config, error) {
	c := *cfg
	if len(c.Program) == 0 {
		return c, &UsageError{"no program: write it after --"}
	}
	if c.Grace == 0 {
		c.Grace = defaultGrace
	}
	if c.Grace < 0 || c.Procs < 0 {
		return c, &UsageError{fmt.Sprintf("%d processes with a grace of %v: want neither below 0", c.Procs, c.Grace)}
	}
	if c.Procs == 0 {
		c.Procs = c.Devices.Count
	}
	if c.Procs == 0 {
		return c, &UsageError{"one process for each device of this host makes none: it has no device"}
	}
	if c.Procs > c.Devices.Count {
		return c, &UsageError{fmt.Sprintf("%d processes on the %d %s devices of this host: two ranks cannot share a device; use --nproc-per-node %d or fewer",
			c.Procs, c.Devices.Count, c.Devices.Backend, c.Devices.Count)}
	}
	c.Cluster.LocalSize = c.Procs
	return c, nil
}

// program finds the program's file.
func program(name string) (path string, code int, err error) {
	path, err = exec.LookPath(name)
	switch {
	case err == nil:
		return path, 0, nil
	case errors.Is(err, os.ErrPermission):
		return "", ExitNotRunnable, fmt.Errorf("cannot run %s: no permission to execute it", name)
	case errors.Is(err, exec.ErrDot):
		return "", ExitNotRunnable, fmt.Errorf("cannot run %s from the current directory: write ./%[1]s", name)
	}
	return "", ExitNotFound, fmt.Errorf("cannot find the program %s", name)
}

// whyNot explains the failure to start a program that is there: the kernel says
// of a script without its interpreter, too, that the file does not exist.
func whyNot(path string, err error) error {
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, openErr := safefile.Open(path)
	if openErr != nil {
		return err
	}
	defer f.Close()
	line, _ := bufio.NewReaderSize(f, 512).ReadSlice('\n') // of a binary, whatever comes
	if rest, script := bytes.CutPrefix(line, []byte("#!")); script {
		if words := bytes.Fields(rest); len(words) > 0 {
			return fmt.Errorf("%s: its interpreter %s does not exist", path, words[0])
		}
	}
	return fmt.Errorf("%w: perhaps the loader that the program was built for", err)
}

// workerEnv is the environment of worker number local: the launcher's own, then
// what the devices and the job need, which wins.
func (cfg *Config) workerEnv(a *cluster.Agent, local int) []string {
	vars := append(os.Environ(), cfg.Devices.Env...)
	if _, set := os.LookupEnv("OMP_NUM_THREADS"); !set && cfg.Procs > 1 {
		// As torchrun does: libraries that take every core for each of several
		// processes slow each other down.
		vars = append(vars, "OMP_NUM_THREADS=1")
	}
	vars = append(vars, env.Launcher.Name+"=chorus")
	return append(vars, a.WorkerEnv(local)...)
}
