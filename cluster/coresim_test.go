package cluster

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// A coreSim is an elastic job of real coordinators and voters. Connections, processes and time are simulated by events
// in a heap, which one seed orders, so that a seed always has the same result. Compared with simJob, which runs the real code
// of everything, it is hundreds of times as fast.
type coreSim struct {
	coreConfig
	rng       *rand.Rand
	now       time.Duration
	seq       uint64
	queue     coreQueue
	agents    []*coreAgent // one for each host
	down      []bool       // hosts without power
	cuts      [][]int      // by source and destination: faults that lose the packets
	links     []*coreLink
	commits   []*coreCommit
	proposals int
	touched   map[int]bool // hosts that a fault has touched
	healed    bool         // no fault is active any more
	starts    int          // workers that were started again
	bothSince time.Duration
	violation string
	log       []string
	logs      bool
	lastPID   int
}

// A coreConfig describes a job.
type coreConfig struct {
	seed      uint64
	hosts     int
	restarts  int
	slow      bool // functions need time to return
	lostAfter time.Duration
	faults    []coreFault
}

func (c coreConfig) String() string {
	return fmt.Sprintf("%#v", c)
}

// A coreFault is a fault that begins some time after the first epoch, or after the n-th proposal or commit.
type coreFault struct {
	Event string // "", "propose" or "commit"
	Count int
	After time.Duration
	Kind  string // split, isolate, mute (what it sends is lost), deafen (what is sent to it is lost), cut, kill, worker, power, pause, stop or drain
	A, B  int    // hosts; -1: the host of the coordinator of the event
	D     time.Duration
}

type coreCommit struct {
	epoch, term uint64
	by          *coreServer
	members     []string
	workers     map[*coreWorker]bool // whose functions run in it
	hosts       []string
}

type coreEvent struct {
	at  time.Duration
	seq uint64
	f   func()
}

type coreQueue []coreEvent

func (q coreQueue) Len() int { return len(q) }
func (q coreQueue) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].at, q[j].at), cmp.Compare(q[i].seq, q[j].seq)) < 0
}
func (q coreQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *coreQueue) Push(x any)   { *q = append(*q, x.(coreEvent)) }
func (q *coreQueue) Pop() any {
	x := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return x
}

func (s *coreSim) after(d time.Duration, f func()) {
	s.seq++
	heap.Push(&s.queue, coreEvent{s.now + d, s.seq, f})
}

func (s *coreSim) say(format string, args ...any) {
	if s.logs {
		s.log = append(s.log, fmt.Sprintf("%9.6f ", s.now.Seconds())+fmt.Sprintf(format, args...))
	}
}

func (s *coreSim) violate(format string, args ...any) {
	if s.violation == "" {
		s.violation = fmt.Sprintf(format, args...)
		s.say("VIOLATION: %s", s.violation)
	}
}

func (s *coreSim) random(n time.Duration) time.Duration { return time.Duration(s.rng.Int64N(int64(n))) }

// run lets d pass.
func (s *coreSim) run(d time.Duration) {
	for end := s.now + d; s.violation == ""; {
		if len(s.queue) == 0 || s.queue[0].at > end {
			s.now = end
			return
		}
		e := heap.Pop(&s.queue).(coreEvent)
		s.now = e.at
		e.f()
	}
}

// A coreProc is a process. While it is paused, what happens to it waits, and its clock stands still.
type coreProc struct {
	s        *coreSim
	host     int
	name     string
	dead     bool
	paused   int
	pausedAt time.Duration
	missed   time.Duration
	backlog  []func()
}

func (p *coreProc) clock() time.Duration {
	if p.paused > 0 {
		return p.pausedAt - p.missed
	}
	return p.s.now - p.missed
}

// do calls f in the process as soon as the process runs.
func (p *coreProc) do(f func()) {
	switch {
	case p.dead:
	case p.paused > 0 || len(p.backlog) > 0:
		p.backlog = append(p.backlog, f)
	default:
		f()
	}
}

// after calls f in the process after d on its clock.
func (p *coreProc) after(d time.Duration, f func()) {
	due := p.clock() + d
	var try func()
	try = func() {
		p.do(func() {
			if left := due - p.clock(); left > 0 {
				p.s.after(left, try)
				return
			}
			f()
		})
	}
	p.s.after(d, try)
}

func (p *coreProc) pause() {
	if p.paused++; p.paused == 1 {
		p.pausedAt = p.s.now
	}
	p.s.changed()
}

func (p *coreProc) resume() {
	if p.paused--; p.paused > 0 {
		return
	}
	p.missed += p.s.now - p.pausedAt
	p.s.changed()
	for len(p.backlog) > 0 && !p.dead && p.paused == 0 {
		f := p.backlog[0]
		p.backlog = p.backlog[1:]
		f()
	}
}

func (s *coreSim) passes(from, to int) bool {
	return !s.down[from] && !s.down[to] && (from == to || s.cuts[from][to] == 0)
}

// reaches reports whether a process would get an answer of another one.
func (s *coreSim) reaches(from int, to *coreProc) bool {
	return s.passes(from, to.host) && s.passes(to.host, from) && !to.dead && to.paused == 0
}

// refuses reports whether the kernel of a host refuses a connection, because the process has ended.
func (s *coreSim) refuses(from int, to *coreProc) bool {
	return s.passes(from, to.host) && s.passes(to.host, from) && to.dead
}

