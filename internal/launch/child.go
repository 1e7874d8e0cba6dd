package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// A child is one worker's process.
type child struct {
	local, rank int
	cmd         *exec.Cmd
	pid         int
	start       time.Time
	took        time.Duration // once it has ended
	state       *os.ProcessState
	running     bool
	stopped     bool // it ran when the launcher began to stop the job
	killed      bool // by the launcher, since it had not stopped
}

// startChild starts a worker and reports its end on ended. The kernel kills the
// worker when the *thread* that started it ends (golang/go#27505), so one
// goroutine keeps its thread from before the start until the end.
func startChild(c *child, ended chan<- *child) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c.start = time.Now()
		err := c.cmd.Start()
		if err == nil {
			c.pid, c.running = c.cmd.Process.Pid, true
		}
		started <- err
		if err != nil {
			return
		}
		// The error says what ProcessState does.
		_ = c.cmd.Wait()
		ended <- c
	}()
	return <-started
}

// command makes the command of a worker in a process group of its own: signals
// reach its children, too, and the terminal's do not reach it twice.
func command(path string, args, environ []string, stdout, stderr *os.File) *exec.Cmd {
	return &exec.Cmd{
		Path: path, Args: args, Env: environ, Stdout: stdout, Stderr: stderr,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
}

// finish notes the end of a child. Only the goroutine that supervises calls it.
func (c *child) finish() {
	c.state, c.took, c.running = c.cmd.ProcessState, time.Since(c.start), false
}

// code is the child's exit code as a shell shows it.
func (c *child) code() int {
	ws, ok := c.state.Sys().(syscall.WaitStatus)
	if ok && ws.Signaled() {
		return exitSignalOffset + int(ws.Signal())
	}
	return c.state.ExitCode()
}

// reason says how the child ended.
func (c *child) reason() string {
	ws, ok := c.state.Sys().(syscall.WaitStatus)
	if !ok || !ws.Signaled() {
		return fmt.Sprintf("exited with code %d", c.state.ExitCode())
	}
	text := "killed by " + signalName(ws.Signal())
	switch {
	case c.killed:
		text += " (by the launcher, after its grace)"
	case ws.Signal() == syscall.SIGKILL:
		text += " (perhaps out of memory)"
	}
	return text
}

// signal sends sig to the child's process group.
func (c *child) signal(sig syscall.Signal) {
	if !c.running {
		return
	}
	if err := syscall.Kill(-c.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		_ = syscall.Kill(c.pid, sig) // the group is not there yet or not ours
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
