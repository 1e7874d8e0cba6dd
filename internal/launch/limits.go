package launch

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	vmstat   = "/proc/vmstat" // the kernel's counters of memory since the start of the host
	oomKills = "oom_kill "    // the counter of out-of-memory kills
)

// An oomWatch tells whether the kernel's out-of-memory killer has killed a process of this host
// lately. The kernel counts such a kill before it sends the signal.
type oomWatch struct {
	path    string       // vmstat, except in tests
	cgroup  string       // memory.events of the control group of the job; "" if there is none
	samples [2]oomSample // the last two, the older one first
}

// An oomSample is the number of kills at a time.
type oomSample struct {
	kills int
	at    time.Time
	known bool // the kernel counts kills
	own   int  // kills in the control group
}

// cgroupEvents returns the file with the events of this process's control group, or "" for cgroup v1 and the root.
func cgroupEvents() string {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range bytes.Lines(text) {
		if path, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("0::")); ok {
			return filepath.Join("/sys/fs/cgroup", string(path), "memory.events")
		}
	}
	return ""
}

// sample reads the counter.
func (w *oomWatch) sample() (s oomSample) {
	s.at = time.Now()
	s.kills, s.known = counter(w.path, oomKills)
	if w.cgroup != "" {
		s.own, _ = counter(w.cgroup, oomKills) // without the file the host's counter decides
	}
	return s
}

// counter returns the number in a file, after a word at the start of a line if it is not "".
func counter(file, word string) (n int, known bool) {
	text, err := os.ReadFile(file)
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

// begin reads the counter before the first worker starts.
func (w *oomWatch) begin() {
	s := w.sample()
	w.samples = [2]oomSample{s, s}
}

// update reads the counter from time to time. An exit that is noticed after an update is compared with
// the sample before it, because the kill may have been before the update.
func (w *oomWatch) update() { w.samples = [2]oomSample{w.samples[1], w.sample()} }

// explain returns what the counter says of a worker that ended by SIGKILL just now.
func (w *oomWatch) explain() string {
	before, now := w.samples[0], w.sample()
	switch kills := now.kills - before.kills; {
	case now.own > before.own:
		return fmt.Sprintf("out of memory: the kernel killed %d of the processes in this job's control group for it in the last %v", now.own-before.own, since(before.at))
	case !before.known || !now.known:
		return "possibly out of memory"
	case kills <= 0:
		return "not by the kernel's out-of-memory killer"
	case kills == 1:
		return fmt.Sprintf("perhaps out of memory: the kernel killed a process of this host for it in the last %v", since(before.at))
	default:
		return fmt.Sprintf("perhaps out of memory: the kernel killed %d processes of this host for it in the last %v", kills, since(before.at))
	}
}

// since returns the time since t in whole seconds, rounded up.
func since(t time.Time) time.Duration { return time.Since(t).Truncate(time.Second) + time.Second }

// A pidLimit explains failures by the limits of processes and threads of this process's control groups and user.
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

// tightest returns the group that admits the fewest further processes.
func (l *pidLimit) tightest() (dir string, most, left int, found bool) {
	for _, d := range l.groups() {
		limit, ok1 := counter(path.Join(l.root, d, "pids.max"), "")
		now, ok2 := counter(path.Join(l.root, d, "pids.current"), "")
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
		n, _ := counter(path.Join(l.root, d, "pids.events"), "max ")
		sum += n
	}
	return sum
}

const pidCure = "raise it: --pids-limit of docker, podPidsLimit of the kubelet, TasksMax of systemd"

// check returns an error if the limits do not admit a launcher with so many workers.
func (l *pidLimit) check(procs int) error {
	l.hits = l.reached()
	need := ownThreads + 2*procs
	if dir, most, left, ok := l.tightest(); ok && left < need {
		return fmt.Errorf("%d workers need at least %d further processes and threads, but the control group %s has a limit of %d (pids.max), and only %d are left; %s",
			procs, need, dir, most, max(left, 0), pidCure)
	}
	if user, most, left, ok := l.ofUser(); ok && left < need {
		return fmt.Errorf("%d workers need at least %d further processes and threads, but the user with the number %s has a limit of %d (ulimit -u), and at most %d are left; %s",
			procs, need, user, most, max(left, 0), userCure)
	}
	return nil
}

const userCure = "raise it: ulimit -u, nproc in limits.conf, LimitNPROC of systemd, --ulimit nproc of docker"

// ofUser returns the limit of the processes and threads of this process's user, and how many further ones it admits. Those
// that this process cannot see count for the kernel, too, so there may be fewer. It returns false if the limit does not hold
// for this process: the kernel exempts root and programs with some capabilities.
func (l *pidLimit) ofUser() (user string, most, left int, ok bool) {
	self := l.status("self")
	caps, err := strconv.ParseUint(self["CapEff"], 16, 64)
	const sysAdmin, sysResource = 1 << 21, 1 << 24
	user = realUser(self)
	if err != nil || user == "" || user == "0" || caps&(sysAdmin|sysResource) != 0 {
		return "", 0, 0, false
	}
	text, _ := os.ReadFile(l.root + "/proc/self/limits")
	_, text, found := bytes.Cut(text, []byte("Max processes"))
	f := bytes.Fields(text)
	if !found || len(f) == 0 {
		return "", 0, 0, false
	}
	if most, err = strconv.Atoi(string(f[0])); err != nil { // "unlimited"
		return "", 0, 0, false
	}
	space, err := os.Readlink(l.root + "/proc/self/ns/user")
	dirs, _ := filepath.Glob(l.root + "/proc/[1-9]*")
	left = most
	for _, d := range dirs {
		pid := filepath.Base(d)
		if there, err2 := os.Readlink(d + "/ns/user"); err != nil || err2 != nil || there != space { // each user namespace counts by itself
			continue
		}
		if s := l.status(pid); realUser(s) == user {
			n, _ := strconv.Atoi(s["Threads"])
			left -= n
		}
	}
	return user, most, left, true
}

// status returns the lines of a process's file status.
func (l *pidLimit) status(pid string) map[string]string {
	text, _ := os.ReadFile(l.root + "/proc/" + pid + "/status")
	m := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		m[key] = strings.TrimSpace(value)
	}
	return m
}

// realUser returns the number of the user whose limit counts a process, or "".
func realUser(status map[string]string) string {
	user, _, _ := strings.Cut(status["Uid"], "\t")
	return user
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