const (
	coreMember = 0 // the ends of a link
	coreServed = 1
)

// A coreLink is the connection of a launcher or a worker to a coordinator. Messages arrive in order, and lost ones are repeated.
type coreLink struct {
	s      *coreSim
	procs  [2]*coreProc // of both ends
	server *coreServer
	peer   *peer
	reads  [2]bool          // whether the end reads
	over   [2]bool          // whether the end has sent its last message
	queue  [2][]*msg        // to the end; nil closes the connection
	busy   [2]bool          // delivery is due
	quiet  [2]time.Duration // when the end has heard the last, on its clock; -1: it hears the other end
	phase  time.Duration
	noWait bool // the process has exited

	receive func(*coreLink, msg)          // by the member
	lost    func(*coreLink, loss, string) // by the member
}

// changed looks for ends that do not hear the other end any more, or again.
func (s *coreSim) changed() {
	open := s.links[:0]
	for _, l := range s.links {
		if !l.reads[0] && !l.reads[1] && len(l.queue[0]) == 0 && len(l.queue[1]) == 0 {
			continue
		}
		open = append(open, l)
		for end := range 2 {
			if !l.reads[end] {
				continue
			}
			me, other := l.procs[end], l.procs[1-end]
			hears := s.passes(other.host, me.host) && !other.dead && other.paused == 0 && !l.over[1-end]
			switch {
			case hears:
				l.quiet[end] = -1
			case l.quiet[end] < 0:
				l.quiet[end] = me.clock() - l.phase
				l.watch(end, l.quiet[end])
			}
		}
	}
	s.links = open
}

// watch ends the connection at one end when its silence is too long.
func (l *coreLink) watch(end int, since time.Duration) {
	limit := l.s.lostAfter + l.s.lostAfter/32
	me := l.procs[end]
	me.after(since+limit-me.clock()+l.s.random(l.s.lostAfter/48), func() {
		if l.reads[end] && l.quiet[end] == since {
			l.expire(end)
		}
	})
}

func (l *coreLink) expire(end int) {
	l.reads[end] = false
	if end == coreServed {
		l.server.step(disconnected{l.peer, ending{reason: "silent"}})
		return
	}
	l.send(coreServed, &msg{kind: kindSilent, epoch: firstEpoch})
	l.send(coreServed, nil)
	l.lost(l, lostSilent, "silent")
}

// send sends a message to an end; nil closes the connection.
func (l *coreLink) send(to int, m *msg) {
	if l.over[1-to] || l.procs[1-to].dead {
		return
	}
	l.push(to, m)
}

func (l *coreLink) push(to int, m *msg) {
	l.over[1-to] = m == nil
	l.queue[to] = append(l.queue[to], m)
	if !l.busy[to] {
		l.busy[to] = true
		l.s.after(l.latency(), func() { l.deliver(to) })
	}
}

func (l *coreLink) latency() time.Duration {
	if l.procs[0].host == l.procs[1].host {
		return 20*time.Microsecond + l.s.random(20*time.Microsecond)
	}
	return 200*time.Microsecond + l.s.random(300*time.Microsecond)
}

func (l *coreLink) deliver(to int) {
	me := l.procs[to]
	if !l.s.passes(l.procs[1-to].host, me.host) {
		if l.s.down[me.host] || l.s.down[l.procs[1-to].host] {
			l.queue[to] = nil
			return
		}
		l.s.after(50*time.Millisecond+l.s.random(50*time.Millisecond), func() { l.deliver(to) })
		return
	}
	m := l.queue[to][0]
	l.queue[to] = l.queue[to][1:]
	me.do(func() {
		if !l.reads[to] {
			return
		}
		switch {
		case m != nil && to == coreServed:
			l.server.step(received{l.peer, *m})
		case m != nil:
			l.receive(l, *m)
		case to == coreServed:
			l.closedByMember()
		default:
			l.closedByServer()
		}
	})
	if l.busy[to] = len(l.queue[to]) > 0; l.busy[to] {
		l.s.after(1+l.s.random(100*time.Microsecond), func() { l.deliver(to) })
	}
}

// closedByMember is called when the coordinator's end reads the end of the connection.
func (l *coreLink) closedByMember() {
	p, srv := l.procs[coreServed], l.server
	ends := func(e ending) {
		if l.reads[coreServed] {
			l.reads[coreServed] = false
			e.closed, e.reason = true, "closed"
			srv.step(disconnected{l.peer, e})
		}
	}
	grace := resumeGrace
	if l.noWait {
		grace = 0
	}
	l.s.changed() // from now on, silence ends its part in the job
	var prove func()
	prove = func() {
		if !l.reads[coreServed] {
			return
		}
		if l.peer.role == roleAgent && srv.c.isElastic() && srv.c.counts(l.peer) {
			if !l.s.refuses(p.host, l.procs[coreMember]) {
				p.after(slowAfter(l.s.lostAfter), prove)
				return
			}
			heard := l.quiet[coreServed] // the member has heard this end until it ended
			ends(ending{found: foundEnded, certain: heard < 0 || p.clock()-heard < l.s.lostAfter})
			return
		}
		ends(ending{})
	}
	p.after(grace, prove)
}

