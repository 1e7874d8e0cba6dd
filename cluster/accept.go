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

// acceptAll calls take with each connection of ln, and returns when ln is closed. It calls notify
// with the reason if the system accepts none.
func acceptAll(ln net.Listener, notify func(reason string), take func(net.Conn)) {
	var told time.Time
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			take(c)
			continue
		}
		if time.Since(told) >= waitLine {
			told = time.Now()
			notify(fmt.Sprintf("no process can connect to this host: %v%s", err, acceptCure(err)))
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
