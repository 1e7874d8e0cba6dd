package job

import (
	"container/heap"
	"errors"
	"fmt"
	"slices"
	"time"
)

// The decisions of a coordinator are a function of its state and of events: coordinator.step. It uses no goroutines, locks,
// connections, files or clocks, so that tests and simulations drive it directly, and the same events always lead to the same
// decisions. A server (server.go) turns what happens to its connections into events, and carries out the actions.

// An instant is a time of the coordinator's clock, which stands still while its process is suspended or starved. 0 means never.
type instant = time.Duration

// An event happens to a coordinator.
type event interface{ happen(c *coordinator) error }

type (
	// connected: an authenticated process has connected.
	connected struct{ p *peer }
	// received: a peer has sent a message.
	received struct {
		p *peer
		m msg
	}
	// disconnected: the connection of a peer has ended, and the peer has not connected again.
	disconnected struct {
		p   *peer
		why ending
	}
	// probed: the hosts that an action of type probe has named have answered, or not.
	probed struct{ alive map[string]bool }
	// candidacy: this coordinator offers to continue the job of a history, whose hosts have lost the last coordinator some time ago.
	candidacy struct {
		history history
		ago     time.Duration
	}
	// registered: the host of this candidate has registered with another candidate at an address, or with this one ("").
	registered struct{ addr string }
	// gaveUp: the join of this process has timed out.
	gaveUp struct {
		attendance attendance
		waited     time.Duration
	}
	// stalled: this process was suspended or starved for a large part of the limit of silence.
	stalled struct{}
	// closing: this process closes the coordinator.
	closing struct{}
)

// A finding is what an attempt to reach the port of a launcher shows about its process.
type finding int

const (
	foundNothing finding = iota // silence, and answers of strangers, prove nothing
	foundAlive                  // the launcher has answered, and takes part in the job
	foundEnded                  // its port is closed, or another launcher of the job has it
)

// An ending describes the end of a connection.
type ending struct {
	closed  bool    // the other process has closed the connection, or has ended
	reason  string  // such as "its connection failed: …"
	found   finding // about the launcher's process
	certain bool    // the launcher cannot have lost this coordinator for silence
	path    string  // what gossip knows of the path to the host, or ""
}

// An action is what the server must do for a coordinator. Actions are carried out in order.
type action interface{}

type (
	// send sends a message to peers.
	send struct {
		to []*peer
		m  msg
	}
	// hangUp ends connections after the messages that were sent.
	hangUp struct{ p *peer }
	// hangUpUnregistered sends a message to all processes that have not registered, and ends their connections.
	hangUpUnregistered struct{ m msg }
	// admit lifts the limits of a peer that is not a member.
	admit struct{ p *peer }
	// awaitNoLink gives up the connection of a process that has exited as soon as it ends: the process will not connect again.
	awaitNoLink struct{ p *peer }
	// openStore replaces the store by an empty one for a world of a size; 0 means none.
	openStore struct{ size int }
	// leaveStore ends the part of a rank in the store.
	leaveStore struct{ rank int }
	// probe asks for the event probed.
	probe struct {
		hosts []host
		limit time.Duration
	}
	// notify tells the user of this host a line. A line about a process at ip is dropped if it was told lately.
	notify struct {
		ip, line string
	}
	// observe shows a simulation that an epoch was proposed, or has begun.
	observe struct{ begun bool }
)

// A msg is a message with its record. Messages to many peers share one record, which is encoded once.
type msg struct {
	kind      Kind
	epoch, id uint64
	rec       *record
}

// A record is the content of a message.
type record struct {
	value   any
	encoded []byte
}

// say returns a message with a record.
func say(k Kind, v any) msg { return msg{kind: k, epoch: FirstEpoch, rec: &record{value: v}} }