// closedByServer is called when the member reads the end of the connection.
func (l *coreLink) closedByServer() {
	p := l.procs[coreMember]
	var try func()
	try = func() {
		if !l.reads[coreMember] {
			return
		}
		how := lostSilent
		switch to := l.procs[coreServed]; {
		case l.s.refuses(p.host, to):
			if l.quiet[coreMember] < 0 || p.clock()-l.quiet[coreMember] < l.s.lostAfter {
				how = lostEnded
			}
		case l.s.reaches(p.host, to): // its process does not coordinate any more
		default:
			p.after(slowAfter(l.s.lostAfter), try)
			return
		}
		l.reads[coreMember] = false
		l.lost(l, how, "its process ended")
	}
	p.after(firstRetry, try)
}

// leave closes the member's end.
func (l *coreLink) leave() {
	if l.reads[coreMember] = false; !l.over[coreMember] {
		l.send(coreServed, &msg{kind: kindLeave, epoch: firstEpoch, id: leaveJob})
		l.send(coreServed, nil)
	}
}

// A coreServer is a server: a coordinator with its connections.
type coreServer struct {
	s      *coreSim
	agent  *coreAgent
	c      *coordinator
	links  map[*peer]*coreLink
	wake   uint64
	missed time.Duration
	closed bool
}

func (a *coreAgent) serve(first event) {
	a.srv = &coreServer{s: a.s, agent: a, links: map[*peer]*coreLink{}, c: newCoordinator(coordConfig{
		agents: a.s.hosts, least: 1, joinBy: time.Minute, revokeBy: 5 * a.s.lostAfter, drainBy: 10 * a.s.lostAfter, probes: true,
		again: restartPolicy{most: a.s.restarts, backoff: time.Second},
		self:  welcome{Host: a.uuid, PID: 1, Rank: -1, Agent: a.uuid, Several: true, Heartbeat: a.s.lostAfter / 6, LostAfter: a.s.lostAfter}}, "run "+a.uuid, a.proc.clock())}
	a.srv.step(first)
}

func (r *coreServer) step(e event) {
	if r.closed || r.agent.proc.dead {
		return
	}
	p := r.agent.proc
	if p.missed-r.missed > r.s.lostAfter/4 {
		r.missed = p.missed
		r.step(stalled{})
	}
	for q, l := range r.links {
		if q.heard = l.quiet[coreServed]; q.heard < 0 {
			q.heard = p.clock()
		}
	}
	actions, err := r.c.step(p.clock(), e)
	if m, ok := e.(received); ok && err != nil {
		r.s.violate("%s refuses a message of kind %d of %s: %v", p.name, m.m.kind, m.p.addr, err)
	}
	for _, a := range actions {
		r.do(a)
	}
	if at, ok := r.c.next(); ok {
		r.wake++
		turn := r.wake
		p.after(max(at-p.clock(), 0), func() {
			if r.wake == turn {
				r.step(nil)
			}
		})
	}
}

func (r *coreServer) do(a action) {
	s := r.s
	switch a := a.(type) {
	case send:
		for _, p := range a.to {
			if l := r.links[p]; l != nil {
				l.send(coreMember, &a.m)
			}
		}
	case hangUp:
		if l := r.links[a.p]; l != nil {
			l.send(coreMember, nil)
		}
	case hangUpGuests:
		for _, l := range s.links {
			if l.server == r && l.peer.role == roleNone {
				l.send(coreMember, &a.m)
				l.send(coreMember, nil)
			}
		}
	case awaitNoLink:
		if l := r.links[a.p]; l != nil {
			l.noWait = true
		}
	case probe:
		alive := map[string]bool{}
		for _, h := range a.hosts {
			if x := s.agentOf(h.UUID); x != nil && s.reaches(r.agent.proc.host, x.proc) && x.ended == "" {
				alive[h.UUID] = true
			}
		}
		r.agent.proc.after(a.limit, func() { r.step(probed{alive}) })
	case notify:
		s.say("%s: %s", r.agent.proc.name, a.line)
	case observe:
		if a.begun {
			s.begins(r)
		} else {
			s.say("%s proposes epoch %d in term %d to %v", r.agent.proc.name, r.c.epoch+1, r.c.term, r.c.elastic.voters)
			s.proposals++
			s.trigger("propose", s.proposals, r.agent.proc.host)
		}
	}
}

// begins records that a coordinator begins an epoch.
func (s *coreSim) begins(r *coreServer) {
	c := &coreCommit{epoch: r.c.epoch, term: r.c.term, by: r, workers: map[*coreWorker]bool{}, hosts: r.c.electorates[0]}
	for _, m := range r.c.world.Members {
		c.members = append(c.members, nameOf(m))
	}
	s.say("%s begins epoch %d in term %d of %v for %v", r.agent.proc.name, c.epoch, c.term, c.members, c.hosts)
	for _, o := range s.commits {
		// A coordinator that others have replaced may get the last answer late. Its epoch then is one that its successor has
		// counted as begun, and the others refuse it.
		if o.epoch == c.epoch || o.epoch < c.epoch && o.term > c.term || o.epoch > c.epoch && o.term <= c.term {
			s.violate("%s begins epoch %d of %v in term %d, and %s epoch %d of %v in term %d", r.agent.uuid, c.epoch, c.members, c.term, o.by.agent.uuid, o.epoch, o.members, o.term)
		}
	}
	s.commits = append(s.commits, c)
	s.trigger("commit", len(s.commits), r.agent.proc.host)
}

