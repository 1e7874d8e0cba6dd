package job

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// lastMessageTimeout limits the time for a peer to read the last message, and the time
	// for latecomers to connect and learn the reason of a failure.
	lastMessageTimeout = time.Second
	// drainTime limits how long the store remains open after its process called Close.
	drainTime = 500 * time.Millisecond
)

// ServerConfig configures a server.
type ServerConfig struct {
	CoordConfig
	Job      string
	Key      Credential
	Sys      *System
	KeepOpen time.Duration // for keepPortOpen; 0 means lastMessageTimeout
	Notify   func(string)
	Delisted func(Departure, int)   // called with the number of Departures when a member is not on the list of a registry any more; may be nil
	Over     chan struct{}          // closed when the world was complete or has failed, and its processes have left; may be nil
	path     func(host host) string // text from gossip about a lost host; may be nil
	// probe looks for the launcher of a host that was last heard at an address; nil without launchers.
	probe func(ctx context.Context, h host, ip string) finding
}

// A Server connects a coordinator to the processes of its job: it accepts connections, turns messages, losses and time into
// events, and carries out the coordinator's actions. It also has the store. One lock protects all state; it is never held during
// a wait.
type Server struct {
	cfg          ServerConfig
	ln           net.Listener
	limiter      *connLimiter
	clock        *runClock
	quit         chan struct{}
	wg           sync.WaitGroup
	Drains       time.Duration // drainTime; longer in tests
	starved      time.Duration // how long the clock had stood still when the coordinator learned that last
	timer        *time.Timer   // runs at the coordinator's next deadline
	excusedUntil instant       // until then, no member on another host is lost for its silence

	mu sync.Mutex
	*coordinator
	conns       map[string]*conn // all authenticated connections, by id
	engine      *engine
	stored      atomic.Int64  // bytes of the long values of all epochs that the stores or queued replies have
	allNotified chan struct{} // closed when all members know why none can join
	drained     chan struct{} // closed when the last worker left; nil unless awaited
	changed     chan struct{} // closed when the list of a registry changes
	gone        []delisted    // from the list of a registry, to report after unlocking
	lines       []string      // notifications to send after unlocking
	said        lineFilter

	inquiry     *inquiry // nil unless the coordinator waits for reports
	lastInquiry uint64
}

// NewServer starts a coordinator on ln, which it takes ownership of, with first
// as its first event, if not nil.
func NewServer(ln net.Listener, cfg ServerConfig, first ...event) *Server {
	s := &Server{cfg: cfg, ln: ln, limiter: newConnLimiter(), clock: NewRunClock(cfg.Self.step()), Drains: drainTime,
		quit: make(chan struct{}), conns: map[string]*conn{}, allNotified: make(chan struct{}), changed: make(chan struct{})}
	s.clock.sys = cfg.Sys
	s.cfg.probes = cfg.probe != nil
	s.timer = time.AfterFunc(time.Hour, s.timeUp)
	s.coordinator = newCoordinator(s.cfg.CoordConfig, newUUID(), s.now())
	for _, e := range append(first, nil) {
		_ = s.happen(e) // these events have no peer
	}
	s.cfg.Key.run = s.run
	s.wg.Go(s.acceptLoop)
	s.wg.Go(s.watchSilence)
	return s
}

// now returns the time for the coordinator, which is never 0.
func (s *Server) now() instant { return s.clock.now() + 1 }

// happen lets an event happen to the coordinator.
func (s *Server) happen(e event) error {
	s.mu.Lock()
	defer s.unlock()
	return s.step(e)
}

// step lets an event happen, and carries out what the coordinator decides. The caller holds the lock.
func (s *Server) step(e event) error {
	if starved := s.clock.starved(); starved-s.starved > s.cfg.Self.LostAfter/4 {
		s.starved = starved
		_ = s.step(stalled{}) // it has no peer
	}
	actions, err := s.coordinator.step(s.now(), e)
	for _, a := range actions {
		s.do(a)
	}
	if s.hasNotifiedAll() {
		closeOnce(s.allNotified)
	}
	if s.drained != nil && s.hasDrained() {
		closeOnce(s.drained)
	}
	if s.cfg.Over != nil && s.isOver() {
		closeOnce(s.cfg.Over)
	}
	if at, ok := s.next(); ok {
		s.timer.Reset(at - s.now())
	} else {
		s.timer.Stop()
	}
	return err
}

func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}

// timeUp runs when a deadline should have passed, and sets the timer again if
// the coordinator's clock has stood still meanwhile.
func (s *Server) timeUp() {
	s.cfg.Sys.await()
	s.mu.Lock()
	defer s.unlock()
	if at, ok := s.next(); ok && s.now() < at {
		s.timer.Reset(max(at-s.now(), time.Millisecond))
		return
	}
	_ = s.step(nil)
}