// step handles an event at a time, after the deadlines until then, and returns
// what must be done. A nil event only advances the time. An error means that
// the peer of the event has violated the protocol.
func (c *coordinator) step(now instant, e event) ([]action, error) {
	c.now = max(c.now, now)
	for !c.closed && !c.handedOver && len(c.deadlines) > 0 && c.deadlines[0].at <= c.now {
		c.pass(heap.Pop(&c.deadlines).(deadline))
	}
	var err error
	if e != nil {
		err = e.happen(c)
	}
	out := c.actions
	c.actions = nil
	return out, err
}

// next returns the next deadline. If there is none, ok is false.
func (c *coordinator) next() (at instant, ok bool) {
	if c.closed || c.handedOver || len(c.deadlines) == 0 {
		return 0, false
	}
	return c.deadlines[0].at, true
}

func (c *coordinator) act(a action) { c.actions = append(c.actions, a) }

func (c *coordinator) send(p *peer, m msg) { c.act(send{[]*peer{p}, m}) }

// hangUp ends a peer's connection.
func (c *coordinator) hangUp(p *peer) { c.act(hangUp{p}) }

// say tells the user of this host a line.
func (c *coordinator) say(text string) { c.act(notify{line: text}) }

// sayOf tells the user of this host a line about a process at ip.
func (c *coordinator) sayOf(ip, text string) { c.act(notify{ip, text}) }

// silent returns for how long nothing has arrived from a peer.
func (c *coordinator) silent(p *peer) time.Duration { return c.now - p.heard }

// due is what a deadline is for.
type due int

const (
	// Of a phase: they have no effect after it.
	dueSettled  due = iota // losses that belong together have happened
	dueReturned            // all functions should have returned
	dueHeld                // all members should have come to the end of a step
	dueMembers             // there should be enough members
	dueAnswers             // the proposal should have been answered
	dueGathered            // processes that start together have come
	dueHope                // look again whether processes may come
	dueLease               // hosts that are lost follow this coordinator no more
	dueBack                // after a takeover, the members should have come back
	// Of what follows c.elastic, c.restart, c.succession or c.faults.pending:
	dueDeath    // a launcher should have killed a process
	dueMajority // after a takeover, hosts that are needed should have come
	dueReturnTo // an excluded host may take part again
	dueBackoff  // the back-off of a restart is over
	dueVoters   // voters should have come
	dueLook     // look for voters
	dueLedger   // the same, for an entry of the ledger
	dueReport   // the second half of a loss should have come
	dueExit     // a launcher should have reported an exit
	dueOwnExit  // a process that has failed should have exited
	dueKill     // try again to order a kill
	dueProposal // look again whether a plan can be proposed
	dueWaitLine // tell the user who is missing
)

// A deadline is something to do at a time. It has only the fields that it needs.
type deadline struct {
	at     instant
	number uint64 // deadlines of one time pass in the order in which they were set
	what   due
	turn   uint64 // the phase of the epoch that it belongs to
	of     any    // the *elastic, *restart, *succession or *pending that it belongs to
	peer   *peer
	place  place
	pid    int
	fault  Fault
}

// after sets a deadline.
func (c *coordinator) after(d time.Duration, x deadline) {
	c.lastDeadline++
	x.at, x.number = c.now+max(d, 0), c.lastDeadline
	heap.Push(&c.deadlines, x)
}

// inPhase sets a deadline that has no effect if the phase has changed by then.
func (c *coordinator) inPhase(d time.Duration, what due) {
	c.after(d, deadline{what: what, of: c.elastic, turn: c.elastic.turn})
}