// close closes the coordinator of a host that does not coordinate.
func (r *coreServer) close() {
	if r == nil || r.closed {
		return
	}
	r.step(closing{})
	r.closed = true
	for _, l := range r.s.links {
		if l.server == r {
			l.send(coreMember, &msg{kind: kindEnded, epoch: firstEpoch})
			l.send(coreMember, nil)
			l.reads[coreServed] = false
		}
	}
}

// connect connects a process to a coordinator, which has admitted it.
func (r *coreServer) connect(p *coreProc, worker bool) *coreLink {
	l := &coreLink{s: r.s, procs: [2]*coreProc{p, r.agent.proc}, server: r, peer: &peer{addr: p.name, worker: worker}, reads: [2]bool{true, true}, quiet: [2]time.Duration{-1, -1}, phase: r.s.random(r.s.lostAfter / 6)}
	r.s.links = append(r.s.links, l)
	r.links[l.peer] = l
	r.step(connected{l.peer})
	return l
}

func (s *coreSim) agentOf(uuid string) *coreAgent {
	for _, a := range s.agents {
		if a.uuid == uuid {
			return a
		}
	}
	return nil
}

// A coreAgent is a launcher, with the real decisions of its host as a voter.
type coreAgent struct {
	voter
	s       *coreSim
	proc    *coreProc
	uuid    string
	srv     *coreServer
	link    *coreLink // to the coordinator that it follows
	worker  *coreWorker
	procs   []*coreProc // of all its workers
	ended   string      // why the job has ended here
	choice  *coreChoice
	drained bool
}

// A coreChoice is the choice of a coordinator by a host.
type coreChoice struct {
	charter  *charter
	begun    time.Duration
	limit    time.Duration
	link     *coreLink // where this host has registered
	at       int       // the candidate
	bound    bool
	lastLook time.Duration
}

func (a *coreAgent) registerAt(r *coreServer, ch *charter) *coreLink {
	l := r.connect(a.proc, false)
	l.receive, l.lost = a.receive, a.lostLink
	h := host{Host: a.uuid, PID: 1, UUID: a.uuid, NodeRank: -1, Nodes: a.s.hosts, MinNodes: 1, Restarts: a.s.restarts, LocalSize: 1, Control: a.uuid, Seed: a.proc.host == 0, Charter: ch}
	l.send(coreServed, &msg{kind: kindRegister, epoch: firstEpoch, id: registerAgent, rec: &record{value: &h}})
	return l
}

func (a *coreAgent) reply(l *coreLink, k kind, m msg) {
	l.send(coreServed, &msg{kind: k, epoch: m.epoch, id: m.id})
}

func (a *coreAgent) receive(l *coreLink, m msg) {
	if a.ended != "" {
		return
	}
	refused := func(err error) bool {
		if err == nil {
			return false
		}
		a.s.say("%s: %v", a.proc.name, err)
		if strings.Contains(err.Error(), "fault of Chorus") {
			a.s.violate("%s: %v", a.proc.name, err)
		}
		l.leave()
		if l == a.link {
			a.end(err.Error())
		} else if c := a.choice; c != nil && c.link == l {
			c.link, c.bound = nil, false
		}
		return true
	}
	switch m.kind {
	case kindPrepare:
		a.stay(l, m, refused)
	case kindPlan:
		p := m.rec.value.(plan)
		if !refused(a.follow(p.By)) {
			a.adopt(l)
		}
	case kindPropose:
		if !refused(a.proposal(a.uuid, m.epoch, m.rec.value.(news))) {
			a.reply(l, kindPrepared, m)
		}
	case kindLedger:
		if !refused(a.keep(m.rec.value.(news))) {
			a.reply(l, kindRecorded, m)
		}
	case kindNews:
		if _, err := a.begins(a.uuid, m.epoch, m.rec.value.(news)); !refused(err) {
			a.reply(l, kindPrepared, m)
		}
	case kindOrder:
		a.obey(m.rec.value.(Order))
	case kindFault:
		f := m.rec.value.(fault)
		a.end(f.Reason)
	case kindHandover:
		h := m.rec.value.(handover)
		a.voter.ended = append(a.voter.ended, h.Ended...)
		how := lostLeaving
		if h.Failed {
			how = lostResigned
		}
		l.leave()
		a.lostLink(l, how, h.Reason)
	case kindRefuse:
		r := m.rec.value.(refusal)
		a.s.say("%s is refused: %s", a.proc.name, r.Reason)
		l.leave()
		if l == a.link {
			a.lostLink(l, lostByIt, r.Reason)
		} else {
			a.end(r.Reason)
		}
	case kindEnded:
		if c := a.choice; c != nil && c.link == l {
			l.leave()
			a.lostLink(l, lostSilent, "closed")
		}
	}
}

// stay answers a coordinator that asks this host to stay with it.
func (a *coreAgent) stay(l *coreLink, m msg, refused func(error) bool) {
	c := a.choice
	if c != nil && c.link != l {
		return
	}
	if m.id == 0 {
		if c != nil {
			c.bound = false
		}
		return
	}
	if c != nil {
		if refused(a.vote(m.rec.value.(leader))) {
			return
		}
		c.bound = true
	}
	a.reply(l, kindPrepared, m)
}

