package cluster

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// exitGrace is the time between the loss of a worker's connection and the
	// report of its exit by its launcher.
	exitGrace = 500 * time.Millisecond
	// waitLine is the interval of messages about missing members.
	waitLine = 5 * time.Second
)

// coordConfig configures a coordinator.
type coordConfig struct {
	agents int // hosts of the job; 0: workers join without launchers
	size   int // world size if agents is 0
	self   welcome
	again  restartPolicy
	// For epochs: the least number of hosts (0: all), and the limits for the arrival of
	// processes, the return of functions and the end of a step.
	least                     int
	joinBy, revokeBy, drainBy time.Duration
	probes                    bool // the server can look for launchers
}

// A coordinator decides for one job: it knows hosts, processes, ranks, epochs and the first failure. See core.go for
// how it is called.
type coordinator struct {
	cfg          coordConfig
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
	workers []*peer // in the order of arrival
	world   *world
	elastic *elastic // if the processes call Run and the first world is complete
	// succession is set while this coordinator wants to replace one that was lost.
	succession  *succession
	elsewhere   instant         // when another coordinator was last known to run the job
	electorates []electorate    // they agree on the next epoch
	handedOver  bool            // another coordinator continues
	ended       map[string]bool // hosts whose agents are known to have ended, by UUID
	faults      faults
	flappers    map[string]*flapper // by host name
	gone        []Member            // timed out before the job was complete
	verdict     *refusal            // why the job never became complete
	told        map[int]bool        // ranks, or node numbers, that received the verdict

	entries   []entry // that wait for launchers
	lastEntry uint64
}

// newCoordinator returns a coordinator of a run of a job, which begins at now.
func newCoordinator(cfg coordConfig, run string, now instant) *coordinator {
	c := &coordinator{cfg: cfg, now: now, run: run, term: firstTerm, epoch: firstEpoch, faults: newFaults(), told: map[int]bool{}}
	c.started = now
	c.after(waitLine, deadline{what: dueWaitLine})
	return c
}

// welcome returns the first message for processes that connect.
func (c *coordinator) welcome() welcome {
	w := c.cfg.self
	w.Running, w.Run = c.plan != nil || c.restart != nil, c.run
	if w.Running {
		w.Term = c.term
	}
	if s := c.succession; s != nil {
		w.Elects, w.Epoch = true, s.history.Epoch
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
	case m.kind == kindSilent && p.role != roleNone:
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
	case kindInformed:
		c.informed(p)
	case kindRecorded:
		c.recorded(p, m.id)
	case kindExit:
		c.exited(p, *m.rec.value.(*Exit))
	case kindStop:
		c.stopped(p, *m.rec.value.(*fault))
	case kindPath:
		c.pathFailed(p, *m.rec.value.(*pathReport))
	case kindKill:
		c.tellAgents(msg{kind: kindKill, epoch: firstEpoch})
	case kindDone:
		c.later(func() { c.agentDone(p) })
	case kindReady:
		c.agentReady(p)
	case kindDrain:
		c.drainHost(p, *m.rec.value.(*fault))
	case kindLeave:
		c.agentLeft(p, m.id == leaveGaveUp)
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
		return statusStale, nil
	}
	return statusOK, nil
}

// refuse rejects a peer and notifies the user of this host.
func (c *coordinator) refuse(p *peer, r refusal) {
	if c.verdict == nil {
		who := memberList([]Member{p.member()})
		c.sayOf(p.addr, fmt.Sprintf("refused %s at %s: %s", who, p.addr, r.why()))
	}
	c.refusePeer(p, r)
}

// refusePeer tells a peer why it cannot join, and closes the connection.
func (c *coordinator) refusePeer(p *peer, r refusal) {
	p.state = peerGone
	c.send(p, say(kindRefuse, r))
	c.hangUp(p)
	if c.verdict == nil {
		return
	}
	number, want := p.reg.Rank, c.size()
	if c.cfg.agents > 0 {
		number, want = p.host.NodeRank, c.cfg.agents
	}
	if number >= 0 && number < want {
		c.told[number] = true
	}
}

// hasToldAll reports whether all members know why none can join.
func (c *coordinator) hasToldAll() bool {
	want := c.size()
	if c.cfg.agents > 0 {
		want = c.cfg.agents
	}
	return c.verdict != nil && len(c.told) == want
}

// hasDrained reports whether all workers have left, or the job has failed.
func (c *coordinator) hasDrained() bool {
	return c.faults.lost != nil || !slices.ContainsFunc(c.workers, func(p *peer) bool { return p.state == peerJoined })
}

// attendance returns the members that have joined, of the hosts or of the workers.
func (c *coordinator) attendance() attendance {
	var r attendance
	if c.cfg.agents > 0 && c.plan == nil {
		r = attendance{Unit: unitHost, Want: c.cfg.agents, Have: append(members(c.agents), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Node })
	} else {
		r = attendance{Unit: unitProcess, Want: c.size(), Have: append(members(c.workers), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Rank })
	}
	r.Gone, r.Elastic = c.gone, c.isElastic()
	return r
}

// size returns the world size, or 0 while the hosts are not known.
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

// missing returns the numbers of the missing members, or nil if the joined
// members have no numbers.
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
		if !come[n] {
			ns = append(ns, n)
		}
	}
	return ns
}

// waitingLine describes the missing members, or returns "" if none is waited for.
func (c *coordinator) waitingLine() string {
	waiting := c.cfg.agents > 0 && c.plan == nil || c.world == nil && len(c.workers) > 0
	if !waiting || c.faults.lost != nil && c.restart == nil {
		return ""
	}
	since := c.started
	if c.restart != nil {
		since = c.restart.begun
	}
	return fmt.Sprintf("waiting since %v: %v", (c.now - since).Round(time.Second), c.attendance())
}

// silenceLimit returns the silence after which a peer is lost.
func (c *coordinator) silenceLimit() time.Duration {
	limit := c.cfg.self.LostAfter
	if c.world == nil && c.faults.lost == nil && (c.plan == nil || c.now-c.planned < startTime*limit) {
		return joinPatience * limit
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
	reg   registration // if a worker
	state peerState
	// Of an agent:
	draining  *fault // its host leaves the job for this reason, such as "received SIGTERM"
	leaves    bool   // its workers were dismissed, and it leaves when the next epoch begins
	recording uint64 // number of the last entry of the ledger that it was sent, and of the last that it has
	recorded  uint64
	voted     bool   // it stays with this coordinator in the current attempt
	informed  bool   // it knows of the first epoch
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

// admit makes a guest a member. The event is a message of the peer.
func (c *coordinator) admit(p *peer) {
	p.state = peerJoined
	c.act(admit{p})
}

func (p *peer) isGuest() bool { return p.state == peerNew || p.state == peerGone }
