package cluster

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	// waitLine is how often those who wait for others say for whom.
	waitLine = 5 * time.Second
	// exitGrace is how long the loss of a worker's connection waits for its
	// launcher to say how the worker ended.
	exitGrace = 500 * time.Millisecond
)

// coordConfig is what a coordinator needs to know.
type coordConfig struct {
	job    string
	key    []byte
	agents int // hosts that make the job; 0: workers come without launchers
	size   int // processes of the world, where agents is 0
	self   welcome
	notify func(string)
	hint   func(have []Member) string // what gossip adds to a list of the missing; may be nil
	path   func(host host) string     // what gossip says of a host that was lost; may be nil
}

// A coordinator keeps the truth about one job: its hosts, its processes, their
// ranks, the store, and the first failure. All state is under one lock, which
// is never held while anything waits.
type coordinator struct {
	cfg     coordConfig
	ln      net.Listener
	gate    *gate
	started time.Time
	quit    chan struct{}
	wg      sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	peers   map[*peer]bool // all that have proved themselves
	agents  []*peer
	attempt uint64 // of PREPARE; 0 when none is under way
	lastTry uint64
	plan    *plan
	workers []*peer // by order of arrival
	world   *world
	engine  *engine
	faults  faults
}

// newCoordinator starts a coordinator, which closes ln.
func newCoordinator(ln net.Listener, cfg coordConfig) *coordinator {
	c := &coordinator{cfg: cfg, ln: ln, gate: newGate(), started: time.Now(),
		quit: make(chan struct{}), peers: map[*peer]bool{}}
	c.faults.exits = map[int]Exit{}
	c.wg.Go(c.acceptLoop)
	c.wg.Go(c.waitLoop)
	return c
}

// listen opens the coordinator's port. The kernel's text alone does not say
// what to do about a port that is taken.
func listen(addr string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("cluster: listen on %s for the coordinator: %w", addr, err)
	}
	return ln, nil
}

func (c *coordinator) acceptLoop() {
	for {
		conn, err := c.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of file descriptors, most likely: others free some
			if !c.pause(50 * time.Millisecond) {
				return
			}
			continue
		}
		c.gate.enter(conn)
		c.wg.Go(func() { c.serve(conn) })
	}
}

// pause waits for d and reports whether the coordinator is still open.
func (c *coordinator) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-c.quit:
		return false
	}
}

// serve authenticates one connection and reads it to its end.
func (c *coordinator) serve(conn net.Conn) {
	l, err := acceptHandshake(conn, c.cfg.job, c.cfg.key)
	c.gate.leave(conn)
	if err != nil {
		conn.Close()
		return
	}
	l.patience = c.cfg.self.LostAfter
	p := newPeer(l, conn.RemoteAddr().String(), c.cfg.self.LostAfter)
	if !c.admit(p) {
		conn.Close()
		return
	}
	p.send(note(kindWelcome, c.cfg.self))
	go p.writeLoop()
	err = c.readLoop(p)
	c.mu.Lock()
	c.disconnected(p, err)
	c.mu.Unlock()
	p.hangUp()
	<-p.done
	c.mu.Lock()
	delete(c.peers, p)
	c.mu.Unlock()
}

func (c *coordinator) admit(p *peer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.peers[p] = true
	return true
}

func (c *coordinator) readLoop(p *peer) error {
	for {
		b, err := p.link.read()
		if err != nil {
			return err
		}
		p.heard.Store(time.Now().UnixNano())
		m, err := decodeMessage(b)
		if err != nil {
			return err
		}
		if m.kind == kindBeat {
			p.send(m)
			continue
		}
		if err := c.handle(p, m); err != nil {
			return err
		}
	}
}

// handle acts on one message. An error ends the connection.
func (c *coordinator) handle(p *peer, m message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.kind == kindRegister {
		return c.register(p, m)
	}
	switch p.role {
	case roleAgent:
		return c.handleAgent(p, m)
	case roleWorker:
		return c.handleWorker(p, m)
	}
	return fmt.Errorf("message of kind %d before registration", m.kind)
}

func (c *coordinator) handleAgent(p *peer, m message) error {
	switch m.kind {
	case kindWho:
		c.sendRoll(p, m.id)
	case kindPrepared:
		c.prepared(p, m.id)
	case kindExit:
		var e Exit
		if err := m.record(&e); err != nil {
			return err
		}
		c.exited(p, e)
	case kindStop:
		var f fault
		if err := m.record(&f); err != nil {
			return err
		}
		c.stopped(p, f)
	case kindDone:
		c.agentDone(p)
	case kindLeave:
		c.agentLeft(p)
	default:
		return fmt.Errorf("message of kind %d from an agent", m.kind)
	}
	return nil
}

