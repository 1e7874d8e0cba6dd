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
	"syscall"
)

// guardianName is argument 0 of a guardian, as ps shows it. Users do not type it.
const guardianName = "chorus: guardian"

// guarded is true if this program called Guard and can therefore start a guardian.
var guarded bool

// Guard must be the first call in main of a program that calls Run. It lets Run
// start the same program again as a guardian process. In the guardian, Guard does
// not return. If the launcher exits without dismissing the guardian, for example by
// kill -9, the guardian kills the process groups of the workers. (The kernel
// would kill only the workers, not their children.) Processes that left the group
// of their worker survive. Without Guard, Run has no guardian.
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
