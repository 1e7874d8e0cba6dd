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

// guardianName is a guardian's argument 0: what ps shows, and nobody types.
const guardianName = "chorus: guardian"

// guarded says that this program called Guard, so that it can be a guardian.
var guarded bool

// Guard has to be the first call in main of a program that calls Run. It lets
// Run start the program once more as a guardian, which does not return from
// here: when the launcher ends without having dismissed it, kill -9 included, the
// guardian kills the workers' process groups. The kernel does that for the
// workers alone, not for what they have started. In a program without Guard,
// Run has no guardian. What has left its worker's group is beyond a guardian.
func Guard() {
	if os.Args[0] != guardianName {
		guarded = true
		return
	}
	// A service manager's signal to all that belongs to a job is no reason to go
	// before the launcher does.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGTSTP,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPIPE)
	for pid := range orphans(os.Stdin) {
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
	os.Exit(0)
}

// orphans reads what a launcher says until it ends, and returns the groups that
// are without it then.
func orphans(r io.Reader) map[int]bool {
	groups := map[int]bool{}
	for s := bufio.NewScanner(r); s.Scan(); {
		verb, rest, _ := strings.Cut(s.Text(), " ")
		pid, err := strconv.Atoi(rest)
		switch {
		case err != nil || pid <= 1: // cut off; -1 and 0 mean others
		case verb == "started":
			groups[pid] = true
		case verb == "ended":
			delete(groups, pid)
		}
	}
	return groups
}

// A guardian is the launcher's side of one. A nil guardian does nothing.
type guardian struct {
	cmd  *exec.Cmd
	pipe *os.File
}

// startGuardian returns nil where this program cannot be one.
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
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}, // neither the terminal nor a group's signal ends it
	}}
	if err := g.cmd.Start(); err != nil {
		w.Close()
		return nil, err
	}
	return g, nil
}

func (g *guardian) pid() int {
	if g == nil {
		return 0
	}
	return g.cmd.Process.Pid
}

// started tells of a worker's group, ended that nothing is left of it: another
// program's may have its number one day.
func (g *guardian) started(pid int) { g.tell("started", pid) }
func (g *guardian) ended(pid int)   { g.tell("ended", pid) }

func (g *guardian) tell(verb string, pid int) {
	if g != nil {
		_, _ = fmt.Fprintf(g.pipe, "%s %d\n", verb, pid) // without a guardian the job goes on
	}
}

// dismiss ends the guardian, before the pipe ends, and waits for it.
func (g *guardian) dismiss() {
	if g == nil {
		return
	}
	_ = g.cmd.Process.Kill() // it has ended already if this fails
	_ = g.cmd.Wait()
	g.pipe.Close()
}
