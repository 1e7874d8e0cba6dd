package job

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// A stage is how far a connection is that no member has authenticated yet.
type stage int

const (
	stageHello  stage = iota // its first message has not arrived
	stageProof               // its first message proves that the other end has the secret, and the handshake goes on
	stageGossip              // its first bytes are gossip's label
	numStages
	stageLeft // the limiter does not count it any more
)

// stageLimits are the numbers of connections. Those in stageProof are from members, or repeat a first message that was
// forgotten.
var stageLimits = [numStages]int{stageHello: maxUnverified, stageProof: 1024, stageGossip: maxGossipStreams}

const (
	maxUnverified = 256
	// minConnectionTime is the time that this process has for reading a first message that has arrived with its connection, also
	// if it is busy. A flood of connections therefore delays each other one by at most this time.
	minConnectionTime = 10 * time.Millisecond
)

// A connLimiter limits the connections of one process that are not authenticated, at all of its ports together, from
// accept to the end of the handshake. When there is no place, it closes the oldest connection of
// the address that has most of them. Members need milliseconds, while the connections of a scanner or of an attacker stay, and
// one address does not take the places of others.
type connLimiter struct {
	mu     sync.Mutex
	inside [numStages][]*limitedConn // in the order in which they came to the stage
	counts [numStages]map[netip.Prefix]*int
	hellos recent[[NonceBytes]byte]
	freed  chan struct{}
	closed bool
}

// A limitedConn is a connection in a limiter, whose other end has not proved who it is. It has handshakeTimeout from accept on.
type limitedConn struct {
	net.Conn
	limiter *connLimiter
	source  netip.Prefix
	first   []byte // bytes that were read to decide whose connection it is, and are read again
	// Guarded by limiter.mu:
	stage    stage
	since    time.Time // when it came to the stage
	siblings *int      // the connections of its source in this stage
}

func newConnLimiter() *connLimiter {
	g := &connLimiter{hellos: recent[[NonceBytes]byte]{most: 4096}, freed: make(chan struct{}, 1)}
	for i := range g.counts {
		g.counts[i] = map[netip.Prefix]*int{}
	}
	return g
}

// enter admits a new connection, after waiting at most minConnectionTime.
func (g *connLimiter) enter(c net.Conn) *limitedConn {
	s := &limitedConn{Conn: c, limiter: g, source: sourceOf(c), stage: stageLeft}
	_ = c.SetDeadline(time.Now().Add(HandshakeTimeout)) // reading fails, too, if this does
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.inside[stageHello]) >= stageLimits[stageHello] {
		wait := minConnectionTime - time.Since(g.next(stageHello).since)
		if wait <= 0 {
			break
		}
		g.mu.Unlock()
		g.await(wait)
		g.mu.Lock()
	}
	s.moveTo(stageHello)
	return s
}

// await waits until a connection leaves a stage, or d has passed.
func (g *connLimiter) await(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-g.freed:
	case <-t.C:
	}
}

// next returns the connection that loses its place next.
func (g *connLimiter) next(in stage) *limitedConn {
	oldest := g.inside[in][0]
	for _, s := range g.inside[in] {
		if *s.siblings > *oldest.siblings {
			oldest = s
		}
	}
	return oldest
}

// sourceOf returns the IPv4 address of the other end, or its network of IPv6, which has many addresses.
func sourceOf(c net.Conn) netip.Prefix {
	t, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := t.AddrPort().Addr().Unmap()
	bits := 32
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // an invalid address gives the zero prefix
	return p
}

// moveTo counts the connection in another stage, in which it may displace another one. The limiter is locked.
func (s *limitedConn) moveTo(to stage) {
	g := s.limiter
	if s.stage < numStages {
		g.inside[s.stage] = slices.DeleteFunc(g.inside[s.stage], func(o *limitedConn) bool { return o == s })
		if *s.siblings--; *s.siblings == 0 {
			delete(g.counts[s.stage], s.source)
		}
		select {
		case g.freed <- struct{}{}:
		default:
		}
	}
	s.stage = to
	if to == stageLeft {
		return
	}
	if g.closed {
		s.stage = stageLeft
		s.Conn.Close()
		return
	}
	if len(g.inside[to]) >= stageLimits[to] {
		oldest := g.next(to)
		oldest.Conn.Close()
		oldest.moveTo(stageLeft)
	}
	g.inside[to], s.since = append(g.inside[to], s), time.Now()
	s.siblings = g.counts[to][s.source]
	if s.siblings == nil {
		s.siblings = new(int)
		g.counts[to][s.source] = s.siblings
	}
	*s.siblings++
}

// advance moves the connection to a later stage, and reports whether it still had a place.
func (s *limitedConn) advance(to stage) bool {
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()
	if s.stage == stageLeft {
		return false
	}
	s.moveTo(to)
	return s.stage == to
}

// said records the valid first message of a dialer, and reports whether it was not used before.
func (s *limitedConn) said(hello []byte) bool {
	g := s.limiter
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.stage == stageLeft || !g.hellos.isNew([NonceBytes]byte(nonceOf(hello))) {
		return false
	}
	s.moveTo(stageProof)
	return s.stage == stageProof
}

// leave ends the limiter's part: the connection is authenticated, or closed.
func (s *limitedConn) leave() {
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()
	s.moveTo(stageLeft)
}

func (s *limitedConn) Close() error {
	s.leave()
	return s.Conn.Close()
}

func (s *limitedConn) Read(b []byte) (int, error) {
	if len(s.first) > 0 && len(b) > 0 {
		n := copy(b, s.first)
		s.first = s.first[n:]
		return n, nil
	}
	return s.Conn.Read(b)
}

// rawConn returns the connection without its place in a limiter.
func rawConn(c net.Conn) net.Conn {
	if s, ok := c.(*limitedConn); ok {
		return s.Conn
	}
	return c
}

// close closes all connections, and those that come later.
func (g *connLimiter) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.closeWhere(func(*limitedConn) bool { return true })
}

// closeWhere closes the connections that so selects.
func (g *connLimiter) closeWhere(so func(*limitedConn) bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, all := range g.inside {
		for _, s := range slices.Clone(all) {
			if so(s) {
				s.Conn.Close()
				s.moveTo(stageLeft)
			}
		}
	}
}

// recent remembers keys, at least the last most of them.
type recent[K comparable] struct {
	most        int
	now, before map[K]struct{}
}

// isNew reports whether k is not one of the keys, and adds it.
func (r *recent[K]) isNew(k K) bool {
	if _, ok := r.now[k]; ok {
		return false
	}
	if _, ok := r.before[k]; ok {
		return false
	}
	if r.now == nil || len(r.now) >= r.most {
		r.now, r.before = map[K]struct{}{}, r.now
	}
	r.now[k] = struct{}{}
	return true
}
