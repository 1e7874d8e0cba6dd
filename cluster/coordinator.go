package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// exitGrace is the time between the loss of a worker's connection and the
	// report of its exit by its launcher.
	exitGrace = 500 * time.Millisecond
	// lastMessageTimeout limits the time for a peer to read the last message, and the time
	// for latecomers to connect and learn the reason of a failure.
	lastMessageTimeout = time.Second
	// drainTime limits how long the store remains open after its process called Close.
	drainTime = 500 * time.Millisecond
)

// coordConfig configures a coordinator.
type coordConfig struct {
	job    string
	key    credential
	agents int // hosts of the job; 0: workers join without launchers
	size   int // world size if agents is 0
	self   welcome
	sys    *system
	again  restartPolicy
	// For epochs: the least number of hosts (0: all), and the limits for the arrival of
	// processes, the return of functions and the end of a step.
	least                     int
	joinBy, revokeBy, drainBy time.Duration
	keepOpen                  time.Duration // for keepPortOpen; 0 means lastMessageTimeout
	notify                    func(string)
	path                      func(host host) string // text from gossip about a lost host; may be nil
	// probe looks for the launcher of a host that was last heard at an address; nil without launchers.
	probe func(ctx context.Context, h host, ip string) finding
}

// A coordinator holds the authoritative state of one job: hosts, processes,
// ranks, the store, and the first failure. One lock protects all state; it is
// never held during a wait.
type coordinator struct {
	cfg     coordConfig
	ln      net.Listener
	limiter *connLimiter
	clock   *runClock
	started time.Time
	quit    chan struct{}
	wg      sync.WaitGroup
	drains  time.Duration // drainTime; longer in tests

	mu      sync.Mutex
	closed  bool
	peers   map[string]*peer // all authenticated peers, by id
	agents  []*peer
	late    []*peer // agents that came when the job was complete
	attempt uint64  // number of the current PREPARE; 0 if none
	lastTry uint64
	run     string // of the job; see leader
	term    uint64
	epoch   uint64
	plan    *plan    // nil while hosts may join
	restart *restart // how all processes are started again; nil while they run
	retries retries
	planned time.Time
	workers []*peer // in the order of arrival
	world   *world
	engine  *engine
	stored  atomic.Int64 // bytes of the long values of all epochs that the stores or queued replies have
	elastic *elastic     // if the processes call Run and the first world is complete
	// succession is set while this coordinator wants to replace one that was lost.
	succession  *succession
	elsewhere   time.Time       // when another coordinator was last known to run the job
	electorates []electorate    // they agree on the next epoch
	handedOver  bool            // another coordinator continues
	ended       map[string]bool // hosts whose agents are known to have ended, by UUID
	faults      faults
	flappers    map[string]*flapper // by host name
	gone        []Member            // timed out before the job was complete
	verdict     *refusal            // why the job never became complete
	told        map[int]bool        // ranks, or node numbers, that received the verdict
	allTold     chan struct{}       // closed when all received it
	drained     chan struct{}       // closed when the last worker left; nil unless awaited
	lines       []string            // notifications to send after unlocking
	said        lineFilter

	entries   []entry // that wait for launchers
	lastEntry uint64

	inquiry     *inquiry // nil unless the coordinator waits for reports
	lastInquiry uint64
}

// newCoordinator starts a coordinator on ln and takes ownership of ln. It calls prepare, if not nil, before.
func newCoordinator(ln net.Listener, cfg coordConfig, prepare ...func(*coordinator)) *coordinator {
	c := &coordinator{cfg: cfg, ln: ln, limiter: newConnLimiter(), clock: newRunClock(cfg.self.step()), started: time.Now(), drains: drainTime,
		quit: make(chan struct{}), peers: map[string]*peer{}, run: newUUID(), term: firstTerm, epoch: firstEpoch,
		told: map[int]bool{}, allTold: make(chan struct{})}
	c.clock.sys = cfg.sys
	c.faults = newFaults()
	for _, f := range prepare {
		if f != nil {
			f(c)
		}
	}
	c.cfg.key.run = c.run
	c.wg.Go(c.acceptLoop)
	c.wg.Go(c.waitLoop)
	c.wg.Go(c.watchSilence)
	return c
}

