package job

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

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
	a.srv = &coreServer{s: a.s, agent: a, links: map[*peer]*coreLink{}, c: newCoordinator(CoordConfig{
		agents: a.s.hosts, least: 1, JoinBy: time.Minute, RevokeBy: 5 * a.s.lostAfter, DrainBy: 10 * a.s.lostAfter, probes: true,
		again: restartPolicy{most: a.s.restarts, backoff: time.Second},
		Self:  Welcome{Host: a.uuid, PID: 1, Rank: -1, Agent: a.uuid, Several: true, Heartbeat: a.s.lostAfter / 6, LostAfter: a.s.lostAfter}}, "run "+a.uuid, a.proc.clock())}
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
		if q.heard = l.heardAt[coreServed]; q.heard < 0 {
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
	r.s.checkEnded(p.name, r.c.ended)
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
			l.hungUp = true
			s.changed()
		}
	case hangUpUnregistered:
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
	c := &coreCommit{epoch: r.c.epoch, term: r.c.term, by: r, workers: map[*coreWorker]bool{}, hosts: r.c.voterSets[0]}
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
			l.send(coreMember, &msg{kind: kindEnded, epoch: FirstEpoch})
			l.send(coreMember, nil)
			l.reads[coreServed] = false
		}
	}
}

// checkEnded checks that hosts which are known to have ended take part in decisions no more.
func (s *coreSim) checkEnded(who string, ended map[string]bool) {
	for _, a := range s.agents {
		if !ended[a.uuid] || a.proc.dead || a.ended != "" || a.over || a.srv != nil && a.srv.c.handedOver {
			continue
		}
		s.violate("%s takes %s for ended, which lives", who, a.proc.name)
	}
}

