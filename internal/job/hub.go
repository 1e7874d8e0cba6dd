package job

import (
	"bytes"
	"io"
	"net"
	"sync"
)

// A Hub lets the coordinators of several jobs share one port. The tag in a dialer's first message names its job. Nobody has
// proved anything by then, so the hub only chooses the coordinator that authenticates the dialer. Dialers with an
// unknown tag get to the first coordinator, which refuses them.
type Hub struct {
	ln      net.Listener
	limiter *connLimiter
	wg      sync.WaitGroup

	mu    sync.Mutex
	first *portListener
	jobs  map[[tagBytes]byte]*portListener
}

// NewHub takes ownership of ln, and calls notify if it cannot accept
// connections.
func NewHub(ln net.Listener, notify func(string)) *Hub {
	h := &Hub{ln: ln, limiter: newConnLimiter(), jobs: map[[tagBytes]byte]*portListener{}}
	h.wg.Go(func() {
		acceptAll(ln, notify, func(c net.Conn) {
			if knownPeer(c) != nil {
				c.Close()
				return
			}
			l := h.limiter.enter(c)
			h.wg.Go(func() { h.route(l) })
		})
	})
	return h
}

// Listen returns the listener of a job's coordinator.
func (h *Hub) Listen(job string) net.Listener {
	h.mu.Lock()
	defer h.mu.Unlock()
	tag := JobTag(job)
	t := newPortListener(h.ln.Addr(), func(*portListener) {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.jobs, tag)
	})
	if h.first == nil {
		h.first = t
	}
	h.jobs[tag] = t
	return t
}

// route gives a connection to the coordinator of its job, which reads the first bytes again.
func (h *Hub) route(c *limitedConn) {
	head := make([]byte, len(Magic)+1+tagBytes)
	n, err := io.ReadFull(c, head[:len(Magic)+1])
	if err != nil || !bytes.HasPrefix(head, Magic[:]) {
		c.Close()
		return
	}
	if head[len(Magic)] == ProtocolVersion { // another version may have a shorter first message
		more, err := io.ReadFull(c, head[n:])
		if n += more; err != nil {
			c.Close()
			return
		}
	}
	c.first = head[:n]
	h.mu.Lock()
	t := h.jobs[[tagBytes]byte(head[len(Magic)+1:])]
	if t == nil {
		t = h.first
	}
	h.mu.Unlock()
	if t == nil { // the first coordinator has not started yet
		c.Close()
		return
	}
	t.give(c)
}

// Close closes the port, and the connections that no coordinator has authenticated.
func (h *Hub) Close() {
	h.ln.Close()
	h.limiter.close()
	h.wg.Wait()
}
