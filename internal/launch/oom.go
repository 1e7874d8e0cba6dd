package launch

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// vmstat has the kernel's counters of memory since the start of the host.
const vmstat = "/proc/vmstat"

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
	s.kills, s.known = oomKills(w.path)
	if w.cgroup != "" {
		s.own, _ = oomKills(w.cgroup) // without the file the host's counter decides
	}
	return s
}

// oomKills reads the counter oom_kill of a file.
func oomKills(path string) (kills int, known bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	for line := range bytes.Lines(text) {
		if n, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			kills, err := strconv.Atoi(string(bytes.TrimSpace(n)))
			return kills, err == nil
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