// pass does what is due.
func (c *coordinator) pass(d deadline) {
	if d.what <= dueBack {
		if e := c.elastic; e != nil && d.of == e && e.turn == d.turn && !e.over {
			c.passPhase(d.what)
		}
		return
	}
	switch d.what {
	case dueDeath:
		if c.elastic != nil && d.of == c.elastic && c.elastic.dying[d.place] == d.pid {
			c.hasDied(d.place)
		}
	case dueMajority:
		switch {
		case d.of != c.elastic || !c.isDeciding():
		case !c.hasMajority():
			c.endMinority()
		case c.elastic.phase == phaseWait:
			c.form()
		}
	case dueReturnTo:
		if c.isElastic() {
			c.checkChanges()
		}
	case dueBackoff:
		if r := d.of.(*restart); true {
			r.due = true
			c.tryPropose()
		}
	case dueVoters:
		s := d.of.(*succession)
		if s.due = true; c.succession == s {
			c.trySucceed()
		}
	case dueLook:
		if c.succession != nil && d.of == c.succession {
			c.lookForVoters()
		}
	case dueLedger:
		c.checkRecorded()
	case dueReport:
		if w := c.faults.pending; w != nil && d.of == w {
			c.resolve(w.fault, tellAll)
		}
	case dueExit:
		if c.isElastic() {
			c.loseWorker(d.peer, d.fault)
		}
	case dueOwnExit:
		c.send(d.peer, killOf(d.place.local, d.pid))
	case dueKill:
		if d.peer.state != peerGone {
			c.sendKill(d.peer, d.place.local, d.pid)
		}
	case dueProposal:
		c.tryPropose()
	case dueWaitLine:
		if line := c.waitingLine(); line != "" {
			c.say(line)
		}
		c.after(WaitLine, deadline{what: dueWaitLine})
	}
}

// passPhase does what is due in the phase of the epoch.
func (c *coordinator) passPhase(what due) {
	switch what {
	case dueSettled:
		c.checkReturned()
	case dueReturned:
		c.killRunning()
	case dueHeld:
		c.revokePlanned()
	case dueMembers:
		c.endElastic(fmt.Sprintf("not enough processes for %v", c.sinceEnd().Round(100*time.Millisecond)))
	case dueAnswers:
		c.loseUnprepared()
	case dueGathered:
		c.beginHold(c.arrivals())
	case dueHope:
		c.checkHope()
	case dueLease:
		c.checkPrepared()
	case dueBack:
		c.giveUpAbsent()
	}
}

// deadlines is a heap.
type deadlines []deadline

func (d deadlines) Len() int { return len(d) }

func (d deadlines) Less(i, j int) bool {
	return d[i].at < d[j].at || d[i].at == d[j].at && d[i].number < d[j].number
}

func (d deadlines) Swap(i, j int) { d[i], d[j] = d[j], d[i] }

func (d *deadlines) Push(x any) { *d = append(*d, x.(deadline)) }

func (d *deadlines) Pop() any {
	old := *d
	x := old[len(old)-1]
	old[len(old)-1] = deadline{}
	*d = old[:len(old)-1]
	return x
}

const (
	// ExitGrace is the time between the loss of a worker's connection and the
	// report of its exit by its launcher.
	ExitGrace = 500 * time.Millisecond
	// WaitLine is the interval of messages about missing members.
	WaitLine = 5 * time.Second
)

// CoordConfig configures a coordinator.
type CoordConfig struct {
	agents int // hosts of the job; 0: workers join without launchers
	Size   int // world size if agents is 0
	// Peers identifies the list of peers that all processes must have, or is "".
	Peers string
	// Registry is true for a coordinator without a world, which has a list of members that come and leave.
	Registry bool
	Self     Welcome
	again    restartPolicy
	// For epochs: the least number of hosts (0: all), and the limits for the arrival of
	// processes, the return of functions and the end of a step.
	least                     int
	JoinBy, RevokeBy, DrainBy time.Duration
	probes                    bool // the server can look for launchers
}