// do carries out an action.
func (s *Server) do(a action) {
	switch a := a.(type) {
	case send:
		m := a.m.encode()
		for _, p := range a.to {
			if k := s.conns[p.id]; k != nil {
				k.send(m)
			}
		}
	case hangUp:
		if k := s.conns[a.p.id]; k != nil {
			k.closeAfterQueue()
		}
	case hangUpUnregistered:
		m := a.m.encode()
		for _, k := range s.conns {
			if k.peer.role == roleNone {
				k.peer.state = peerGone
				k.send(m)
				k.closeAfterQueue()
			}
		}
	case admit:
		if k := s.conns[a.p.id]; k != nil {
			k.reading.most = 0 // the reader of the peer is here
		}
	case awaitNoLink:
		if k := s.conns[a.p.id]; k != nil {
			k.end()
		}
	case openStore:
		s.engine.close()
		if s.engine = nil; a.size > 0 {
			s.engine = newEngine(a.size, &s.stored)
		}
	case leaveStore:
		s.engine.dropRank(a.rank)
	case probe:
		s.wg.Go(func() { _ = s.happen(probed{s.probeAll(a.hosts, a.limit)}) })
	case notify:
		if a.ip == "" || s.said.isNew(a.ip, a.line) {
			s.lines = append(s.lines, a.line)
		}
	case listed:
		close(s.changed)
		s.changed = make(chan struct{})
	case delisted:
		if s.cfg.Delisted != nil {
			s.gone = append(s.gone, a)
		}
	case observe:
		s.cfg.Sys.observe(s.coordinator, a.begun)
	}
}

// probeAll probes hosts side by side for at most limit, and returns those that have answered.
func (s *Server) probeAll(hs []host, limit time.Duration) map[string]bool {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	found := make([]finding, len(hs))
	var all sync.WaitGroup
	for i, h := range hs {
		if h.Control != "" {
			all.Go(func() { found[i] = s.cfg.probe(ctx, h, "") })
		}
	}
	all.Wait()
	alive := map[string]bool{}
	for i, h := range hs {
		if found[i] == foundAlive {
			alive[h.UUID] = true
		}
	}
	return alive
}

// unlock releases the lock and then sends the queued notifications.
func (s *Server) unlock() {
	lines, gone := s.lines, s.gone
	s.lines, s.gone = nil, nil
	s.mu.Unlock()
	for _, l := range lines {
		s.notify(l)
	}
	for _, d := range gone {
		s.cfg.Delisted(d.Departure, d.number)
	}
}

// notify tells the user of this host a line.
func (s *Server) notify(line string) { s.cfg.Notify("job " + s.cfg.Job + ": " + line) }

func (s *Server) acceptLoop() {
	acceptAll(s.ln, s.notify, func(c net.Conn) {
		limited, fromPort := c.(*limitedConn)
		if !fromPort {
			if err := knownPeer(c); err != nil { // rejected connections must not occupy the limiter
				c.Close()
				s.said.refuse(c, err, s.notify)
				return
			}
			limited = s.limiter.enter(c)
		}
		s.wg.Go(func() { s.serve(limited) })
	})
}

// serve authenticates one connection and reads it until it ends.
func (s *Server) serve(c *limitedConn) {
	l, err := AcceptHandshake(c, s.cfg.Job, s.cfg.Key)
	c.leave()
	if err != nil {
		c.Close()
		s.said.refuse(c, err, s.notify)
		return
	}
	s.mu.Lock()
	hello := s.welcome()
	s.mu.Unlock()
	l.most = maxUnregisteredFrame
	if !l.Worker && hello.Elects {
		l.most = maxHistoryFrame
	}
	k := newConn(NewStream(l, s.clock, s.cfg.Self.LostAfter), peerAddr(c), l.Worker)
	if l.Worker {
		k.most = maxWorkerUnackedBytes
	}
	k.renew = func(err error) (renewal, error) { return s.awaitLink(k, err) }
	hello.Stream = k.peer.id
	if !s.admits(k) || l.Write(Frame{Body: Note(KindWelcome, hello).Encode()}, HandshakeTimeout) != nil {
		c.Close()
		s.forget(k)
		return
	}
	go k.writeLoop()
	err = s.readLoop(k)
	k.stopRenewing()
	s.disconnects(k, err)
	k.closeAfterQueue()
	<-k.done
	k.closeLinks()
	s.forget(k)
}