// connect connects a process to a coordinator, which has admitted it.
func (r *coreServer) connect(p *coreProc, worker bool) *coreLink {
	l := &coreLink{s: r.s, procs: [2]*coreProc{p, r.agent.proc}, server: r, hello: r.c.welcome(), opened: r.s.now, peer: &peer{addr: p.name, worker: worker}, reads: [2]bool{true, true}, heardAt: [2]time.Duration{-1, -1}, phase: r.s.random(r.s.lostAfter / 6)}
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

// at returns the launcher at an address.
func (s *coreSim) at(addr string) *coreAgent {
	for _, a := range s.agents {
		if a.addr == addr {
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
	addr    string // of its host
	started bool
	srv     *coreServer
	link    *coreLink // to the coordinator that it follows
	worker  *coreWorker
	procs   []*coreProc // of all its workers
	ended   string      // why the job has ended here
	drained bool
	// The choice of a coordinator:
	choice   *choice // the last
	choosing bool
	dials    map[uint64]*coreLink // of the choice; nil for those that have not been answered
	wake     uint64
}

// startChoice begins a choice of a coordinator.
func (a *coreAgent) startChoice(c *choice) {
	a.choice, a.choosing, a.dials = c, true, map[uint64]*coreLink{}
	a.choose(c, begin{})
}

// choose lets an event happen to a choice, and carries out what it decides.
func (a *coreAgent) choose(c *choice, e choiceEvent) {
	if a.choice != c || a.proc.dead || a.ended != "" {
		return
	}
	for _, x := range c.step(a.proc.clock(), e) {
		a.act(c, x)
	}
	if at, ok := c.next(); ok && a.choosing {
		a.wake++
		turn := a.wake
		a.proc.after(max(at-a.proc.clock(), 0), func() {
			if a.wake == turn {
				a.choose(c, nil)
			}
		})
	}
}

func (a *coreAgent) act(c *choice, x action) {
	switch x := x.(type) {
	case dial:
		a.dials[x.dial] = nil
		limit := x.limit
		if limit == 0 {
			limit = DialAttempt
		}
		a.proc.after(300*time.Microsecond+a.s.random(500*time.Microsecond), func() { a.dial(c, x.dial, x.addr, limit) })
	case hangUpDial:
		a.drop(x.dial)
	case announce:
		a.dials[x.dial].send(coreServed, &msg{kind: kindElsewhere, epoch: FirstEpoch, rec: &record{value: &elsewhere{By: a.promised}}})
		a.drop(x.dial)
	case enroll:
		l := a.dials[x.dial]
		l.receive = func(l *coreLink, m msg) { a.receive(l, x.dial, m) }
		l.lost = func(l *coreLink, how Loss, reason string) {
			a.choose(c, linkLost{x.dial})
			a.lostLink(l, how, reason)
		}
		h := host{Host: a.uuid, PID: 1, UUID: a.uuid, NodeRank: -1, Nodes: a.s.hosts, MinNodes: 1, Restarts: a.s.restarts, LocalSize: 1, Control: a.addr, Seed: a.isSeed(), History: x.history}
		l.send(coreServed, &msg{kind: kindRegister, epoch: FirstEpoch, id: registerAgent, rec: &record{value: &h}})
	case leave:
		a.dials[x.dial].leave()
	case vote:
		a.dials[x.dial].send(coreServed, &msg{kind: kindVote, epoch: FirstEpoch, id: x.attempt})
	case prefer:
		if a.srv != nil && !a.srv.closed {
			a.srv.step(registered(x))
		}
	case beCandidate:
		a.serve(x.candidacy)
	case notify:
		a.s.say("%s: %s", a.proc.name, x.line)
	case chosen:
		a.adopt(a.dials[x.dial], a.dials[x.dial].server.agent == a)
	case notChosen:
		a.end(x.err.Error())
	}
}

// drop ends a dial or its connection.
func (a *coreAgent) drop(number uint64) {
	if l := a.dials[number]; l != nil {
		l.reads[coreMember] = false
		l.send(coreServed, nil)
	}
	delete(a.dials, number)
}

// dial connects to a host, which answers as a coordinator or as one that knows it.
func (a *coreAgent) dial(c *choice, number uint64, addr string, limit time.Duration) {
	if _, wanted := a.dials[number]; !wanted || a.choice != c {
		return
	}
	answer := func(e answered) {
		e.dial = number
		a.choose(c, e)
	}
	x := a.s.at(addr)
	refers := func(r Referral) { answer(answered{refers: &r, err: &r, hello: Welcome{Agent: x.uuid}}) }
	switch r := x.srv; {
	case a.s.refuses(a.proc.host, x.proc) || r != nil && r.c.handedOver && a.s.reaches(a.proc.host, x.proc):
		answer(answered{err: errors.New("connection refused")})
	case !a.s.reaches(a.proc.host, x.proc):
		a.proc.after(limit, func() { answer(answered{err: errors.New("no answer")}) })
	case r != nil && !r.closed:
		l := r.connect(a.proc, false)
		l.receive, l.lost = func(*coreLink, msg) {}, func(*coreLink, Loss, string) {}
		a.dials[number] = l
		answer(answered{hello: r.c.welcome()})
	default:
		to := Referral{Over: x.ended, Finished: x.finished}
		if l := x.link; l != nil && !x.choosing && l.reads[coreMember] {
			to.At = l.server.agent.addr
		}
		refers(to)
	}
}

// isSeed reports whether the host is one of two that coordinate at the start.
func (a *coreAgent) isSeed() bool { return a.proc.host < 2 }

func (a *coreAgent) reply(l *coreLink, k Kind, m msg) {
	l.send(coreServed, &msg{kind: k, epoch: m.epoch, id: m.id})
}

func (a *coreAgent) receive(l *coreLink, number uint64, m msg) {
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
		l.close()
		if l == a.link {
			a.end(err.Error())
		}
		a.choose(a.choice, linkLost{number})
		return true
	}
	switch m.kind {
	case kindRequestVote:
		e := voteAsked{dial: number, attempt: m.id}
		if m.id != 0 {
			e.by = m.rec.value.(Leader)
		}
		a.choose(a.choice, e)
	case kindElsewhere:
		a.choose(a.choice, ledElsewhere{m.rec.value.(elsewhere).At})
	case kindPlan:
		p := m.rec.value.(plan)
		if l == a.link {
			refused(a.Follow(p.By))
			return
		}
		a.choose(a.choice, planSent{number, m.epoch, p})
	case KindPropose:
		if !refused(a.proposal(a.uuid, m.epoch, m.rec.value.(news))) {
			a.reply(l, kindAccepted, m)
		}
	case kindLedger:
		if !refused(a.keep(m.rec.value.(news))) {
			a.reply(l, kindRecorded, m)
		}
	case kindNews:
		_, err := a.begins(a.uuid, m.epoch, m.rec.value.(news), a.proc.clock())
		refused(err)
	case kindOrder:
		a.obey(m.rec.value.(Order))
	case KindFault:
		f := m.rec.value.(Fault)
		a.end(f.Reason)
	case kindHandover:
		h := m.rec.value.(handover)
		a.haveEnded(l.server.agent.uuid, h.Ended...)
		how := lostLeaving
		if h.Failed {
			how = lostResigned
		}
		l.close()
		a.lostLink(l, how, h.Reason)
	case KindRefuse:
		r := m.rec.value.(Refusal)
		a.s.say("%s is refused: %s", a.proc.name, r.Reason)
		l.close()
		if l == a.link {
			a.lostLink(l, lostByIt, r.Reason)
		} else {
			a.choose(a.choice, turnedAway{number, r.Err("sim", "")})
		}
	case kindEnded:
		a.choose(a.choice, linkLost{number})
	}
}

// adopt follows the coordinator at the other end of a link.
func (a *coreAgent) adopt(l *coreLink, self bool) {
	a.s.say("%s follows %s", a.proc.name, l.server.agent.uuid)
	first := a.link == nil
	a.link, a.choosing = l, false
	if !self {
		a.srv.close()
		a.srv = nil
	}
	if first {
		a.spawn()
		return
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
	case Fault:
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
		a.link.send(coreServed, &msg{kind: kindDone, epoch: FirstEpoch})
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
	a.ended, a.choosing = reason, false
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
func (a *coreAgent) lostLink(l *coreLink, how Loss, reason string) {
	if a.ended != "" {
		return
	}
	if l != a.link || a.choosing {
		return
	}
	if a.srv != nil || !a.mayChoose(how) {
		a.end("the coordinator was lost: " + reason)
		return
	}
	ch := a.candidacy(how, l.hello, reason, a.proc.clock())
	a.s.checkEnded(a.proc.name, setOf(ch.Ended))
	a.s.say("%s has lost %s: %s", a.proc.name, ch.Lost, reason)
	a.startChoice(newSuccession(&a.voter, ch, a.addr, l.server.agent.addr, how, a.proc.clock()))
}

// A coreWorker is a process that calls Run.
type coreWorker struct {
	Leadership
	agent   *coreAgent
	proc    *coreProc
	pid     int
	link    *coreLink
	now     *coreCommit // of the function that runs
	working bool        // the function does not know that its epoch has ended
	seat    uint64
	by      Leader
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
	same := old != nil && a.link != nil && a.link.server == old.server && a.link.opened < old.opened // the launcher has not lost it
	if a.proc.paused > 0 || a.choosing || a.link == nil || !a.link.reads[coreMember] || same ||
		!a.s.reaches(w.proc.host, a.link.server.agent.proc) || a.link.server.closed || a.link.server.c.handedOver || a.link.server.c.welcome().Elects {
		if same && !a.choosing && w.proc.clock()-w.lostAt > 2*a.s.lostAfter {
			w.exit(1)
			return
		}
		if w.proc.clock()-w.lostAt > SuccessionTime(a.s.lostAfter)+5*a.s.lostAfter && w.lostAt > 0 {
			w.exit(1)
			return
		}
		w.proc.after(25*time.Millisecond+a.s.random(75*time.Millisecond), w.follow)
		return
	}
	w.link = a.link.server.connect(w.proc, true)
	w.link.receive, w.link.lost = w.receive, w.lostLink
	reg := Registration{Member: Member{Rank: w.rank, LocalSize: 1, Host: a.uuid, PID: w.pid, Node: -1}, Elastic: true, Agent: a.uuid, Least: 1, Seat: w.seat, By: w.by}
	w.link.send(coreServed, &msg{kind: kindRegister, epoch: FirstEpoch, id: RegisterWorker, rec: &record{value: &reg}})
}

func (w *coreWorker) answer(k Kind, epoch, id uint64) {
	w.link.send(coreServed, &msg{kind: k, epoch: epoch, id: id})
}

func (w *coreWorker) receive(l *coreLink, m msg) {
	if l != w.link {
		return
	}
	s := w.agent.s
	switch m.kind {
	case KindWorld:
		v := m.rec.value.(*World)
		if m.epoch <= w.seat {
			s.violate("%s begins epoch %d after epoch %d", w.proc.name, m.epoch, w.seat)
		}
		if err := w.Leadership.Follow(v.By); err != nil {
			s.say("%s: %v", w.proc.name, err)
			if strings.Contains(err.Error(), "fault of Chorus") {
				s.violate("%s: %v", w.proc.name, err)
			}
			w.exit(1)
			return
		}
		w.begin(m.epoch, v, int(m.id))
	case KindPropose:
		w.answer(KindPrepared, m.epoch, m.id)
	case KindRevoke, KindUntil:
		if m.epoch == w.seat {
			w.returns(func() { w.answer(KindRevoked, w.seat, 0) })
		}
	case KindHold:
		if m.epoch == w.seat && w.now != nil {
			w.answer(KindHeld, m.epoch, 0)
		}
	case KindDismiss, KindFinish:
		w.returns(func() { w.exit(0) })
	case KindFault, KindRefuse:
		w.returns(func() { w.exit(1) })
	case kindHandover, kindEnded:
		l.close()
		w.lostLink(l, lostLeaving, "")
	}
}

// begin begins the function of an epoch.
func (w *coreWorker) begin(epoch uint64, v *World, rank int) {
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

func (w *coreWorker) lostLink(l *coreLink, _ Loss, _ string) {
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
			a.link.send(coreServed, &msg{kind: kindExit, epoch: FirstEpoch, rec: &record{value: &e}})
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