// adopt follows the coordinator at the other end of a link.
func (a *coreAgent) adopt(l *coreLink) {
	if l == a.link {
		return
	}
	a.s.say("%s follows %s", a.proc.name, l.server.agent.uuid)
	a.link = l
	if a.choice == nil {
		a.spawn()
		return
	}
	a.choice = nil
	if a.srv != nil && a.srv != l.server {
		a.srv.close()
		a.srv = nil
	}
	for _, m := range a.repeats() {
		l.send(coreServed, m.asReceived())
	}
}

// asReceived returns the message as its receiver decodes it.
func (m msg) asReceived() *msg {
	if m.rec == nil {
		return &m
	}
	switch v := m.rec.value.(type) {
	case Exit:
		m.rec = &record{value: &v}
	case fault:
		m.rec = &record{value: &v}
	}
	return &m
}

func (a *coreAgent) obey(o Order) {
	a.ordered(o)
	switch {
	case o.Finish:
	case o.Stop:
		a.leaves()
	case o.Kill:
		if w := a.worker; w != nil && w.pid == o.PID {
			w.exit(137)
		}
	case o.Start:
		if a.s.starts++; a.s.starts > a.s.restarts {
			a.s.violate("%d restarts were ordered, and %d are allowed", a.s.starts, a.s.restarts)
		}
		a.proc.after(o.After, func() {
			if a.ended == "" && a.worker == nil {
				a.spawn()
			}
		})
	default: // no process is left here
		a.finish()
	}
}

// finish reports that no worker of this host is left.
func (a *coreAgent) finish() {
	if a.done = true; a.link != nil {
		a.link.send(coreServed, &msg{kind: kindDone, epoch: firstEpoch})
	}
}

// leaves ends a launcher whose host was drained.
func (a *coreAgent) leaves() {
	a.s.say("%s leaves", a.proc.name)
	a.ended = "it was drained"
	if a.worker != nil {
		a.worker.exit(0)
	}
	a.kill()
}

// end ends the job on this host. Its launcher stops its workers after a grace and ends.
func (a *coreAgent) end(reason string) {
	if a.ended != "" {
		return
	}
	a.s.say("%s ends: %s", a.proc.name, reason)
	a.ended, a.choice = reason, nil
	a.srv.close()
	a.srv = nil
	a.proc.after(3*time.Second, func() {
		if a.worker != nil {
			a.worker.exit(143)
		}
		a.kill()
	})
}

// kill ends the process of the launcher, and the kernel closes its connections.
func (a *coreAgent) kill() {
	if a.proc.dead {
		return
	}
	for _, l := range a.s.links {
		for end, p := range l.procs {
			if p == a.proc && !l.over[end] {
				l.push(1-end, nil)
			}
			if p == a.proc {
				l.reads[end] = false
			}
		}
	}
	a.proc.dead = true
	if a.worker != nil {
		a.worker.die()
	}
	a.s.changed()
}

// lostLink is called when the launcher has lost a coordinator.
func (a *coreAgent) lostLink(l *coreLink, how loss, reason string) {
	if a.ended != "" {
		return
	}
	if c := a.choice; c != nil && c.link == l {
		c.link, c.bound = nil, false
		a.proc.after(firstRetry, a.look)
		return
	}
	if l != a.link || a.choice != nil {
		return
	}
	if a.srv != nil || !a.mayChoose(how) {
		a.end("the coordinator was lost: " + reason)
		return
	}
	ch := a.candidacy(how, l.server.c.cfg.self, reason)
	a.s.say("%s has lost %s: %s", a.proc.name, ch.Lost, reason)
	if !ch.isPossible() {
		a.end("no majority is possible")
		return
	}
	a.choice = &coreChoice{charter: ch, begun: a.proc.clock(), limit: Timing{LostAfter: a.s.lostAfter}.successionTime(), at: -1}
	if how == lostByIt {
		a.choice.limit -= a.s.lostAfter
	}
	if slices.Contains(ch.addresses(), a.uuid) {
		own := *ch
		own.Plan.Hosts, own.Proposed, own.Ended = slices.Clone(ch.Plan.Hosts), slices.Clone(ch.Proposed), slices.Clone(ch.Ended)
		own.Ledger.Restarts = slices.Clone(ch.Ledger.Restarts)
		a.serve(candidacy{charter: own})
	}
	a.look()
}

// look looks for the first candidate that answers, in the order of succession, or for a leader.
func (a *coreAgent) look() {
	c := a.choice
	if c == nil || a.ended != "" {
		return
	}
	if a.proc.clock()-c.begun > c.limit {
		a.end("the hosts that are left have not agreed on another coordinator")
		return
	}
	slow := slowAfter(a.s.lostAfter)
	if c.link != nil && c.bound {
		a.proc.after(slow, a.look)
		return
	}
	all := c.charter.addresses()
	found := -1
	var at *coreServer
	leaders := a.proc.clock()-c.lastLook >= searchInterval
	if leaders {
		c.lastLook = a.proc.clock()
	}
	for i, uuid := range all {
		if c.link != nil && i >= c.at && (!leaders || c.link.server.c.welcome().Running) {
			break
		}
		r, waits := a.dial(uuid, c)
		if r == nil {
			if waits && found < 0 && c.link == nil {
				break // it will be a candidate soon
			}
			continue
		}
		if running := r.c.welcome().Running; running || found < 0 && (c.link == nil || i < c.at) {
			if found, at = i, r; running {
				break
			}
		}
	}
	if at != nil && (c.link == nil || c.link.server != at) {
		if c.link != nil {
			c.link.leave()
		}
		c.at, c.bound = found, false
		hello := at.c.welcome()
		c.charter.Term = a.promised.Term
		ex := c.charter.excerpt(hello)
		mine := *ex
		c.link = nil // answers may come at once
		c.link = a.registerAt(at, &mine)
	}
	a.proc.after(slow/2+a.s.random(slow), a.look)
}

