package cluster

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/connlimit"
)

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
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && connlimit.TakesReserve(c) {
			c.Close()
			err = syscall.EMFILE
		}
		if err == nil {
			failing = time.Time{}
			take(c)
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