// A coordinator decides for one job: it knows hosts, processes, ranks, epochs and the first failure. See step for
// how it is called.
type coordinator struct {
	cfg          CoordConfig
	now          instant
	actions      []action
	deadlines    deadlines
	lastDeadline uint64
	closed       bool
	started      instant

	agents  []*peer
	late    []*peer // agents that came when the job was complete
	attempt uint64  // number of the current request for votes; 0 if none
	lastTry uint64
	run     string // of the job; see leader
	term    uint64
	epoch   uint64
	plan    *plan    // nil while hosts may join
	restart *restart // how all processes are started again; nil while they run
	retries retries
	planned instant
	workers []*peer // by arrival
	world   *World
	elastic *elastic // if the processes call Run and the first world is complete
	// succession is set while this coordinator wants to replace one that was lost.
	succession  *succession
	elsewhere   instant              // when another coordinator was last known to run the job
	voterSets   []voterSet           // they agree on the next epoch
	handedOver  bool                 // another coordinator continues
	ended       map[string]bool      // hosts whose agents are known to have ended, by UUID
	away        map[string]straggler // launchers that are lost here and are not known to have ended, by UUID
	faults      faults
	flappers    map[string]*flapper // by host name
	gone        []Member            // timed out before the job was complete
	refused     []string            // processes that came and did not fit, with the reasons
	joinFailure *Refusal            // why the job never became complete
	notified    map[int]bool        // ranks, or node numbers, that received joinFailure
	departed    []Departure         // the last members that a registry has lost
	departures  int                 // all members that a registry has lost

	entries   []entry // that wait for launchers
	lastEntry uint64
}

// newCoordinator returns a coordinator of a run of a job, which begins at now.
func newCoordinator(cfg CoordConfig, run string, now instant) *coordinator {
	c := &coordinator{cfg: cfg, now: now, run: run, term: firstTerm, epoch: FirstEpoch, faults: newFaults(), notified: map[int]bool{}}
	c.started = now
	c.after(WaitLine, deadline{what: dueWaitLine})
	return c
}

// welcome returns the first message for processes that connect.
func (c *coordinator) welcome() Welcome {
	w := c.cfg.Self
	w.Running, w.Run = c.plan != nil || c.restart != nil, c.run
	if w.Running {
		w.Term, w.Epoch = c.term, c.epoch
	}
	if s := c.succession; s != nil {
		w.Elects, w.Epoch, w.Hosts, w.At = true, s.history.Epoch, len(c.present()), s.other
	}
	return w
}

func (e connected) happen(c *coordinator) error {
	e.p.since, e.p.heard = c.now, c.now
	return nil
}

func (e received) happen(c *coordinator) error {
	e.p.heard = c.now
	return c.handle(e.p, e.m)
}

func (e disconnected) happen(c *coordinator) error {
	c.disconnected(e.p, e.why)
	return nil
}

// The others may have lost this coordinator meanwhile. Their answers to a proposal were perhaps sent before that, so that it asks them
// again.
func (stalled) happen(c *coordinator) error {
	if c.isElastic() && c.elastic.phase == phasePropose && c.faults.stop == nil {
		c.form()
	}
	return nil
}

func (closing) happen(c *coordinator) error {
	c.cfg.again.most = 0
	c.lastFaults()
	c.closed = true
	return nil
}