func (c *coordinator) acceptLoop() {
	acceptAll(c.ln, func(reason string) { c.cfg.notify("job " + c.cfg.job + ": " + reason) }, func(conn net.Conn) {
		s, fromPort := conn.(*stranger)
		if !fromPort {
			if err := knownPeer(conn); err != nil { // rejected connections must not occupy the limiter
				conn.Close()
				c.notifyRefused(conn, err)
				return
			}
			s = c.limiter.enter(conn)
		}
		c.wg.Go(func() { c.serve(s) })
	})
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

// serve authenticates one connection and reads it until it ends.
func (c *coordinator) serve(conn *stranger) {
	l, err := acceptHandshake(conn, c.cfg.job, c.cfg.key)
	conn.leave()
	if err != nil {
		conn.Close()
		c.notifyRefused(conn, err)
		return
	}
	hello := c.welcome()
	l.most = maxGuestFrame
	if !l.worker && hello.Elects {
		l.most = maxCharterFrame
	}
	p := newPeer(newStream(l, c.clock, c.cfg.self.LostAfter), peerAddr(conn))
	if l.worker {
		p.most = maxWorkerUnackedBytes
	}
	p.worker, p.renew = l.worker, func(err error) (renewal, error) { return c.awaitLink(p, err) }
	hello.Stream = p.id
	if !c.admit(p) || l.write(frame{body: note(kindWelcome, hello).encode()}, handshakeTimeout) != nil {
		conn.Close()
		c.remove(p)
		return
	}
	go p.writeLoop()
	err = c.readLoop(p)
	p.stopRenewing()
	c.mu.Lock()
	c.disconnected(p, err)
	c.unlock()
	p.closeAfterQueue()
	<-p.done
	p.closeLinks()
	c.remove(p)
}

func (c *coordinator) welcome() welcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.cfg.self
	w.Running, w.Run = c.plan != nil || c.restart != nil, c.run
	if w.Running {
		w.Term = c.term
	}
	if s := c.succession; s != nil {
		w.Elects, w.Epoch = true, s.charter.Epoch
	}
	return w
}

func (c *coordinator) remove(p *peer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.peers, p.id)
}

// notifyRefused notifies the user of this host of a process that failed to authenticate.
func (c *coordinator) notifyRefused(conn net.Conn, why error) {
	if line := strangerLine(conn, why); line != "" {
		c.mu.Lock()
		c.notifyOnce(addrIP(conn.RemoteAddr()), line)
		c.unlock()
	}
}

// notifyOnce queues a notification about a host, unless the same text was already queued.
func (c *coordinator) notifyOnce(ip, text string) {
	if c.said.isNew(ip, text) {
		c.lines = append(c.lines, fmt.Sprintf("job %s: %s", c.cfg.job, text))
	}
}

// unlock releases the lock and then sends the queued notifications.
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
	if c.closed || c.handedOver {
		return false
	}
	c.displaceGuest()
	p.since = c.clock.now()
	c.peers[p.id] = p
	return true
}

func (c *coordinator) readLoop(p *peer) error {
	for {
		b, err := p.read()
		if err != nil {
			return err
		}
		if p.hasHungUp() { // keep the connection open until the peer has read the last message
			continue
		}
		m, err := decodeMessage(b)
		if err != nil {
			return err
		}
		m.fromWorker = p.worker
		switch m.kind {
		case kindBeat:
			p.heardBeat(m)
			p.sendBeat()
		case kindResume:
			if err := c.resume(p, m); err != nil {
				return err
			}
		case kindCall:
			if err := c.call(p, m); err != nil {
				return err
			}
		default:
			if err := c.handle(p, m); err != nil {
				return err
			}
		}
	}
}