// dial connects to a host, and returns its coordinator, or the one that it follows, if this host may follow it. waits is true if the
// host has not noticed the loss yet.
func (a *coreAgent) dial(uuid string, c *coreChoice) (r *coreServer, waits bool) {
	x := a.s.agentOf(uuid)
	if x == nil || !a.s.reaches(a.proc.host, x.proc) || x.ended != "" {
		return nil, false
	}
	if r = x.srv; r == nil || r.closed || r.c.handedOver {
		if x.choice != nil || x.link == nil {
			return nil, true
		}
		r = x.link.server
		if r.agent.uuid == c.charter.Lost {
			return nil, a.proc.clock() < c.begun+a.s.lostAfter
		}
		if !a.s.reaches(a.proc.host, r.agent.proc) || r.closed || r.c.handedOver || !r.c.welcome().Running {
			return nil, false
		}
	}
	hello := r.c.welcome()
	if a.accepts(hello) {
		return r, false
	}
	if hello.Run == a.promised.Run && hello.Running {
		l := r.connect(a.proc, false)
		l.receive, l.lost = func(*coreLink, msg) {}, func(*coreLink, loss, string) {}
		l.send(coreServed, &msg{kind: kindElsewhere, epoch: firstEpoch, rec: &record{value: &elsewhere{By: a.promised}}})
		l.send(coreServed, nil)
		l.reads[coreMember] = false
	}
	return nil, false
}

// A coreWorker is a process that calls Run.
type coreWorker struct {
	leadership
	agent   *coreAgent
	proc    *coreProc
	pid     int
	link    *coreLink
	now     *coreCommit // of the function that runs
	working bool        // the function does not know that its epoch has ended
	seat    uint64
	by      leader
	rank    int
	slow    time.Duration
	turn    int
	lostAt  time.Duration
}

func (a *coreAgent) spawn() {
	s := a.s
	s.lastPID++
	w := &coreWorker{agent: a, pid: 1000 + s.lastPID, rank: -1}
	if s.slow {
		w.slow = s.random(2 * s.lostAfter)
	}
	defer func() { a.procs = append(a.procs, w.proc) }()
	w.proc = &coreProc{s: s, host: a.proc.host, name: fmt.Sprintf("worker %s#%d", a.uuid, w.pid), missed: a.proc.missed}
	a.worker = w
	w.proc.after(50*time.Millisecond+s.random(50*time.Millisecond), w.follow)
}

// follow registers with the coordinator that the launcher follows.
func (w *coreWorker) follow() {
	a := w.agent
	if a.ended != "" || a.proc.dead {
		w.exit(1)
		return
	}
	old := w.link
	if a.proc.paused > 0 || a.choice != nil || a.link == nil || !a.link.reads[coreMember] || old != nil && a.link.server == old.server ||
		!a.s.reaches(w.proc.host, a.link.server.agent.proc) || a.link.server.closed || a.link.server.c.handedOver || a.link.server.c.welcome().Elects {
		if old != nil && a.choice == nil && a.link != nil && a.link.server == old.server && w.proc.clock()-w.lostAt > 2*a.s.lostAfter {
			w.exit(1)
			return
		}
		if w.proc.clock()-w.lostAt > (Timing{LostAfter: a.s.lostAfter}).successionTime()+5*a.s.lostAfter && w.lostAt > 0 {
			w.exit(1)
			return
		}
		w.proc.after(25*time.Millisecond+a.s.random(75*time.Millisecond), w.follow)
		return
	}
	w.link = a.link.server.connect(w.proc, true)
	w.link.receive, w.link.lost = w.receive, w.lostLink
	reg := registration{Member: Member{Rank: w.rank, LocalSize: 1, Host: a.uuid, PID: w.pid, Node: -1}, Elastic: true, Agent: a.uuid, Least: 1, Seat: w.seat, By: w.by}
	w.link.send(coreServed, &msg{kind: kindRegister, epoch: firstEpoch, id: registerWorker, rec: &record{value: &reg}})
}

func (w *coreWorker) answer(k kind, epoch, id uint64) {
	w.link.send(coreServed, &msg{kind: k, epoch: epoch, id: id})
}