// admits adds a connection, and reports whether the coordinator still takes any.
func (s *Server) admits(k *conn) bool {
	s.mu.Lock()
	defer s.unlock()
	if s.closed || s.handedOver {
		return false
	}
	s.displaceUnregistered()
	s.conns[k.peer.id] = k
	_ = s.step(connected{k.peer}) // never fails
	return true
}

func (s *Server) forget(k *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, k.peer.id)
}

// disconnects tells the coordinator of the end of a connection.
func (s *Server) disconnects(k *conn, err error) {
	s.mu.Lock()
	defer s.unlock()
	p := k.peer
	e := ending{closed: isClosedByPeer(err), reason: reasonOf(err, s.silenceLimit()), found: k.found, certain: k.isCertain(s.cfg.Self.LostAfter)}
	if s.cfg.path != nil && p.role == roleAgent && s.plan != nil {
		e.path = s.cfg.path(p.host)
	}
	_ = s.step(disconnected{p, e}) // the connection is over
}

// encode returns the message for a stream.
func (m msg) encode() Message {
	out := Message{Kind: m.kind, Epoch: m.epoch, ID: m.id}
	if m.rec != nil {
		if m.rec.encoded == nil {
			m.rec.encoded = Note(m.kind, m.rec.value).Body
		}
		out.Body = m.rec.encoded
	}
	return out
}

// records are the records of messages that a coordinator receives. Other messages have none.
var records = map[Kind]func() any{
	kindElsewhere: func() any { return new(elsewhere) },
	kindExit:      func() any { return new(Exit) },
	kindStop:      func() any { return new(Fault) },
	kindDrain:     func() any { return new(Fault) },
	KindFailed:    func() any { return new(Fault) },
	kindPath:      func() any { return new(pathReport) },
}

// decode returns a message for the coordinator.
func (m Message) decode() (msg, error) {
	out := msg{kind: m.Kind, epoch: m.Epoch, id: m.ID}
	create := records[m.Kind]
	if m.Kind == kindRegister {
		if create = func() any { return new(Registration) }; m.ID == registerAgent {
			create = func() any { return new(host) }
		}
	}
	if create == nil {
		return out, nil
	}
	out.rec = &record{value: create()}
	return out, m.Record(out.rec.value)
}

func (s *Server) readLoop(k *conn) error {
	for {
		b, err := k.read()
		if err != nil {
			return err
		}
		if k.hasHungUp() { // keep the connection open until the peer has read the last message
			continue
		}
		m, err := DecodeMessage(b)
		if err != nil {
			return err
		}
		m.fromWorker = k.peer.worker
		if m.Kind == kindBeat {
			k.heardBeat(m)
			k.SendBeat()
		}
		if err := s.handleMessage(k, m); err != nil {
			return err
		}
	}
}

// handleMessage handles one message. An error closes the connection.
func (s *Server) handleMessage(k *conn, m Message) error {
	p := k.peer
	switch m.Kind {
	case kindBeat:
		s.mu.Lock()
		p.heard = s.now()
		s.mu.Unlock()
		return nil
	case kindResume:
		return s.resume(k, m)
	case KindCall:
		return s.call(k, m)
	case KindWho, kindStatus, kindReport, kindCancel:
		s.mu.Lock()
		defer s.unlock()
		p.heard = s.now()
		return s.question(k, m)
	}
	in, err := m.decode()
	if err != nil {
		return err
	}
	return s.happen(received{p, in})
}

// question handles a message about which the coordinator decides nothing.
func (s *Server) question(k *conn, m Message) error {
	isAgent, isWorker := k.peer.role == roleAgent, k.peer.role == roleWorker
	switch {
	case s.handedOver:
	case m.Kind == KindWho && (isAgent || isWorker):
		s.sendAttendance(k, m.ID)
	case m.Kind == kindStatus && isAgent:
		s.inquire(k, m.ID)
	case m.Kind == kindReport && isWorker:
		s.reported(k.peer, m)
	case m.Kind == kindCancel && isWorker:
		if s.world != nil {
			s.engine.cancel(ticket{k.peer.reg.Rank, m.ID})
		}
	default:
		return fmt.Errorf("message of kind %d in role %d", m.Kind, k.peer.role)
	}
	return nil
}

// call runs a store call of a member of the world, which it decodes without the
// lock.
func (s *Server) call(k *conn, m Message) error {
	req, err := decodeCall(m.Body)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.unlock()
	p := k.peer
	if p.heard = s.now(); s.handedOver {
		return nil
	}
	reply := func(r Call) { k.send(r.message(kindReply, s.epoch, m.ID)) }
	status, err := s.mayCall(p, m.Epoch)
	switch {
	case err != nil:
		return err
	case status != StatusOK:
		reply(Call{Op: status})
		return nil
	}
	s.engine.do(ticket{p.reg.Rank, m.ID}, req, reply)
	return nil
}