// handle handles one message. An error closes the connection.
func (c *coordinator) handle(p *peer, m msg) error {
	if c.handedOver {
		return nil
	}
	switch {
	case m.kind == kindRegister:
		return c.register(p, m)
	case m.kind == kindElsewhere && !p.worker:
		c.jobElsewhere(p, *m.rec.value.(*elsewhere))
		return nil
	case m.kind == KindSilent && p.role != roleNone:
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

func (c *coordinator) handleAgent(p *peer, m msg) error {
	switch m.kind {
	case kindVote:
		c.voted(p, m.id)
	case kindAccepted:
		c.accepted(p, m.id)
	case kindRecorded:
		c.recorded(p, m.id)
	case kindExit:
		c.exited(p, *m.rec.value.(*Exit))
	case kindStop:
		c.stopped(p, *m.rec.value.(*Fault))
	case kindPath:
		c.pathFailed(p, *m.rec.value.(*pathReport))
	case kindKill:
		c.tellAgents(msg{kind: kindKill, epoch: FirstEpoch})
	case kindDone:
		c.later(func() { c.agentDone(p) })
	case kindReady:
		c.agentReady(p)
	case kindDrain:
		c.drainHost(p, *m.rec.value.(*Fault))
	case kindLeave:
		c.loseAgent(p, agentEnd{reason: "its launcher left before its workers had exited", ended: m.id != leaveForAnother, left: true, knows: true, gaveUp: m.id == leaveGaveUp})
	default:
		return fmt.Errorf("message of kind %d from an agent", m.kind)
	}
	return nil
}

func (c *coordinator) handleWorker(p *peer, m msg) error {
	if m.kind == kindLeave {
		c.workerLeft(p, m.id == leaveGaveUp)
		return nil
	}
	return c.handleAnswer(p, m)
}

var errStoreCallOfLauncher = errors.New("a store call of a launcher")

// mayCall checks a store call of a peer, and returns the status of its reply.
func (c *coordinator) mayCall(p *peer, epoch uint64) (byte, error) {
	switch {
	case p.role != roleWorker:
		return 0, errStoreCallOfLauncher
	case c.world == nil || p.state != peerJoined:
		return statusBad, nil
	case epoch != c.epoch || p.seat != c.epoch:
		return StatusStale, nil
	}
	return StatusOK, nil
}

// refuse rejects a peer and notifies the user of this host.
func (c *coordinator) refuse(p *peer, r Refusal) {
	if c.joinFailure == nil {
		who := memberList([]Member{p.member()})
		c.sayOf(p.addr, fmt.Sprintf("refused %s at %s: %s", who, p.addr, r.why()))
	}
	c.refusePeer(p, r)
}

// refusePeer tells a peer why it cannot join, and closes the connection.
func (c *coordinator) refusePeer(p *peer, r Refusal) {
	p.state = peerGone
	c.send(p, say(KindRefuse, r))
	c.hangUp(p)
	if c.joinFailure == nil {
		return
	}
	number, want := p.reg.Rank, c.size()
	if c.cfg.agents > 0 {
		number, want = p.host.NodeRank, c.cfg.agents
	}
	if number >= 0 && number < want {
		c.notified[number] = true
	}
}

// hasNotifiedAll reports whether all members know why none can join.
func (c *coordinator) hasNotifiedAll() bool {
	want := c.size()
	if c.cfg.agents > 0 {
		want = c.cfg.agents
	}
	return c.joinFailure != nil && len(c.notified) == want
}

// hasDrained reports whether all workers have left, or the job has failed.
func (c *coordinator) hasDrained() bool {
	return c.faults.lost != nil || !slices.ContainsFunc(c.workers, func(p *peer) bool { return p.state == peerJoined })
}

// isOver reports whether a world was complete or has failed, and all its processes have left. Another process may still come and
// learn of the failure.
func (c *coordinator) isOver() bool {
	return (c.world != nil || c.faults.lost != nil || c.joinFailure != nil) && !slices.ContainsFunc(c.workers, func(p *peer) bool { return p.state == peerJoined })
}

// attendance returns the members that have joined, of the hosts or of the workers.
func (c *coordinator) attendance() attendance {
	var r attendance
	if c.cfg.agents > 0 && c.plan == nil {
		r = attendance{Unit: unitHost, Want: c.cfg.agents, Have: append(members(c.agents), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Node })
	} else {
		r = attendance{Unit: UnitProcess, Want: c.size(), Have: append(members(c.workers), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Rank })
	}
	r.Gone, r.Refused, r.Elastic = c.gone, c.refused, c.isElastic()
	return r
}

// size returns the world size, or 0 while the hosts are not known.
func (c *coordinator) size() int {
	if c.cfg.agents == 0 {
		return c.cfg.Size
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

// missing returns the numbers of the missing members, at most maxMissing of them, or nil if
// the joined members have no numbers.
func missing(r attendance, number func(Member) int) []int {
	come := map[int]bool{}
	for _, m := range r.Have {
		if number(m) < 0 {
			return nil
		}
		come[number(m)] = true
	}
	var ns []int
	for n := range r.Want {
		if len(ns) == maxMissing {
			break
		}
		if !come[n] {
			ns = append(ns, n)
		}
	}
	return ns
}

// waitingLine describes the missing members, or returns "" if none is waited for.
func (c *coordinator) waitingLine() string {
	if c.isElastic() && c.elastic.phase == phaseWait && c.faults.stop == nil {
		return c.shortageLine()
	}
	waiting := c.cfg.agents > 0 && c.plan == nil || c.world == nil && len(c.workers) > 0 && !c.cfg.Registry
	if !waiting || c.faults.lost != nil && c.restart == nil {
		return ""
	}
	if s := c.succession; s != nil {
		if s.other != "" { // hosts come to the candidate there, which says how many are with it
			return ""
		}
		return fmt.Sprintf("waiting since %v for hosts of epoch %d, which have lost their coordinator, to agree to another one: %d of %d are here",
			(c.now - s.begun).Round(time.Second), s.history.Epoch, len(s.hosts), len(s.history.Voters))
	}
	since := c.started
	if c.restart != nil {
		since = c.restart.begun
	}
	return fmt.Sprintf("waiting since %v: %v", (c.now - since).Round(time.Second), c.attendance())
}

const (
	// JoinFactor multiplies LostAfter until the world is complete: while all processes
	// start, hosts are busy, and nothing is lost if a dead host is noticed later.
	JoinFactor = 5
	// startTime is how long a complete list of hosts waits for the world to be complete
	// before silence counts as usual, in units of LostAfter. A program may never attach.
	startTime = 10
)

// silenceLimit returns the silence after which a peer is lost.
func (c *coordinator) silenceLimit() time.Duration {
	limit := c.cfg.Self.LostAfter
	if c.world == nil && !c.cfg.Registry && c.succession == nil && c.faults.lost == nil && (c.plan == nil || c.now-c.planned < startTime*limit) {
		return JoinFactor * limit
	}
	return limit
}

// remove returns ps without p.
func remove(ps []*peer, p *peer) []*peer {
	return without(ps, func(q *peer) bool { return q == p })
}

// without returns a copy of s without the elements that so selects.
func without[T any](s []T, so func(T) bool) []T { return slices.DeleteFunc(slices.Clone(s), so) }

// A peer is what a coordinator knows of a process that has connected.
type peer struct {
	id     string // of its connection; the member needs it to resume the stream
	worker bool   // it has only a worker's credential
	addr   string
	since  instant // when it connected
	heard  instant // when something arrived last
	over   bool    // its connection has ended

	role  role
	host  host         // if an agent
	reg   Registration // if a worker
	state peerState
	// Of an agent:
	draining  *Fault // its host leaves the job for this reason, such as "received SIGTERM"
	leaves    bool   // its workers were dismissed, and it leaves when the next epoch begins
	recording uint64 // number of the last entry of the ledger that it was sent, and of the last that it has
	recorded  uint64
	voted     bool   // it stays with this coordinator in the current attempt
	asked     uint64 // number of the last proposal that it was sent, and of the last one that it has
	answered  uint64
	ready     bool // no worker of an earlier attempt is running
	// Of a worker:
	home    place  // the place in which it was started
	seat    uint64 // the last epoch that it was a member of; 0 if it is new
	elastic answers
}

// answers are the answers of a worker that calls Run to the coordinator, in one epoch.
type answers struct {
	returned bool // its function has returned
	finished bool // its function has returned nil
	prepared bool // it has the proposal
	held     bool // steps is set
	steps    uint64
	failed   bool  // its function has returned an error
	exit     *Exit // its launcher has reported its exit
}

type role int

const (
	roleNone role = iota
	roleAgent
	roleWorker
)

type peerState int

const (
	peerNew peerState = iota
	peerJoined
	peerDone // agent: its workers have exited and it waits for the others
	peerGone // left, lost or refused
)

// member describes the peer in messages.
func (p *peer) member() Member {
	if p.role == roleAgent {
		return p.host.member()
	}
	return p.reg.Member
}

// admit registers a peer as a member, because of a message of the peer.
func (c *coordinator) admit(p *peer) {
	p.state = peerJoined
	c.act(admit{p})
}

func (p *peer) isUnregistered() bool { return p.state == peerNew || p.state == peerGone }

// leads returns the identity of the coordinator for its messages.
func (c *coordinator) leads() Leader {
	return Leader{Term: c.term, Agent: c.cfg.Self.Agent, Run: c.run, Name: c.cfg.Self.name()}
}
