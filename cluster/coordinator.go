package cluster

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/sameuser"
)

const (
	// exitGrace is how long the loss of a worker's connection waits for its
	// launcher to say how the worker ended.
	exitGrace = 500 * time.Millisecond
	// farewell bounds how long a peer may take to read the last word, and how
	// long those who have not come yet are waited for to be told it.
	farewell = time.Second
	// drainTime bounds how long a store outlives the Close of its process.
	drainTime = 500 * time.Millisecond
	// maxSaid bounds the memory of what has been told.
	maxSaid = 64
)

// coordConfig is what a coordinator needs to know.
type coordConfig struct {
	job    string
	key    credential
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
	pulse   *pulse
	started time.Time
	quit    chan struct{}
	wg      sync.WaitGroup
	drains  time.Duration // drainTime; tests have more

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
	gone    []Member      // gave up before the others came
	verdict *refusal      // why the job never became complete
	told    map[int]bool  // the ranks, or node numbers, that have the verdict
	allTold chan struct{} // closed when all have
	drained chan struct{} // closed when no worker is left; nil unless awaited
	lines   []string      // to notify when the lock is free
	said    map[string]time.Time
}

// newCoordinator starts a coordinator, which closes ln.
func newCoordinator(ln net.Listener, cfg coordConfig) *coordinator {
	c := &coordinator{cfg: cfg, ln: ln, gate: newGate(maxStrangers), pulse: newPulse(cfg.self), started: time.Now(), drains: drainTime,
		quit: make(chan struct{}), peers: map[*peer]bool{},
		told: map[int]bool{}, allTold: make(chan struct{}), said: map[string]time.Time{}}
	c.faults.exits = map[int]Exit{}
	c.wg.Go(c.acceptLoop)
	c.wg.Go(c.waitLoop)
	c.wg.Go(func() { c.pulse.run(cfg.self.Heartbeat, c.quit) })
	return c
}

// listen opens the coordinator's port. The kernel's text alone does not say
// what to do about a port that is taken.
func listen(addr string) (net.Listener, error) {
	ln, err := net.Listen(networkOf(addr), addr)
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
		if err := knownPeer(conn); err != nil { // before it takes a place of the gate
			conn.Close()
			c.sayRefused(conn, err)
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
		c.sayRefused(conn, err)
		return
	}
	l.patience, l.excuse = c.cfg.self.LostAfter, c.pulse.paused
	p := newPeer(l, peerAddr(conn), c.cfg.self.LostAfter)
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
	p.link.close()
	c.mu.Lock()
	delete(c.peers, p)
	c.mu.Unlock()
}

// sayRefused tells this host's user who could not prove that it belongs to the
// job. What is no Chorus process, such as a port scanner, is nobody's concern.
func (c *coordinator) sayRefused(conn net.Conn, why error) {
	var reason string
	other, foreign := errors.AsType[*sameuser.Error](why)
	switch {
	case foreign:
		reason = other.Error()
	case errors.Is(why, errBadProof):
		reason = "it has a different secret"
	case errors.Is(why, errOtherJob):
		reason = "it belongs to a different job"
	case errors.Is(why, errOtherVersion):
		reason = errOtherVersion.Error()
	default:
		return
	}
	c.mu.Lock()
	c.say(addrIP(conn.RemoteAddr()), fmt.Sprintf("refused the process at %s: %s", peerAddr(conn), reason))
	c.unlock()
}

// say queues a line about a host for the user, unless the same was just told.
func (c *coordinator) say(ip, text string) {
	if len(c.said) >= maxSaid {
		clear(c.said)
	}
	// A process that tries again has another port or pid.
	key := ip + strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, text)
	if last, ok := c.said[key]; ok && time.Since(last) < waitLine {
		return
	}
	c.said[key] = time.Now()
	c.lines = append(c.lines, fmt.Sprintf("job %s: %s", c.cfg.job, text))
}

// unlock frees the lock and tells the user what has been queued meanwhile.
func (c *coordinator) unlock() {
	lines := c.lines
	c.lines = nil
	c.mu.Unlock()
	for _, l := range lines {
		c.cfg.notify(l)
	}
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
		if p.hasHungUp() { // it is only given time to read
			continue
		}
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
	defer c.unlock()
	if m.kind == kindRegister {
		return c.register(p, m)
	}
	if m.kind == kindSilent && p.role != roleNone {
		c.gaveUp(p)
		return nil
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
		c.later(func() { c.agentDone(p) })
	case kindLeave:
		c.agentLeft(p, m.id == leaveGaveUp)
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
		c.workerLeft(p, m.id == leaveGaveUp)
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

// refuse tells a peer, and the user here, why it cannot take part.
func (c *coordinator) refuse(p *peer, r refusal) {
	if c.verdict == nil {
		who := memberList([]Member{p.member()})
		c.say(p.addr, fmt.Sprintf("refused %s at %s: %s", who, p.addr, r.why()))
	}
	c.dismiss(p, r)
}

// dismiss tells a peer why it cannot take part and hangs up.
func (c *coordinator) dismiss(p *peer, r refusal) {
	p.state = peerGone
	p.send(note(kindRefuse, r))
	p.hangUp()
	if c.verdict == nil {
		return
	}
	number, want := p.reg.Rank, c.size()
	if c.cfg.agents > 0 {
		number, want = p.host.NodeRank, c.cfg.agents
	}
	if number >= 0 && !c.told[number] {
		c.told[number] = true
		if len(c.told) == want {
			close(c.allTold)
		}
	}
}

// linger keeps the door open for those who have not come yet when two claimed
// the same place: without a word they would wait until their time is over.
func (c *coordinator) linger() {
	c.mu.Lock()
	late := c.verdict != nil && c.verdict.First != nil && !c.closed
	c.mu.Unlock()
	if !late {
		return
	}
	t := time.NewTimer(farewell)
	defer t.Stop()
	select {
	case <-c.allTold:
	case <-t.C:
	}
}

// drain goes on serving the store, for a short time, until the other processes
// have left: what this one has set last may still be on its way to them.
func (c *coordinator) drain() {
	c.mu.Lock()
	if c.world == nil || c.closed {
		c.mu.Unlock()
		return
	}
	c.drained = make(chan struct{})
	c.checkDrained()
	drained := c.drained
	c.mu.Unlock()
	t := time.NewTimer(c.drains)
	defer t.Stop()
	select {
	case <-drained:
	case <-t.C:
	}
}

// checkDrained ends drain when nobody is left, or the job has failed.
func (c *coordinator) checkDrained() {
	left := func(p *peer) bool { return p.state == peerJoined }
	if c.drained == nil || c.faults.lost == nil && slices.ContainsFunc(c.workers, left) {
		return
	}
	select {
	case <-c.drained:
	default:
		close(c.drained)
	}
}

// close tells everybody that the coordinator leaves, sends what is queued, and
// returns when no goroutine is left.
func (c *coordinator) close() {
	c.linger()
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

// remove returns ps without p.
func remove(ps []*peer, p *peer) []*peer {
	return without(ps, func(q *peer) bool { return q == p })
}

// without returns a copy of s without those that are so.
func without[T any](s []T, so func(T) bool) []T { return slices.DeleteFunc(slices.Clone(s), so) }
