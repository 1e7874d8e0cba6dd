package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/job"
)

// prSetChildSubreaper is PR_SET_CHILD_SUBREAPER of prctl(2): orphaned
// descendants become children of this process instead of init's.
const prSetChildSubreaper = 36

// awaited are the processes that this process has started and that a goroutine waits for. All other
// children are adopted: nobody else collects them.
var awaited = struct {
	sync.Mutex // held while a process starts, and while others are collected
	pids       map[int]bool
}{pids: map[int]bool{}}

// startAwaited starts a process that the caller will wait for by waitAwaited.
func startAwaited(cmd *exec.Cmd) error {
	awaited.Lock()
	defer awaited.Unlock()
	err := cmd.Start()
	if err == nil {
		awaited.pids[cmd.Process.Pid] = true
	}
	return err
}

func waitAwaited(cmd *exec.Cmd) {
	_ = cmd.Wait() // ProcessState holds the same information as the error
	awaited.Lock()
	defer awaited.Unlock()
	delete(awaited.pids, cmd.Process.Pid)
}

func becomeReaper() {
	// Every kernel that Go supports has this option.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
}

// killLeftovers kills the remaining processes of the workers, inside and outside
// of their process groups. As the reaper, this process becomes the parent of each
// one when its own parent exits.
func killLeftovers() {
	awaited.Lock()
	defer awaited.Unlock()
	for range 100 {
		left := adopted(awaited.pids)
		if len(left) == 0 {
			return
		}
		for _, p := range left {
			_ = syscall.Kill(p.pid, syscall.SIGKILL)
		}
		for _, p := range left {
			waitFor(p.pid)
		}
	}
}

// waitFor collects a dying child. It waits at most one second, because a process
// in an uninterruptible system call may stay longer.
func waitFor(pid int) {
	for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
		if got == pid || err != nil && err != syscall.EINTR {
			return
		}
		time.Sleep(time.Millisecond) // wait4 has no timeout
	}
}

// reapDelay is the time in which the exits of several processes cost one look at all processes.
const reapDelay = 100 * time.Millisecond

// reap collects adopted processes that exit, until stop is called. Without it they would stay as
// zombies, which count against the limits of the host, until this process exits. As PID 1 of a container
// it adopts all orphans there.
func reap() (stop func()) {
	died, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(died, syscall.SIGCHLD)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			collectZombies()
			select {
			case <-died:
			case <-done:
				return
			}
			select {
			case <-time.After(reapDelay):
			case <-done:
				return
			}
		}
	})
	return func() {
		signal.Stop(died)
		close(done)
		wg.Wait()
	}
}

// collectZombies collects adopted processes that have exited.
func collectZombies() {
	awaited.Lock()
	defer awaited.Unlock()
	for _, p := range adopted(awaited.pids) {
		if p.zombie {
			_, _ = syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
		}
	}
}

type process struct {
	pid    int
	zombie bool
}

// adopted lists the children of this process but those in except.
func adopted(except map[int]bool) []process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	self := os.Getpid()
	var out []process
	for _, n := range names {
		pid, err := strconv.Atoi(n)
		if err != nil || except[pid] {
			continue
		}
		if p := job.ProcessOf(pid); p.Parent == self {
			out = append(out, process{pid, p.State == 'Z'})
		}
	}
	return out
}

// guardianName is argument 0 of a guardian, as ps shows it. Users do not type it.
const guardianName = "chorus: guardian"

// guarded is true if this program called Guard and can therefore start a guardian.
var guarded bool

// Guard must be the first call in main of a program that calls Run. It lets Run
// start the same program again as a guardian process. In the guardian, Guard
// does not return. If the launcher exits without dismissing the guardian, for
// example by kill -9, the guardian kills the process groups of the workers.
// (The kernel would kill only the workers, not their children.) Processes that
// left the group of their worker survive. Without Guard, Run has no guardian.
func Guard() {
	if os.Args[0] != guardianName {
		guarded = true
		return
	}
	// A service manager may signal all processes of a job. The guardian must
	// outlive the launcher.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGTSTP,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPIPE)
	for pid := range orphans(os.Stdin) {
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
	os.Exit(0)
}

// orphans reads the launcher's messages until the pipe closes, and returns the
// process groups that are still running then.
func orphans(r io.Reader) map[int]bool {
	groups := map[int]bool{}
	for s := bufio.NewScanner(r); s.Scan(); {
		verb, rest, _ := strings.Cut(s.Text(), " ")
		pid, err := strconv.Atoi(rest)
		switch {
		case err != nil || pid <= 1: // truncated; kill(-pid) would signal other processes
		case verb == "started":
			groups[pid] = true
		case verb == "ended":
			delete(groups, pid)
		}
	}
	return groups
}

// A guardian is the launcher's handle of its guardian process; nil does nothing.
type guardian struct {
	cmd  *exec.Cmd
	pipe *os.File
}

// startGuardian returns nil if this program did not call Guard.
func startGuardian() (*guardian, error) {
	if !guarded {
		return nil, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	g := &guardian{pipe: w, cmd: &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{guardianName}, Env: []string{"GOMAXPROCS=1"}, Dir: "/", Stdin: r,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}, // so that signals of the terminal or of the group do not kill it
	}}
	if err := startAwaited(g.cmd); err != nil {
		w.Close()
		return nil, err
	}
	return g, nil
}

// started reports a worker's process group to the guardian. ended reports that
// the group is empty, because another program may reuse its number later.
func (g *guardian) started(pid int) { g.tell("started", pid) }
func (g *guardian) ended(pid int)   { g.tell("ended", pid) }

func (g *guardian) tell(verb string, pid int) {
	if g != nil {
		_, _ = fmt.Fprintf(g.pipe, "%s %d\n", verb, pid) // the job continues without a guardian
	}
}

// dismiss kills the guardian before closing the pipe, and waits for its exit.
func (g *guardian) dismiss() {
	if g == nil {
		return
	}
	_ = g.cmd.Process.Kill() // an error means that it has already exited
	waitAwaited(g.cmd)
	g.pipe.Close()
}
