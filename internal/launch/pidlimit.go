package launch

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// A pidLimit explains failures by the limit of processes and threads of this process's control groups.
// Without it, the runtime of a Go program ends with a dump of all goroutines when it cannot start a thread.
type pidLimit struct {
	root string // of the file system, "" except in tests
	hits int    // how often the limits had been reached at the start
}

// ownThreads is the number of threads and processes that a launcher needs besides its workers, and a
// thread for each worker.
const ownThreads = 12

// groups returns the folders of the control groups that can limit processes, the innermost first.
func (l *pidLimit) groups() []string {
	text, err := os.ReadFile(l.root + "/proc/self/cgroup")
	if err != nil {
		return nil
	}
	base, place := "", ""
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) != 3:
		case slices.Contains(strings.Split(f[1], ","), "pids"): // version 1
			base, place = "/sys/fs/cgroup/pids", f[2]
		case f[0] == "0" && base == "":
			base, place = "/sys/fs/cgroup", f[2]
		}
	}
	if base == "" {
		return nil
	}
	var dirs []string
	for dir := path.Clean("/" + place); ; dir = path.Dir(dir) {
		dirs = append(dirs, path.Join(base, dir))
		if dir == "/" {
			return dirs
		}
	}
}

// read returns the number in a file of a group, after a word if it is not "".
func (l *pidLimit) read(dir, name, word string) (int, bool) {
	text, err := os.ReadFile(path.Join(l.root, dir, name))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), word); ok {
			n, err := strconv.Atoi(strings.TrimSpace(rest))
			return n, err == nil // not "max"
		}
	}
	return 0, false
}

// tightest returns the group that admits the fewest further processes.
func (l *pidLimit) tightest() (dir string, most, left int, found bool) {
	for _, d := range l.groups() {
		limit, ok1 := l.read(d, "pids.max", "")
		now, ok2 := l.read(d, "pids.current", "")
		if ok1 && ok2 && (!found || limit-now < left) {
			dir, most, left, found = d, limit, limit-now, true
		}
	}
	return dir, most, left, found
}

// reached returns how often the limits have been reached.
func (l *pidLimit) reached() int {
	sum := 0
	for _, d := range l.groups() {
		n, _ := l.read(d, "pids.events", "max ")
		sum += n
	}
	return sum
}

const pidCure = "raise it: --pids-limit of docker, podPidsLimit of the kubelet, TasksMax of systemd"

// check returns an error if the limits do not admit a launcher with so many workers.
func (l *pidLimit) check(procs int) error {
	l.hits = l.reached()
	dir, most, left, ok := l.tightest()
	if need := ownThreads + 2*procs; ok && left < need {
		return fmt.Errorf("%d workers need at least %d further processes and threads, but the control group %s has a limit of %d (pids.max), and only %d are left; %s",
			procs, need, dir, most, max(left, 0), pidCure)
	}
	return nil
}

// remark returns a remark for the failure of a worker if a limit has been reached since check.
func (l *pidLimit) remark() string {
	if dir, most, _, ok := l.tightest(); ok && l.reached() > l.hits {
		return fmt.Sprintf(" (the limit of %d processes and threads of the control group %s, pids.max, was reached; %s)", most, dir, pidCure)
	}
	return ""
}

// explain names the limits if a process could not be started because of one.
func (l *pidLimit) explain(err error) error {
	if !errors.Is(err, syscall.EAGAIN) {
		return err
	}
	text := ""
	if dir, most, _, ok := l.tightest(); ok {
		text = fmt.Sprintf("the control group %s has %d (pids.max), ", dir, most)
	}
	var user syscall.Rlimit
	const rlimitNproc = 6
	if syscall.Getrlimit(rlimitNproc, &user) == nil {
		text += fmt.Sprintf("the user has %d (ulimit -u), ", user.Cur)
	}
	return fmt.Errorf("%w: a limit of processes and threads is reached: %sthe host has that of kernel.pid_max", err, text)
}
