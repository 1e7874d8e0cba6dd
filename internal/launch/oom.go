package launch

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"
)

// vmstat has the kernel's counters of memory since the start of the host.
const vmstat = "/proc/vmstat"

// An oomWatch tells whether the kernel's out-of-memory killer has killed a process of this host
// lately. The kernel counts such a kill before it sends the signal.
type oomWatch struct {
	path    string       // vmstat, except in tests
	samples [2]oomSample // the last two, the older one first
}

// An oomSample is the number of kills at a time.
type oomSample struct {
	kills int
	at    time.Time
	known bool // the kernel counts kills
}

// sample reads the counter.
func (w *oomWatch) sample() oomSample {
	text, err := os.ReadFile(w.path)
	if err != nil {
		return oomSample{}
	}
	for line := range bytes.Lines(text) {
		if n, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			kills, err := strconv.Atoi(string(bytes.TrimSpace(n)))
			return oomSample{kills, time.Now(), err == nil}
		}
	}
	return oomSample{}
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