func (c *coordinator) handleWorker(p *peer, m message) error {
	switch m.kind {
	case kindWho:
		c.sendRoll(p, m.id)
	case kindCall:
		return c.call(p, m)
	case kindCancel:
		if c.world != nil {
			c.engine.cancel(ticket{p.reg.Rank, m.id})
		}
	case kindLeave:
		c.workerLeft(p)
	default:
		return fmt.Errorf("message of kind %d from a worker", m.kind)
	}
	return nil
}

// call carries out a store call, of the world's members only.
func (c *coordinator) call(p *peer, m message) error {
	req, err := decodeCall(m.body)
	if err != nil {
		return err
	}
	reply := func(r call) {
		p.send(message{kind: kindReply, epoch: firstEpoch, id: m.id, body: r.encode()})
	}
	if c.world == nil || p.state != peerJoined {
		reply(call{op: statusBad})
		return nil
	}
	c.engine.do(ticket{p.reg.Rank, m.id}, req, reply)
	return nil
}

// refuse tells a peer why it cannot take part and hangs up.
func (c *coordinator) refuse(p *peer, r refusal) {
	p.state = peerGone
	p.send(note(kindRefuse, r))
	p.hangUp()
}

// roll says who has come, of those for whom somebody waits now.
func (c *coordinator) roll() roll {
	var r roll
	if c.cfg.agents > 0 && c.plan == nil {
		r = roll{Unit: unitHost, Want: c.cfg.agents, Have: members(c.agents)}
		r.Missing = missingNodes(c.agents, c.cfg.agents)
	} else {
		r = roll{Unit: unitProcess, Want: c.size(), Have: members(c.workers)}
		r.Missing = missingRanks(c.workers, c.size())
	}
	if c.cfg.hint != nil && r.Unit == unitHost {
		r.Hint = c.cfg.hint(r.Have)
	}
	return r
}

func (c *coordinator) sendRoll(p *peer, id uint64) {
	m := note(kindRoll, c.roll())
	m.id = id
	p.send(m)
}

// size returns the world's size, or 0 while the hosts are not all known.
func (c *coordinator) size() int {
	if c.cfg.agents == 0 {
		return c.cfg.size
	}
	if c.plan == nil {
		return 0
	}
	return c.plan.size()
}

func members(ps []*peer) []Member {
	ms := make([]Member, 0, len(ps))
	for _, p := range ps {
		ms = append(ms, p.member())
	}
	return ms
}

func missingRanks(ps []*peer, size int) []int {
	come := map[int]bool{}
	for _, p := range ps {
		if p.reg.Rank < 0 {
			return nil
		}
		come[p.reg.Rank] = true
	}
	return absent(come, size)
}

func missingNodes(ps []*peer, size int) []int {
	come := map[int]bool{}
	for _, p := range ps {
		if p.host.NodeRank < 0 {
			return nil
		}
		come[p.host.NodeRank] = true
	}
	return absent(come, size)
}

func absent(come map[int]bool, size int) []int {
	var ns []int
	for n := range size {
		if !come[n] {
			ns = append(ns, n)
		}
	}
	return ns
}

// waitLoop says every few seconds for whom the job waits.
func (c *coordinator) waitLoop() {
	for c.pause(waitLine) {
		if line := c.waitingLine(); line != "" {
			c.cfg.notify(line)
		}
	}
}

func (c *coordinator) waitingLine() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := c.cfg.agents > 0 && c.plan == nil || c.world == nil && len(c.workers) > 0
	if !waiting || c.faults.lost != nil {
		return ""
	}
	return fmt.Sprintf("job %s: waiting since %v: %v", c.cfg.job, time.Since(c.started).Round(time.Second), c.roll())
}

// close tells everybody that the coordinator leaves, sends what is queued, and
// returns when no goroutine is left.
func (c *coordinator) close() {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.lastFaults()
	c.closed = true
	for p := range c.peers {
		p.send(note(kindEnded, nil))
		p.hangUp()
	}
	c.mu.Unlock()
	close(c.quit)
	c.ln.Close()
	c.gate.clear()
	c.wg.Wait()
}

// reasonOf says in words why a connection ended.
func reasonOf(err error, lostAfter time.Duration) string {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Sprintf("silent for %v: stopped, starved or unreachable", lostAfter)
	case isClosedByPeer(err):
		return "its connection closed: the process ended without Close or Shutdown"
	default:
		return fmt.Sprintf("its connection failed: %v", err)
	}
}

// remove deletes p from ps.
func remove(ps []*peer, p *peer) []*peer {
	return slices.DeleteFunc(ps, func(q *peer) bool { return q == p })
}