// handle handles one message. An error closes the connection.
func (c *coordinator) handle(p *peer, m message) error {
	c.mu.Lock()
	defer c.unlock()
	if c.handedOver {
		return nil
	}
	if m.kind == kindRegister {
		return c.register(p, m)
	}
	if m.kind == kindElsewhere && !p.worker {
		var other elsewhere
		if err := m.record(&other); err != nil {
			return err
		}
		c.jobElsewhere(p, other)
		return nil
	}
	if m.kind == kindSilent && p.role != roleNone {
		c.memberTimedOut(p)
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
		c.sendAttendance(p, m.id)
	case kindStatus:
		c.inquire(p, m.id)
	case kindPrepared:
		if c.elastic != nil {
			c.agentPrepared(p, m.id)
			return nil
		}
		c.prepared(p, m.id)
	case kindRecorded:
		c.recorded(p, m.id)
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
	case kindPath:
		var r pathReport
		if err := m.record(&r); err != nil {
			return err
		}
		c.pathFailed(p, r)
	case kindKill:
		c.tellAgents(message{kind: kindKill, epoch: firstEpoch})
	case kindDone:
		c.later(func() { c.agentDone(p) })
	case kindReady:
		c.agentReady(p)
	case kindDrain:
		var f fault
		if err := m.record(&f); err != nil {
			return err
		}
		c.drainHost(p, f)
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
		c.sendAttendance(p, m.id)
	case kindReport:
		c.reported(p, m)
	case kindCancel:
		if c.world != nil {
			c.engine.cancel(ticket{p.reg.Rank, m.id})
		}
	case kindLeave:
		c.workerLeft(p, m.id == leaveGaveUp)
	default:
		return c.handleAnswer(p, m)
	}
	return nil
}

// call runs a store call of a member of the world. It decodes the call without the lock.
func (c *coordinator) call(p *peer, m message) error {
	req, err := decodeCall(m.body)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.unlock()
	if c.handedOver {
		return nil
	}
	if p.role != roleWorker {
		return errors.New("a store call of a launcher")
	}
	reply := func(r call) { p.send(r.message(kindReply, c.epoch, m.id)) }
	switch {
	case c.world == nil || p.state != peerJoined:
		reply(call{op: statusBad})
		return nil
	case m.epoch != c.epoch || p.seat != c.epoch:
		reply(call{op: statusStale})
		return nil
	}
	c.engine.do(ticket{p.reg.Rank, m.id}, req, reply)
	return nil
}

// newStore replaces the store for a world of size processes.
func (c *coordinator) newStore(size int) {
	c.engine.close()
	c.engine = newEngine(size, &c.stored)
}

// refuse rejects a peer and notifies the user of this host.
func (c *coordinator) refuse(p *peer, r refusal) {
	if c.verdict == nil {
		who := memberList([]Member{p.member()})
		c.notifyOnce(p.addr, fmt.Sprintf("refused %s at %s: %s", who, p.addr, r.why()))
	}
	c.refusePeer(p, r)
}

// refusePeer tells a peer why it cannot join, and closes the connection.
func (c *coordinator) refusePeer(p *peer, r refusal) {
	p.state = peerGone
	p.send(note(kindRefuse, r))
	p.closeAfterQueue()
	if c.verdict == nil {
		return
	}
	number, want := p.reg.Rank, c.size()
	if c.cfg.agents > 0 {
		number, want = p.host.NodeRank, c.cfg.agents
	}
	if number >= 0 && number < want && !c.told[number] {
		c.told[number] = true
		if len(c.told) == want {
			close(c.allTold)
		}
	}
}

// keepPortOpen keeps the port open for members that have not joined yet after no member can
// join, for example because two claimed the same place. Otherwise they would retry until their timeout.
func (c *coordinator) keepPortOpen() {
	c.mu.Lock()
	late := c.verdict != nil && (c.verdict.First != nil || c.verdict.All) && !c.closed
	c.mu.Unlock()
	if !late {
		return
	}
	t := time.NewTimer(cmp.Or(c.cfg.keepOpen, lastMessageTimeout))
	defer t.Stop()
	select {
	case <-c.allTold:
	case <-t.C:
	}
}

// drain serves the store for a short time until the other processes have left:
// they may still be reading values that this process set last.
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

// checkDrained ends drain if all workers have left or the job failed.
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

// close notifies all peers, sends queued messages, and returns when all
// goroutines have ended.
func (c *coordinator) close() {
	c.keepPortOpen()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.cfg.again.most = 0
	c.lastFaults()
	c.closed = true
	for _, p := range c.peers {
		p.send(note(kindEnded, nil))
		p.closeAfterQueue()
	}
	c.mu.Unlock()
	close(c.quit)
	c.ln.Close()
	c.limiter.close()
	c.wg.Wait()
}

// reasonOf describes why a connection ended.
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

// without returns a copy of s without the elements that so selects.
func without[T any](s []T, so func(T) bool) []T { return slices.DeleteFunc(slices.Clone(s), so) }