func (w *coreWorker) receive(l *coreLink, m msg) {
	if l != w.link {
		return
	}
	s := w.agent.s
	switch m.kind {
	case kindWorld:
		v := m.rec.value.(*world)
		if m.epoch <= w.seat {
			s.violate("%s begins epoch %d after epoch %d", w.proc.name, m.epoch, w.seat)
		}
		if err := w.leadership.follow(v.By); err != nil {
			s.say("%s: %v", w.proc.name, err)
			if strings.Contains(err.Error(), "fault of Chorus") {
				s.violate("%s: %v", w.proc.name, err)
			}
			w.exit(1)
			return
		}
		w.begin(m.epoch, v, int(m.id))
	case kindPropose:
		w.answer(kindPrepared, m.epoch, m.id)
	case kindRevoke, kindUntil:
		if m.epoch == w.seat {
			w.returns(func() { w.answer(kindRevoked, w.seat, 0) })
		}
	case kindHold:
		if m.epoch == w.seat && w.now != nil {
			w.answer(kindHeld, m.epoch, 0)
		}
	case kindDismiss, kindFinish:
		w.returns(func() { w.exit(0) })
	case kindFault, kindRefuse:
		w.returns(func() { w.exit(1) })
	case kindHandover, kindEnded:
		l.leave()
		w.lostLink(l, lostLeaving, "")
	}
}

// begin begins the function of an epoch.
func (w *coreWorker) begin(epoch uint64, v *world, rank int) {
	s := w.agent.s
	var names []string
	for _, m := range v.Members {
		names = append(names, nameOf(m))
	}
	w.seat, w.by, w.rank, w.now = epoch, v.By, rank, nil
	for _, c := range s.commits {
		if c.epoch == epoch && slices.Equal(c.members, names) {
			w.now = c
		}
	}
	if w.now == nil {
		s.violate("%s begins epoch %d of %v, which nobody has begun", w.proc.name, epoch, names)
		return
	}
	for _, a := range s.agents {
		if o := a.worker; o != nil && o != w && o.now != nil && o.now.epoch < epoch && !o.proc.dead && slices.Contains(names, o.name()) {
			s.violate("%s begins epoch %d while the function of epoch %d runs on %s", w.proc.name, epoch, o.now.epoch, o.proc.name)
		}
	}
	w.turn++
	w.working, w.now.workers[w] = true, true
	s.live()
}

func (w *coreWorker) name() string { return fmt.Sprintf("%s/0#%d", w.agent.uuid, w.pid) }

// returns lets the function return, and then calls f.
func (w *coreWorker) returns(f func()) {
	turn := w.turn
	d := time.Duration(0)
	if w.now != nil {
		d = w.slow
	}
	w.stops()
	w.proc.after(d+w.agent.s.random(time.Millisecond), func() {
		if w.turn == turn {
			w.now = nil
			f()
		}
	})
}

// stops records that the function knows of the end of its epoch.
func (w *coreWorker) stops() {
	if w.now != nil {
		delete(w.now.workers, w)
	}
	w.working = false
}

func (w *coreWorker) lostLink(l *coreLink, _ loss, _ string) {
	if l != w.link {
		return
	}
	w.lostAt = w.proc.clock()
	w.returns(w.follow)
}

// exit ends the process, and its launcher reports that.
func (w *coreWorker) exit(code int) {
	if w.proc.dead {
		return
	}
	w.die()
	a := w.agent
	a.proc.do(func() {
		if a.worker == w {
			a.worker = nil
		}
		if a.ended != "" && code != 0 {
			return
		}
		e := Exit{Local: 0, Host: a.uuid, PID: w.pid, Code: code, Rank: w.rank, Reason: fmt.Sprintf("exited with code %d", code), Asked: a.drained}
		a.exited(e)
		if a.link != nil {
			a.link.send(coreServed, &msg{kind: kindExit, epoch: firstEpoch, rec: &record{value: &e}})
		}
	})
}

// die ends the process without a word of its launcher.
func (w *coreWorker) die() {
	if w.proc.dead {
		return
	}
	w.stops()
	w.now = nil
	if l := w.link; l != nil && l.reads[coreMember] {
		l.send(coreServed, nil)
		l.reads[coreMember] = false
	}
	w.proc.dead = true
	w.agent.s.changed()
}

// live checks that two epochs are not alive for long: all their members work, and their coordinator runs.
func (s *coreSim) live() (out []*coreCommit) {
	for _, c := range s.commits {
		running := 0
		for w := range c.workers {
			if w.proc.paused == 0 && !w.proc.dead {
				running++
			}
		}
		if running == len(c.members) && !c.by.agent.proc.dead && c.by.agent.proc.paused == 0 && !c.by.closed && !c.by.c.handedOver {
			out = append(out, c)
		}
	}
	return out
}

// watch checks now and then.
func (s *coreSim) watch() {
	if live := s.live(); len(live) < 2 {
		s.bothSince = s.now
	} else if s.now-s.bothSince > s.lostAfter {
		s.violate("two epochs are alive: %d of %v by %s, and %d of %v by %s", live[0].epoch, live[0].members, live[0].by.agent.uuid, live[1].epoch, live[1].members, live[1].by.agent.uuid)
	}
	s.after(250*time.Millisecond, s.watch)
}

// trigger begins faults after an event.
func (s *coreSim) trigger(event string, count, host int) {
	for _, f := range s.faults {
		if f.Event == event && f.Count == count || f.Event == "" && event == "commit" && count == 1 {
			s.after(f.After+1, func() { s.apply(f, host) })
		}
	}
}

