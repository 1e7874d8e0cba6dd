package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/job"
)

// A child is one worker's process.
type child struct {
	local, rank int
	rankNow     func() int    // by the coordinator; -1: not a member of the epoch
	shown       atomic.Int64  // the last rank that rankNow has returned, or -1
	late        bool          // it comes to a job that is running, so its rank is decided later
	again       int           // how often workers with this local rank were started before
	logs        [2]*os.File   // of stdout and stderr, or nil
	env         []string      // in addition to the environment of all workers
	known       chan struct{} // closed when the guardian knows it; no output appears earlier
	cmd         *exec.Cmd
	pid         int
	start       time.Time
	took        time.Duration // valid after exit
	state       *os.ProcessState
	why         string // how it exited; valid after exit
	running     bool
	stopped     bool // it was running when the launcher began to stop the job
	killed      bool // by the launcher
	killedWhy   string
	counted     bool // by Config.Exited
}

// name returns the name of the worker at the start of a line.
func (c *child) name() string {
	if r := c.rankNow(); r >= 0 {
		c.shown.Store(int64(r))
	}
	if r := c.shown.Load(); r >= 0 {
		return fmt.Sprintf("rank %d", r)
	}
	return fmt.Sprintf("new %d", c.local)
}

// logName returns the name of the worker's log files, without their extension. The rank of a worker that comes to a running job is
// not known yet, or the one of its predecessor, so the name has the host, because hosts may share the folder.
func (c *child) logName(host string) string {
	name := fmt.Sprintf("rank-%d", c.rank)
	if c.late {
		name = fmt.Sprintf("new-%s-%d", fileName(host), c.local)
	}
	if c.again > 0 {
		name += fmt.Sprintf(".restart-%d", c.again)
	}
	return name
}

// startChild starts a worker and sends it on ended when it exits. The kernel
// kills the worker when the *thread* that started it exits (golang/go#27505), so
// a goroutine stays locked to this thread until the worker has exited.
func startChild(c *child, ended chan<- *child) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c.start = time.Now()
		err := startAwaited(c.cmd)
		if err == nil {
			c.pid, c.running = c.cmd.Process.Pid, true
		}
		started <- err
		if err != nil {
			return
		}
		waitAwaited(c.cmd)
		ended <- c
	}()
	return <-started
}

// command builds the command of a worker in a new process group. A signal to the
// group also reaches the worker's children, and signals of the terminal do not
// arrive twice.
func command(path string, args, environ []string, stdout, stderr *os.File) *exec.Cmd {
	return &exec.Cmd{
		Path: path, Args: args, Env: environ, Stdout: stdout, Stderr: stderr,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
}

// finish records the exit of a child. Only the supervising goroutine calls it.
func (c *child) finish() {
	if r := c.rankNow(); r >= 0 {
		c.rank = r
	}
	c.state, c.took, c.running = c.cmd.ProcessState, time.Since(c.start), false
}

// code returns the child's exit code in the shell's convention.
func (c *child) code() int {
	ws, ok := c.state.Sys().(syscall.WaitStatus)
	if ok && ws.Signaled() {
		return exitSignalOffset + int(ws.Signal())
	}
	return c.state.ExitCode()
}

// failedAlone reports whether the child has failed by itself, and so was lost. A child that was silent
// may exit because it was given up.
func (c *child) failedAlone(lost *job.MemberLostError) bool {
	return lost.Closed && c.state != nil && !c.stopped && !c.killed && c.code() != 0
}

// exit returns the reason for Config.Exited, where first says that no other
// failure explains this one.
func (c *child) exit(first bool) string {
	switch {
	case c.code() == 0:
		return "ok"
	case c.stopped || !first && !c.killed:
		return "stopped"
	case c.killed:
		return "killed"
	case c.code() >= exitSignalOffset && c.state.ExitCode() < 0:
		return "signal"
	}
	return "code"
}

// reason describes how the child exited, with what ooms knows about a SIGKILL.
func (c *child) reason(ooms *oomWatch) string {
	ws, ok := c.state.Sys().(syscall.WaitStatus)
	if !ok || !ws.Signaled() {
		return fmt.Sprintf("exited with code %d", c.state.ExitCode())
	}
	text := "killed by " + signalName(ws.Signal())
	switch {
	case c.killed && ws.Signal() == syscall.SIGKILL:
		text += " (by the launcher, " + c.killedWhy + ")"
	case ws.Signal() == syscall.SIGKILL:
		text += " (" + ooms.explain() + ")"
	}
	return text
}

// killedBecause records why the launcher kills the child, unless a reason is
// recorded already.
func (c *child) killedBecause(why string) {
	if !c.killed {
		c.killed, c.killedWhy = true, why
	}
}

// signal sends sig to the child's process group.
func (c *child) signal(sig syscall.Signal) {
	if !c.running {
		return
	}
	if err := syscall.Kill(-c.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		_ = syscall.Kill(c.pid, sig) // the group does not exist yet or belongs to another process
	}
}

var signalNames = map[syscall.Signal]string{
	syscall.SIGHUP: "SIGHUP", syscall.SIGINT: "SIGINT", syscall.SIGQUIT: "SIGQUIT", syscall.SIGILL: "SIGILL",
	syscall.SIGTRAP: "SIGTRAP", syscall.SIGABRT: "SIGABRT", syscall.SIGBUS: "SIGBUS", syscall.SIGFPE: "SIGFPE",
	syscall.SIGKILL: "SIGKILL", syscall.SIGUSR1: "SIGUSR1", syscall.SIGSEGV: "SIGSEGV", syscall.SIGUSR2: "SIGUSR2",
	syscall.SIGPIPE: "SIGPIPE", syscall.SIGALRM: "SIGALRM", syscall.SIGTERM: "SIGTERM", syscall.SIGXCPU: "SIGXCPU",
	syscall.SIGXFSZ: "SIGXFSZ", syscall.SIGSYS: "SIGSYS",
}

func signalName(s syscall.Signal) string {
	if n, ok := signalNames[s]; ok {
		return n
	}
	return fmt.Sprintf("signal %d", int(s))
}
