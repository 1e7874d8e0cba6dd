package job

import (
	"net"
	"strconv"
	"sync"
)

// A port accepts the control connections of an agent. A seed has its own port. The agent of
// another host shares the TCP port of gossip, which differs by the first byte, and opens a port
// only without gossip. While this host runs a coordinator, the coordinator gets the connections.
// Otherwise the agent answers who coordinates the job.
type port struct {
	agent   *Agent
	at      string // the address for other hosts
	local   string // the address for workers of this host
	ln      net.Listener
	limiter *connLimiter
	said    lineFilter
	wg      sync.WaitGroup

	mu       sync.Mutex
	listener *portListener // nil: none
	closed   bool
}

// A portListener is the listener of a coordinator that uses a port together with others.
type portListener struct {
	addr  net.Addr
	freed func(*portListener) // called by the first Close
	conns chan *limitedConn
	over  chan struct{}
	once  sync.Once
}

func newPortListener(addr net.Addr, freed func(*portListener)) *portListener {
	return &portListener{addr: addr, freed: freed, conns: make(chan *limitedConn), over: make(chan struct{})}
}

// give hands a connection to the coordinator, which accepts without waiting for anything.
func (t *portListener) give(c *limitedConn) {
	select {
	case t.conns <- c:
	case <-t.over:
		c.Close()
	}
}

func newPort(a *Agent) *port { return &port{agent: a, limiter: newConnLimiter()} }

// open accepts the connections of ln.
func (p *port) open(ln net.Listener, at string) {
	p.ln, p.at, p.local = ln, at, reachable(ln.Addr())
	p.wg.Go(func() { acceptAll(ln, p.agent.notify, func(c net.Conn) { p.take(p.limiter.enter(c)) }) })
}

// openBeside opens the port of a host that is not a seed.
func (p *port) openBeside(seeds []string) error {
	a := p.agent
	if g := a.Gossip; g != nil {
		p.at, p.local = g.at, reachable(g.Transport.tcp.Addr())
		return nil
	}
	ip, err := ownIP(&a.cfg, seeds, "")
	if err != nil {
		return nil // no seed can be reached yet; this host cannot coordinate
	}
	ln, err := a.cfg.Sys.ListenAt(net.JoinHostPort(ip, "0"))
	if err != nil {
		return err
	}
	at := ln.Addr().String()
	if adv, _, err := SplitAddr(a.cfg.Advertise, ""); err == nil {
		at = net.JoinHostPort(adv, strconv.Itoa(portOf(at)))
	}
	p.open(ln, at)
	return nil
}

// take hands a connection to the coordinator, or answers it. The connection keeps its place in the limiter until its
// handshake is over.
func (p *port) take(c *limitedConn) {
	p.mu.Lock()
	t, closed := p.listener, p.closed
	if t == nil && !closed {
		p.wg.Add(1)
	}
	p.mu.Unlock()
	switch {
	case closed:
		c.Close()
	case t == nil:
		go p.refer(c)
	default:
		t.give(c)
	}
}

// refer tells an authenticated process who coordinates the job.
func (p *port) refer(c *limitedConn) {
	defer p.wg.Done()
	defer c.Close()
	key := p.agent.keys.Control
	key.run = p.agent.promise().Run
	l, err := AcceptHandshake(c, p.agent.cfg.Job, key)
	if err != nil {
		p.said.refuse(c, err, p.agent.notify)
		return
	}
	_ = l.Write(Frame{Body: Note(KindWelcome, p.agent.referral()).Encode()}, HandshakeTimeout) // the other process tries again
}

// let gives the port to a coordinator until it closes the listener.
func (p *port) let() net.Listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listener = newPortListener(p.addr(), p.freed)
	return p.listener
}

func (p *port) freed(t *portListener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener == t {
		p.listener = nil
	}
}

func (p *port) addr() net.Addr {
	if p.ln != nil {
		return p.ln.Addr()
	}
	h, text, _ := net.SplitHostPort(p.at)
	n, _ := strconv.Atoi(text)
	return &net.TCPAddr{IP: net.ParseIP(h), Port: n}
}

func (p *port) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	if p.ln != nil {
		p.ln.Close()
	}
	p.limiter.close()
	p.wg.Wait()
}

// Accept, Addr and Close implement net.Listener.
func (t *portListener) Accept() (net.Conn, error) {
	select {
	case c := <-t.conns:
		return c, nil
	case <-t.over:
		return nil, net.ErrClosed
	}
}

func (t *portListener) Addr() net.Addr { return t.addr }

func (t *portListener) Close() error {
	t.once.Do(func() {
		close(t.over)
		t.freed(t)
	})
	return nil
}
