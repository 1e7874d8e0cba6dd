package cluster

import (
	"net"
	"slices"
	"sync"
	"time"
)

const (
	// maxStrangers limits the number of unauthenticated connections.
	maxStrangers = 64
	// minConnectionTime is the minimum time of an unauthenticated connection while others wait.
	minConnectionTime = 100 * time.Millisecond
)

// A connLimiter limits the connections in the handshake. If it is full, it closes the
// oldest one: members need milliseconds, while half-open connections of a scanner
// would stay.
type connLimiter struct {
	most   int // maximum number of connections
	mu     sync.Mutex
	inside []stranger
	freed  chan struct{}
}

type stranger struct {
	c     net.Conn
	since time.Time
}

func newConnLimiter(most int) *connLimiter {
	return &connLimiter{most: most, freed: make(chan struct{}, 1)}
}

// enter admits c. If the limiter is full, it closes the oldest connection after minConnectionTime.
func (g *connLimiter) enter(c net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.inside) >= g.most {
		oldest := g.inside[0]
		if turn := minConnectionTime - time.Since(oldest.since); turn > 0 {
			g.mu.Unlock()
			g.await(turn)
			g.mu.Lock()
			continue
		}
		oldest.c.Close()
		g.inside = g.inside[1:]
	}
	g.inside = append(g.inside, stranger{c, time.Now()})
}

// await waits until a connection leaves or d has passed.
func (g *connLimiter) await(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-g.freed:
	case <-t.C:
	}
}

// leave removes c, which may already be removed.
func (g *connLimiter) leave(c net.Conn) {
	g.mu.Lock()
	g.inside = slices.DeleteFunc(g.inside, func(s stranger) bool { return s.c == c })
	g.mu.Unlock()
	select {
	case g.freed <- struct{}{}:
	default:
	}
}

// clear closes all connections.
func (g *connLimiter) clear() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.inside {
		s.c.Close()
	}
	g.inside = nil
}
