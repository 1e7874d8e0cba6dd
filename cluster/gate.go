package cluster

import (
	"net"
	"slices"
	"sync"
	"time"
)

const (
	// maxStrangers bounds the connections that have not proved themselves.
	maxStrangers = 64
	// strangerTurn is how long a stranger keeps its place when others wait.
	strangerTurn = 100 * time.Millisecond
)

// A gate holds the connections that are in their handshake. When it is full the
// oldest has to go: members need milliseconds, half-open connections of a
// scanner would stay.
type gate struct {
	most   int // inside at once
	mu     sync.Mutex
	inside []stranger
	freed  chan struct{}
}

type stranger struct {
	c     net.Conn
	since time.Time
}

func newGate(most int) *gate { return &gate{most: most, freed: make(chan struct{}, 1)} }

// enter admits c, if need be by closing the oldest after its turn.
func (g *gate) enter(c net.Conn) {
	g.mu.Lock()
	if len(g.inside) >= g.most {
		turn := strangerTurn - time.Since(g.inside[0].since)
		g.mu.Unlock()
		g.await(turn)
		g.mu.Lock()
	}
	defer g.mu.Unlock()
	if len(g.inside) >= g.most {
		g.inside[0].c.Close()
		g.inside = g.inside[1:]
	}
	g.inside = append(g.inside, stranger{c, time.Now()})
}

// await waits until somebody leaves or d is over.
func (g *gate) await(d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-g.freed:
	case <-t.C:
	}
}

// leave ends c's stay, whether or not it was shown out.
func (g *gate) leave(c net.Conn) {
	g.mu.Lock()
	g.inside = slices.DeleteFunc(g.inside, func(s stranger) bool { return s.c == c })
	g.mu.Unlock()
	select {
	case g.freed <- struct{}{}:
	default:
	}
}

// clear closes all who are inside.
func (g *gate) clear() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.inside {
		s.c.Close()
	}
	g.inside = nil
}