// sendAttendance answers a request for the attendance. The record of a large world is long, so it is encoded without
// the lock, and once for all requests of a peer that have come meanwhile.
func (s *Server) sendAttendance(k *conn, id uint64) {
	if len(k.inquiries) >= maxNamed {
		return // it asks faster than it can be answered
	}
	k.inquiries = append(k.inquiries, id)
	if len(k.inquiries) > 1 || s.closed {
		return
	}
	r := s.attendance()
	s.wg.Go(func() {
		m := Note(kindAttendance, r)
		s.mu.Lock()
		defer s.unlock()
		for _, id := range k.inquiries {
			m.ID = id
			k.send(m)
		}
		k.inquiries = nil
	})
}

// Decide ends the join of all members after this process's own join timed out,
// and does nothing on nil.
func (s *Server) Decide(err error) {
	e, ok := errors.AsType[*JoinTimeoutError](err)
	if s == nil || !ok || e.Want == 0 {
		return
	}
	_ = s.happen(gaveUp{e.attendance(), e.Waited}) // it has no peer
}

// List returns the members of a registry with their values, in the order in
// which they came, and a channel that is closed when the list changes.
func (s *Server) List() (list []Registration, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.workers {
		list = append(list, p.reg)
	}
	return list, s.changed
}

// Departed returns the last members that have left the registry or were lost.
func (s *Server) Departed() []Departure {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.departed
}

// Departures returns the number of members that have left the registry or were lost so far.
func (s *Server) Departures() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.departures
}

// Invite sends members of the registry to the coordinator of a world, or returns why it invites none of them.
func (s *Server) Invite(names []string, to Invitation) error { return s.happen(invite{names, to}) }

// Absent tells the coordinator of a world that a process has left its registry, or is lost.
func (s *Server) Absent(f Fault, left bool) { _ = s.happen(absent{f, left}) }

// IsComplete reports whether all processes of the world have come.
func (s *Server) IsComplete() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.world != nil
}

// TimeUp ends the join of the world after a time, unless it is complete.
func (s *Server) TimeUp(waited time.Duration) {
	s.mu.Lock()
	r := s.attendance()
	s.mu.Unlock()
	_ = s.happen(gaveUp{r, waited}) // it has no peer
}

// keepPortOpen keeps the port open for members that have not joined yet after no member can
// join, for example because two claimed the same place. Otherwise they would retry until their timeout.
func (s *Server) keepPortOpen() {
	s.mu.Lock()
	late := s.joinFailure != nil && (s.joinFailure.First != nil || s.joinFailure.All) && !s.closed
	s.mu.Unlock()
	if !late {
		return
	}
	t := time.NewTimer(cmp.Or(s.cfg.KeepOpen, lastMessageTimeout))
	defer t.Stop()
	select {
	case <-s.allNotified:
	case <-t.C:
	}
}

// Drain serves the store for a short time until the other processes have left:
// they may still be reading values that this process set last.
func (s *Server) Drain() {
	s.mu.Lock()
	if s.world == nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.drained = make(chan struct{})
	_ = s.step(nil) // perhaps they have left
	drained := s.drained
	s.unlock()
	t := time.NewTimer(s.Drains)
	defer t.Stop()
	select {
	case <-drained:
	case <-t.C:
	}
}

// Close notifies all peers, sends queued messages, and returns when all
// goroutines have ended.
func (s *Server) Close() {
	s.keepPortOpen()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	_ = s.step(closing{}) // it has no peer
	for _, k := range s.conns {
		k.send(Note(kindEnded, nil))
		k.closeAfterQueue()
	}
	s.unlock()
	close(s.quit)
	s.ln.Close()
	s.limiter.close()
	s.wg.Wait()
	s.mu.Lock()
	defer s.unlock()
	if s.cfg.Registry {
		s.workers = nil
		s.do(listed{})
	}
}

// missed returns the time until no launcher that was lost comes back to learn that the program has ended.
func (s *Server) missed() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.coordinator.missed(s.now())
}

// reasonOf describes why a connection ended.
func reasonOf(err error, lostAfter time.Duration) string {
	switch {
	case errors.Is(err, errNotBack):
		return fmt.Sprintf("its connection closed, and it did not connect again within %v", lostAfter)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Sprintf("silent for %v: stopped, starved or unreachable", lostAfter)
	case isClosedByPeer(err):
		return "its connection closed: the process ended without Close or Shutdown"
	default:
		return fmt.Sprintf("its connection failed: %v", err)
	}
}

// isClosedByPeer reports whether the other process closed the connection or
// exited.
func isClosedByPeer(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
