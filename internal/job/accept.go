package job

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// listening opens the listeners of a launcher. It omits keep-alives, whose four system calls are a third of the cost of a
// connection that is refused: members send heartbeats, and a handshake has a deadline.
var listening = func() (c net.ListenConfig) {
	c.KeepAlive = -1
	c.SetMultipathTCP(false)
	return c
}()

// acceptRetry is the time between two attempts to accept a connection if the system lacks
// resources for it.
const acceptRetry = 50 * time.Millisecond

// transientTime is the time for which a failure may be a passing one.
const transientTime = time.Second

// acceptAll calls take with each connection of ln, and returns when ln is closed. It calls notify
// with the reason if it has accepted none for a while, unless another port has just done so: the
// cause is often the same.
func acceptAll(ln net.Listener, notify func(reason string), take func(net.Conn)) {
	var failing time.Time
	var flood floodMeter
	for {
		called := time.Now()
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && safe.TakesReserve(c) {
			c.Close()
			err = syscall.EMFILE
		}
		if err == nil {
			failing = time.Time{}
			take(c)
			flood.gather(called)
			continue
		}
		if failing.IsZero() {
			failing = time.Now()
		}
		if time.Since(failing) >= transientTime && acceptLines.isDue() {
			notify(fmt.Sprintf("this process cannot accept connections: %v%s", err, acceptCure(err)))
		}
		time.Sleep(acceptRetry)
	}
}

// A floodMeter counts the connections of a port.
type floodMeter struct {
	since    time.Time
	count    int
	flooding bool
}

const (
	floodWindow  = 100 * time.Millisecond
	floodSize    = 50 // connections in a window
	floodPause   = 2 * time.Millisecond
	acceptAtOnce = 50 * time.Microsecond
)

// gather lets connections gather in the kernel during a flood if none was left, so that one wake-up takes several of them, and
// their first bytes have arrived. called is when Accept was called for the last one.
func (f *floodMeter) gather(called time.Time) {
	now := time.Now()
	if now.Sub(f.since) >= floodWindow {
		f.since, f.count, f.flooding = now, 0, f.count >= floodSize
	}
	f.count++
	if f.flooding && now.Sub(called) > acceptAtOnce {
		time.Sleep(floodPause)
	}
}

// acceptLines limits the lines of all ports of this process.
var acceptLines lineLimit

// A lineLimit permits a line every few seconds.
type lineLimit struct {
	mu   sync.Mutex
	last time.Time
}

func (l *lineLimit) isDue() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.last) < WaitLine {
		return false
	}
	l.last = time.Now()
	return true
}

func acceptCure(err error) string {
	if errors.Is(err, syscall.EMFILE) {
		return "; raise the limit on open files (ulimit -n)"
	}
	return ""
}

// refusedLine returns a line for the user of this host about a process that failed to authenticate. It
// returns "" for connections of other programs, such as port scanners.
func refusedLine(conn net.Conn, why error) string {
	var reason string
	other, foreign := errors.AsType[*safe.UserError](why)
	switch {
	case foreign:
		reason = other.Error()
	case errors.Is(why, errBadProof):
		reason = "it has a different secret"
	case errors.Is(why, errOldToken):
		reason = "its CHORUS_TOKEN is of another run of the job, or of another secret"
	case errors.Is(why, errOtherJob):
		reason = "it belongs to a different job"
	case errors.Is(why, errOtherVersion):
		reason = errOtherVersion.Error()
	default:
		return ""
	}
	return fmt.Sprintf("refused the process at %s: %s", peerAddr(conn), reason)
}

const (
	maxSaid    = 64 // remembered notifications
	maxRefused = 16 // lines in the time WaitLine about processes that failed to authenticate, whose addresses an attacker may choose
)

// A lineFilter tells which notifications are new.
type lineFilter struct {
	mu      sync.Mutex
	said    map[string]time.Time
	refused lineBudget
}

// A lineBudget permits maxRefused lines in the time WaitLine.
type lineBudget struct {
	since time.Time
	lines int
}

func (b *lineBudget) take() bool {
	if time.Since(b.since) >= WaitLine {
		*b = lineBudget{since: time.Now()}
	}
	b.lines++
	return b.lines <= maxRefused
}

// refuse notifies the user of this host of a process that failed to authenticate, unless the user knows that, or there are
// too many.
func (f *lineFilter) refuse(c net.Conn, why error, notify func(line string)) {
	line := refusedLine(c, why)
	if line == "" || !f.isNew(addrIP(c.RemoteAddr()), line) {
		return
	}
	f.mu.Lock()
	due := f.refused.take()
	f.mu.Unlock()
	if due {
		notify(line)
	}
}

// isNew reports whether the same text about the same host was not said lately, and remembers it.
func (f *lineFilter) isNew(ip, text string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.said == nil || len(f.said) >= maxSaid {
		f.said = map[string]time.Time{}
	}
	// Ignore digits: a process that retries has another port or pid.
	key := ip + strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, text)
	if last, ok := f.said[key]; ok && time.Since(last) < WaitLine {
		return false
	}
	f.said[key] = time.Now()
	return true
}
