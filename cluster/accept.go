package cluster

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/sockets"
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

// acceptPatience is the time for which a failure may be a passing one.
const acceptPatience = time.Second

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
		if err == nil && sockets.TakesReserve(c) {
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
		if time.Since(failing) >= acceptPatience && acceptLines.isDue() {
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
	if time.Since(l.last) < waitLine {
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
