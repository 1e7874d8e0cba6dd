package cluster

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
)

// acceptRetry is the time between two attempts to accept a connection if the system lacks
// resources for it.
const acceptRetry = 50 * time.Millisecond

// acceptPatience is the time for which a failure may be a passing one.
const acceptPatience = time.Second

// acceptAll calls take with each connection of ln, and returns when ln is closed. It calls notify
// with the reason if it has accepted none for a while.
func acceptAll(ln net.Listener, notify func(reason string), take func(net.Conn)) {
	var failing, told time.Time
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			failing = time.Time{}
			take(c)
			continue
		}
		if failing.IsZero() {
			failing = time.Now()
		}
		if time.Since(failing) >= acceptPatience && time.Since(told) >= waitLine {
			told = time.Now()
			notify(fmt.Sprintf("this process cannot accept connections: %v%s", err, acceptCure(err)))
		}
		time.Sleep(acceptRetry)
	}
}

func acceptCure(err error) string {
	if errors.Is(err, syscall.EMFILE) {
		return "; raise the limit on open files (ulimit -n)"
	}
	return ""
}