// apply begins a fault, and ends it after its duration.
func (s *coreSim) apply(f coreFault, host int) {
	h, g := f.A, f.B
	if h < 0 {
		h = host
	}
	if g < 0 || g >= s.hosts {
		g = host
	}
	a := s.agents[h]
	s.say("fault: %s %s %d for %v", f.Kind, s.agents[h].uuid, f.B, f.D)
	s.touched[h] = true
	cut := func(pairs ...[2]int) {
		for _, p := range pairs {
			s.cuts[p[0]][p[1]]++
		}
		s.changed()
		s.after(f.D, func() {
			for _, p := range pairs {
				if !s.healed {
					s.cuts[p[0]][p[1]]--
				}
			}
			s.changed()
		})
	}
	var in, out [][2]int
	for o := range s.agents {
		if o != h {
			in, out = append(in, [2]int{o, h}), append(out, [2]int{h, o})
		}
	}
	switch f.Kind {
	case "isolate":
		cut(append(in, out...)...)
	case "mute":
		cut(out...)
	case "deafen":
		cut(in...)
	case "split": // into the hosts of the bits of B, and the others
		var pairs [][2]int
		for i := range s.agents {
			for o := range s.agents {
				if f.B>>i&1 != f.B>>o&1 {
					pairs = append(pairs, [2]int{i, o})
					s.touched[i] = true
				}
			}
		}
		cut(pairs...)
	case "cut":
		if g != h {
			s.touched[g] = true
			cut([2]int{h, g}, [2]int{g, h})
		}
	case "kill":
		a.kill()
	case "worker":
		if a.worker != nil {
			a.worker.exit(137)
		}
	case "power":
		s.down[h] = true
		a.proc.dead = true
		if w := a.worker; w != nil {
			w.stops()
			w.now = nil
			w.proc.dead = true
		}
		s.changed()
	case "pause", "stop":
		ps := []*coreProc{a.proc}
		if w := a.worker; f.Kind == "pause" && w != nil {
			ps = append(ps, w.proc)
		}
		for _, p := range ps {
			p.pause()
		}
		s.after(f.D, func() {
			for _, p := range ps {
				if p.paused > 0 {
					p.resume()
				}
			}
		})
	case "drain":
		a.proc.do(func() {
			if a.charter == nil || a.over || a.ended != "" || a.drains != nil {
				return
			}
			x := fault{Reason: "received SIGTERM", Code: 143}
			a.drains, a.drained = &x, true
			if a.link != nil {
				a.link.send(coreServed, &msg{kind: kindDrain, epoch: firstEpoch, rec: &record{value: &x}})
			}
		})
	}
}

// newCoreSim starts a job.
func newCoreSim(cfg coreConfig) *coreSim {
	s := &coreSim{coreConfig: cfg, rng: rand.New(rand.NewPCG(cfg.seed, 7)), now: 1, down: make([]bool, cfg.hosts), touched: map[int]bool{}}
	for i := range cfg.hosts {
		s.cuts = append(s.cuts, make([]int, cfg.hosts))
		u := simName(i)
		s.agents = append(s.agents, &coreAgent{voter: newVoter(1), s: s, uuid: u, proc: &coreProc{s: s, host: i, name: "launcher " + u}})
	}
	s.agents[0].serve(nil)
	for _, a := range s.agents {
		s.after(s.random(100*time.Millisecond), func() { a.registerAt(s.agents[0].srv, nil) })
	}
	s.watch()
	return s
}

// simulateCore runs a job and returns what has gone wrong. If calm is true, the job must have settled a while after the faults.
func simulateCore(cfg coreConfig, logs, calm bool) *coreSim {
	s := newCoreSim(cfg)
	s.logs = logs
	s.run(2 * time.Second)
	if len(s.commits) == 0 {
		s.violate("the job did not start")
	}
	s.run(6 * s.lostAfter)
	for i := range s.cuts {
		clear(s.cuts[i])
	}
	s.healed, s.faults = true, nil
	s.changed()
	for _, a := range s.agents {
		for _, p := range append([]*coreProc{a.proc}, a.procs...) {
			for p.paused > 0 {
				p.resume()
			}
		}
	}
	if calm && s.violation == "" {
		s.run(8*s.lostAfter + 30*time.Second)
		s.settles()
	}
	return s
}

// settles checks that each launcher belongs to the epoch that is alive, or has ended, and that the job goes on if faults have touched
// only a minority. It may go on without hosts that have lost the coordinator only for themselves.
func (s *coreSim) settles() {
	live := s.live()
	for _, a := range s.agents {
		if r := a.srv; len(live) == 0 && r != nil && !a.proc.dead && r.c.isElastic() && r.c.elastic.phase == phaseWait {
			return // for processes
		}
		if strings.Contains(a.ended, "not enough processes") {
			return // no restarts are left
		}
		if a.charter == nil {
			return // before a host knows of the first epoch, the job ends there with its coordinator
		}
	}
	left := 0
	for i := range s.agents {
		if !s.touched[i] {
			left++
		}
	}
	for i, a := range s.agents {
		gone := a.proc.dead || a.ended != ""
		switch {
		case s.violation != "":
		case left > s.hosts/2 && !s.touched[i] && gone && len(live) == 0:
			s.violate("no fault has touched a majority of the hosts, and %s has ended: %s", a.proc.name, a.ended)
		case gone:
		case len(live) == 0:
			s.violate("%s has not ended, and no epoch is alive", a.proc.name)
		case a.link == nil || a.link.server != live[0].by:
			s.violate("%s has not ended, and does not follow %s", a.proc.name, live[0].by.agent.uuid)
		}
	}
}
