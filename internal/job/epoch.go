package job

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/safe"
)

// An elastic is the part of a coordinator that forms epochs for processes that call Run.
// An epoch ends by a loss (revoke) or at the end of a step (hold). Then all its members
// answer that their functions have returned, so that no operation of the old epoch begins any
// more. The coordinator proposes the next world to its members, and commits it when all
// have it. Epochs therefore never overlap.
type elastic struct {
	phase     phase
	turn      uint64  // counts changes of phase
	begun     instant // when the epoch ended
	settlesAt instant // until then, further losses are expected
	last      Fault   // the last loss
	codeBy    instant // until then, the exit code of a process whose function has failed is waited for
	why       string  // why a planned change happens
	left      []Departure
	finished  bool // all functions of the epoch have returned nil
	told      bool // and the launchers have recorded it
	over      bool // all functions have returned nil, or the job has failed
	// members are the processes whose functions have all returned nil, by place.
	members map[place]int
	start   func() // sends the first world; nil afterwards

	// clean are the processes that have exited with code 0.
	clean map[process]bool

	// The proposal.
	try      uint64
	proposed []voterSet // of all proposals since the last epoch began
	next     *World
	hosts    *plan
	proposal msg
	peers    []*peer // one for each of next
	voters   voterSet

	// expected are the places in which launchers start workers.
	expected map[place]bool
	retries  map[place]*retries
	// exempt are workers that were killed because their host is excluded: they are started again
	// after that, and this does not count as a restart.
	exempt map[place]bool
	// dying are the PIDs of members that launchers were told to kill, and whose exits are not reported yet.
	dying map[place]int

	// After the loss of a coordinator: absent are the members of its last epoch that have not
	// registered with this one, and those with rank -1 that were only proposed as members. inherited
	// is what the hosts knew, until the next epoch begins.
	absent    map[place]Member
	inherited *history
	takenOver instant
}

// A process is a worker, which its launcher may start again with another PID.
type process struct {
	host       string
	local, pid int
}

// A place identifies a worker of a launcher.
type place struct {
	agent string // UUID, or "" without launchers
	local int    // local rank, or the rank without launchers
}

// sortedPlaces returns the keys of m in an order that is always the same.
func sortedPlaces[T any](m map[place]T) []place {
	return slices.SortedFunc(maps.Keys(m), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.agent, b.agent), cmp.Compare(a.local, b.local))
	})
}

type phase int

const (
	phaseRun     phase = iota // the epoch runs
	phaseHold                 // it ends at the end of a step
	phaseRevoke               // it has ended, and its members answer
	phaseWait                 // there are not enough members for the next one
	phasePropose              // the members of the next one answer
)

const (
	// SettleTime is the time after a loss in which further losses belong to the same change.
	SettleTime = 100 * time.Millisecond
	// gatherTime is the time that a newcomer waits for others that are starting.
	gatherTime = 2 * time.Second
)

// isElastic reports whether the coordinator forms epochs.
func (c *coordinator) isElastic() bool { return c.elastic != nil && !c.elastic.over }

// isDeciding reports whether the coordinator forms epochs, or lets the launchers record the end of the program.
func (c *coordinator) isDeciding() bool {
	return c.isElastic() || c.hasFinished() && !c.elastic.told && !c.handedOver
}

// hasFinished reports whether all functions of an epoch have returned nil. Then no loss of a process or host is a failure: only an exit
// with another code than 0 is.
func (c *coordinator) hasFinished() bool { return c.elastic != nil && c.elastic.finished }

func newElastic() *elastic {
	return &elastic{expected: map[place]bool{}, retries: map[place]*retries{}, exempt: map[place]bool{}, dying: map[place]int{}, absent: map[place]Member{}, clean: map[process]bool{}}
}

// beginElastic is called when the first world of processes that call Run is complete. start
// sends it to them when all launchers know of the epoch, so that the launchers can go on without
// this coordinator from then on.
func (c *coordinator) beginElastic(start func()) {
	c.elastic = newElastic()
	c.elastic.start = start
	for _, p := range c.workers {
		c.arrived(p)
	}
	if c.plan == nil {
		c.startFirst()
		return
	}
	c.voterSets = []voterSet{c.voters(c.plan)}
	c.act(observe{begun: true})
	c.tellNews("")
	c.record(c.startFirst) // a launcher that has recorded the ledger has received the news before
	c.admitLate()
}

// startFirst sends the first world, if it was not sent yet.
func (c *coordinator) startFirst() {
	if start := c.elastic.start; start != nil {
		c.elastic.start = nil
		start()
	}
}

// arrived records a worker that has registered.
func (c *coordinator) arrived(p *peer) {
	e, at := c.elastic, p.home
	delete(e.expected, at)
	if e.retries[at] == nil {
		e.retries[at] = &retries{}
	}
	e.retries[at].inherited = 0
	e.retries[at].started = c.now
	e.retries[at].joined = c.now
}

// homeOf returns the place of a registration.
func (c *coordinator) homeOf(reg Registration) place {
	if c.cfg.agents == 0 {
		return place{local: reg.Rank}
	}
	return place{reg.Agent, reg.LocalRank}
}

// setPhase changes the phase, so that timers of the last one have no effect.
func (c *coordinator) setPhase(p phase) {
	c.startFirst()
	c.elastic.phase = p
	c.elastic.turn++
}

// sinceEnd returns how long ago the last epoch ended, or 0 if it has not. No change of phase, and no process that
// comes, goes or connects again resets it.
func (c *coordinator) sinceEnd() time.Duration {
	if c.elastic.begun == 0 {
		return 0
	}
	return c.now - c.elastic.begun
}

// epochMembers returns the members of the current epoch that are not lost.
func (c *coordinator) epochMembers() []*peer {
	return without(c.workers, func(p *peer) bool { return p.seat != c.epoch })
}

// newcomers returns the workers that wait for the next epoch.
func (c *coordinator) newcomers() []*peer {
	return without(c.workers, func(p *peer) bool { return p.seat == c.epoch })
}

// registerNewcomer adds a worker to the next epoch.
func (c *coordinator) registerNewcomer(p *peer) {
	if r := c.newcomerObjection(p); r != nil {
		c.refuse(p, *r)
		return
	}
	c.admit(p)
	p.reg.arrival = 0
	c.workers = append(c.workers, p)
	c.arrived(p)
	m, awaited := c.elastic.absent[p.home]
	delete(c.elastic.absent, p.home)
	switch {
	case awaited && p.isBack(m):
		p.reg.Rank = m.Rank // not what the process says
		p.seat, p.elastic.returned = c.epoch, true
	case awaited && m.Rank >= 0 && m.PID != p.reg.PID:
		c.elastic.left = append(c.elastic.left, Departure{Member: m, Reason: "its launcher has started another process in its place"})
	}
	switch e := c.elastic; {
	case awaited:
		c.checkReturned()
	case e.phase == phaseRun && len(e.expected) == 0:
		c.beginHold(c.arrivals())
	case e.phase == phaseRun:
		c.inPhase(gatherTime, dueGathered)
	case e.phase == phaseWait:
		c.form()
	}
}

func (c *coordinator) newcomerObjection(p *peer) *Refusal {
	reg := p.reg
	if r := checkNames(reg.Host, reg.Name, reg.Agent); r != nil {
		return r
	}
	if reg.Seat > c.epoch {
		return &Refusal{Reason: EpochsMustGrow(reg.Seat, reg.By, c.epoch, c.leads()).Error()}
	}
	if !reg.Elastic {
		return &Refusal{Reason: "the processes of this job call cluster.Run, and this one cluster.Attach or Join"}
	}
	if c.cfg.agents > 0 {
		a := c.agentOf(p)
		if a == nil || a.draining != nil || reg.LocalRank < 0 || reg.LocalRank >= a.host.LocalSize {
			return &Refusal{Reason: "no launcher of this job has started it, or its host leaves the job"}
		}
	}
	if d := c.excludedFor(reg.Host); d > 0 && reg.Seat == 0 && !c.hasWaited(p.home, reg.Host) {
		c.elastic.exempt[p.home] = true
		return &Refusal{Reason: fmt.Sprintf("host %s is excluded for %v, because its processes failed too often", reg.Host, d.Round(time.Millisecond))}
	}
	for _, q := range slices.Clone(c.workers) {
		if q.home != p.home {
			continue
		}
		if q.elastic.exit == nil {
			return &Refusal{Place: fmt.Sprintf("local rank %d of host %s", reg.LocalRank, reg.Host), First: &q.reg.Member, Second: &p.reg.Member}
		}
		c.loseWorker(q, openSession(*q.elastic.exit)) // its launcher has already started another one
	}
	return nil
}

// hasWaited reports whether the launcher of a process was ordered to start it after the exclusion of its host. The launcher's time may have
// passed sooner, if this process was starved.
func (c *coordinator) hasWaited(at place, host string) bool {
	r := c.elastic.retries[at]
	return r != nil && r.excluded == c.flappers[host].until
}

// arrivals describes the newcomers.
func (c *coordinator) arrivals() string {
	var ms []Member
	for _, p := range c.newcomers() {
		m := p.reg.Member
		m.Rank = -1
		ms = append(ms, m)
	}
	return memberList(ms) + " joined"
}

// elasticDisconnected handles the end of a worker's connection, and gives the
// launcher, if any, time to report the worker's exit.
func (c *coordinator) elasticDisconnected(p *peer, f Fault, closed bool) {
	switch {
	case p.elastic.exit != nil:
		c.loseWorker(p, openSession(*p.elastic.exit))
	case c.agentOf(p) == nil || !closed:
		c.loseWorker(p, f)
	default:
		c.awaitExit(p, f)
	}
}

// awaitExit waits for the second half of a loss: the report or the end of the connection.
func (c *coordinator) awaitExit(p *peer, f Fault) {
	c.after(ExitGrace, deadline{what: dueExit, peer: p, fault: f})
}

// elasticExit handles a launcher's report of a worker's exit, and decides whether the
// launcher starts it again.
func (c *coordinator) elasticExit(a *peer, x Exit) {
	at := place{a.host.UUID, x.Local}
	delete(c.elastic.expected, at)
	if m, ok := c.elastic.absent[at]; ok && m.PID == x.PID {
		c.giveUp(at, x.Reason)
	}
	if c.elastic.dying[at] == x.PID {
		c.hasDied(at)
	}
	for _, p := range slices.Clone(c.workers) {
		if p.home != at || p.reg.PID != x.PID {
			continue
		}
		p.elastic.exit = &x
		x.Rank = p.reg.Rank
		open := !p.over
		c.act(awaitNoLink{p})
		if open { // its last messages may not be read yet
			c.awaitExit(p, openSession(x))
		} else {
			c.loseWorker(p, openSession(x))
		}
	}
	if x.Code == 0 && !x.Asked { // a host that is drained dismisses its workers in the middle of the program
		c.elastic.clean[process{a.host.Host, x.Local, x.PID}] = true
	}
	if f := &c.elastic.last; f.Code < 0 && x.Code > 0 && f.Host == a.host.Host && f.PID == x.PID { // its function has failed
		f.Code = x.Code
	}
	if x.Code != 0 && !x.Asked && c.faults.stop == nil {
		c.countFailure(a, at, x)
		c.orderRestart(a, at, x)
	}
	c.checkHope()
}

// countFailure records the run of a worker that has failed.
func (c *coordinator) countFailure(a *peer, at place, x Exit) {
	run := time.Duration(0)
	if r := c.elastic.retries[at]; r != nil && r.joined != 0 {
		run, r.joined = (c.now - r.joined), 0
	}
	if !c.elastic.exempt[at] {
		c.failedAfter(a.host.Host, run, fmt.Sprintf("local rank %d %s", x.Local, x.Reason))
	}
}

// isUnneeded reports whether a worker is not a member of the last epoch, after all members have finished:
// its launcher had started it again, and nothing depends on it.
func (c *coordinator) isUnneeded(a *peer, x Exit) bool {
	return c.elastic != nil && c.elastic.members != nil && c.elastic.members[place{a.host.UUID, x.Local}] != x.PID
}

// orderRestart tells a launcher whether to start a worker again.
func (c *coordinator) orderRestart(a *peer, at place, x Exit) {
	e := c.elastic
	order := Order{Local: x.Local}
	exempt := e.exempt[at] && c.cfg.again.most > 0
	delete(e.exempt, at)
	r := e.retries[at]
	if r == nil {
		r = &retries{}
		e.retries[at] = r
	}
	counted := r.inherited != 0 && r.inherited == x.PID // by an earlier coordinator, whose order did not arrive
	if (exempt || counted || c.retries.total < c.cfg.again.most) && a.draining == nil {
		if !exempt && !counted {
			r.failed(c.now)
			r.counted = x.PID
			c.retries.total++
		}
		e.expected[at] = true
		order.Start, order.Count = true, r.total
		order.After = max(c.cfg.again.delay(r.inARow), c.excludedFor(a.host.Host))
		if f := c.flappers[a.host.Host]; f != nil {
			r.excluded = f.until
		}
		if !exempt { // so that no coordinator forgets it
			c.record(func() { c.send(a, say(kindOrder, order)) })
			return
		}
	}
	c.send(a, say(kindOrder, order))
}

// loseWorker removes a worker, and ends the epoch if the worker is a member of
// it.
func (c *coordinator) loseWorker(p *peer, f Fault) {
	if p.state != peerJoined {
		return
	}
	p.state = peerGone
	c.workers = remove(c.workers, p)
	c.hangUp(p)
	if f.Reason != leftReason {
		c.orderKill(p)
	}
	e := c.elastic
	member := p.seat == c.epoch
	if member {
		e.left = append(e.left, Departure{Member: p.reg.Member, Reason: f.Reason})
		e.last, e.codeBy = f, 0
		if p.elastic.failed && c.agentOf(p) != nil {
			e.codeBy = c.now + ExitGrace
		}
	}
	switch {
	case c.faults.stop != nil: // the job ends
	case member && e.phase <= phaseHold:
		c.revoke(f)
	case e.phase == phaseRevoke && member:
		e.settlesAt = c.now + SettleTime
		c.inPhase(SettleTime, dueSettled)
	case e.phase == phasePropose && slices.Contains(e.peers, p):
		c.form()
	case e.phase == phaseWait:
		c.checkHope()
	}
}

// orderKill tells the launcher of a lost worker to kill it if it is still running. A
// process that failed by itself has time to exit.
func (c *coordinator) orderKill(p *peer) {
	a := c.agentOf(p)
	if a == nil || p.elastic.exit != nil {
		return
	}
	if !p.elastic.failed && !p.elastic.returned && p.seat == c.epoch {
		c.awaitKill(p.home, p.reg.PID)
	}
	if !p.elastic.failed {
		c.sendKill(a, p.reg.LocalRank, p.reg.PID)
		return
	}
	c.after(exitTime, deadline{what: dueOwnExit, peer: a, place: p.home, pid: p.reg.PID})
}

// killOf returns the order to kill a process.
func killOf(local, pid int) msg { return say(kindOrder, Order{Local: local, PID: pid, Kill: true}) }

// sendKill sends the order to kill a silent worker to its launcher when the launcher is heard. If the launcher is silent, too, its
// host is perhaps cut off in one direction, and goes on with other hosts and this worker.
func (c *coordinator) sendKill(a *peer, local, pid int) {
	if c.isHeard(a) {
		c.send(a, killOf(local, pid))
		return
	}
	c.after(c.cfg.Self.LostAfter/8, deadline{what: dueKill, peer: a, place: place{local: local}, pid: pid})
}

// isHeard reports whether no heartbeat of an agent is overdue.
func (c *coordinator) isHeard(a *peer) bool { return c.silent(a) <= c.cfg.Self.overdueAfter() }

// heard returns the agents that are heard, by UUID.
func (c *coordinator) heard() map[string]bool {
	m := c.present()
	for _, a := range c.agents {
		if !c.isHeard(a) {
			delete(m, a.host.UUID)
		}
	}
	return m
}

// killTime limits how long the next epoch waits for the exit of a process that was killed, because its function had not returned.
const killTime = 2 * time.Second

// awaitKill lets the next epoch wait until a launcher has reported the exit of a process that it was told to kill.
func (c *coordinator) awaitKill(at place, pid int) {
	c.elastic.dying[at] = pid
	c.after(killTime, deadline{what: dueDeath, of: c.elastic, place: at, pid: pid})
}

// hasDied ends awaitKill.
func (c *coordinator) hasDied(at place) {
	if e := c.elastic; e.dying[at] != 0 {
		delete(e.dying, at)
		if c.isElastic() && !c.closed {
			c.checkReturned()
		}
	}
}

// exitTime is the time in which a process exits after its function has failed.
const exitTime = 10 * time.Second

const leftReason = "left the job"

// loseHost removes a host that is gone, and its workers.
func (c *coordinator) loseHost(a *peer, f Fault) {
	c.agents = remove(c.agents, a)
	if a.draining == nil {
		defer c.failedAfter(a.host.Host, c.now-a.since, "its launcher was lost")
	}
	c.send(a, say(KindRefuse, Refusal{Reason: "the coordinator has lost this host: " + f.Reason})) // if it is only cut off, it learns so later
	c.hangUp(a)
	for _, at := range sortedPlaces(c.elastic.absent) {
		if at.agent == a.host.UUID {
			c.giveUp(at, "its host was lost: "+f.Reason)
		}
	}
	for at := range c.elastic.expected {
		if at.agent == a.host.UUID {
			delete(c.elastic.expected, at)
		}
	}
	for _, at := range sortedPlaces(c.elastic.dying) { // the kernel of a host that is lost may still run it
		if at.agent == a.host.UUID {
			c.hasDied(at)
		}
	}
	for _, p := range slices.Clone(c.workers) {
		if p.reg.Agent == a.host.UUID {
			g := f
			g.Reason = "its host was lost: " + f.Reason
			g.Rank, g.PID = p.reg.Rank, p.reg.PID
			c.loseWorker(p, g)
		}
	}
	if !c.isElastic() {
		return
	}
	if c.faults.stop == nil && !c.hasMajority() { // also while functions have not returned
		c.endMinority()
		return
	}
	c.admitLate() // another host may take its place
	if c.elastic.phase == phasePropose && c.faults.stop == nil {
		c.form()
	}
	if c.votes(a) { // it had no workers, and would count as absent if another host is lost
		c.beginHold(fmt.Sprintf("host %s was lost: %s", a.host.Host, f.Reason))
	}
	c.checkHope()
}

// lostTouch removes a member that has lost the coordinator: this process was starved.
func (c *coordinator) lostTouch(p *peer) {
	reason := fmt.Sprintf("the coordinator was silent for it for %v", c.cfg.Self.LostAfter)
	if p.role == roleAgent {
		c.loseAgent(p, agentEnd{reason: reason, knows: true})
		return
	}
	c.loseWorker(p, p.fault(reason))
}

// revoke ends the epoch because of a loss.
func (c *coordinator) revoke(f Fault) {
	e := c.elastic
	if e.begun == 0 {
		e.begun = c.now
	}
	c.setPhase(phaseRevoke)
	m := say(KindRevoke, f)
	m.epoch = c.epoch
	for _, p := range c.epochMembers() {
		c.send(p, m)
	}
	e.settlesAt = c.now + SettleTime
	c.inPhase(SettleTime, dueSettled)
	c.inPhase(c.cfg.RevokeBy, dueReturned)
	c.checkReturned()
}

// killRunning removes the members whose functions have not returned in time.
func (c *coordinator) killRunning() {
	c.killSilent(without(c.epochMembers(), func(p *peer) bool { return p.elastic.returned }),
		fmt.Sprintf("its function did not return within %v after the end of epoch %d", c.cfg.RevokeBy, c.epoch))
	c.checkReturned()
}

// killSilent removes workers that have not answered, so that their launchers
// kill them.
func (c *coordinator) killSilent(ps []*peer, reason string) {
	for _, p := range ps {
		c.loseWorker(p, p.fault(reason))
	}
}

// checkReturned forms the next epoch if no function of the last one is running, unless the program has ended meanwhile.
func (c *coordinator) checkReturned() {
	e := c.elastic
	if e.over || e.phase != phaseHold && (e.phase != phaseRevoke || c.now < e.settlesAt) {
		return
	}
	if len(e.absent) > 0 || len(e.dying) > 0 {
		return
	}
	for _, p := range c.epochMembers() {
		if !p.elastic.returned {
			return
		}
	}
	c.form()
}

// checkFinished ends the job if all functions have returned nil.
func (c *coordinator) checkFinished() {
	e := c.elastic
	if e.phase > phaseHold {
		return
	}
	for _, p := range c.epochMembers() {
		if !p.elastic.finished {
			return
		}
	}
	e.over, e.members = true, map[place]int{}
	for _, p := range c.epochMembers() {
		e.members[p.home] = p.reg.PID
	}
	e.finished = true
	c.record(c.finish)
}

// finish tells all that the program has ended, after all launchers have recorded it.
func (c *coordinator) finish() {
	c.elastic.told = true
	for _, p := range c.workers {
		c.send(p, msg{kind: KindFinish, epoch: c.epoch})
	}
	c.tellAgents(say(kindOrder, Order{Finish: true}))
}

// handleAnswer handles a message of a worker that calls Run.
func (c *coordinator) handleAnswer(p *peer, m msg) error {
	if c.elastic == nil || p.state != peerJoined {
		return nil
	}
	e := c.elastic
	if m.epoch != c.epoch && m.kind != KindPrepared {
		return nil // of an earlier epoch
	}
	switch m.kind {
	case KindFinished, KindRevoked:
		if e.phase == phaseHold && e.begun == 0 {
			e.begun = c.now
		}
		p.elastic.returned, p.elastic.finished = true, p.elastic.finished || m.kind == KindFinished
		if !e.over {
			c.checkFinished()
			c.checkReturned()
		}
	case KindFailed:
		f := *m.rec.value.(*Fault)
		p.elastic.failed = true
		if e.over {
			break
		}
		if e.phase <= phaseHold && e.begun == 0 { // the others have waited for it since then
			e.begun = c.now - min(max(f.Ago, 0), JoinFactor*c.cfg.Self.LostAfter)
		}
		c.loseWorker(p, p.fault(f.Reason))
	case KindHeld:
		c.stepsBegun(p, m.id)
	case KindPrepared:
		c.workerPrepared(p, m.id)
	default:
		return fmt.Errorf("message of kind %d from a worker", m.kind)
	}
	return nil
}

// prepareBy is the time that the members of a proposed world have to answer.
const prepareBy = 5 * time.Second

// form proposes a world of the members that have returned and of the newcomers, or waits
// for more of them.
func (c *coordinator) form() {
	e := c.elastic
	c.setPhase(phaseWait)
	if !c.hasMajority() {
		c.endMinority()
		return
	}
	if c.dismissDrained(); c.handedOver || c.faults.stop != nil {
		return
	}
	e.peers = c.nextMembers()
	limit := min(c.cfg.JoinBy, c.cfg.JoinBy+c.cfg.RevokeBy-c.sinceEnd())
	if limit <= 0 { // newcomers that never answer, or that come and go, must not keep the others waiting
		e.peers = without(e.peers, func(p *peer) bool { return p.seat != c.epoch })
	}
	if !c.isEnough(e.peers) {
		c.inPhase(limit, dueMembers)
		c.checkHope()
		return
	}
	c.setPhase(phasePropose)
	e.try++
	e.hosts = c.nextPlan()
	e.next = c.nextWorld(e.peers, e.hosts)
	m := msg{kind: KindPropose, epoch: c.epoch + 1, id: e.try}
	for _, p := range e.peers {
		p.elastic.prepared = false
		c.send(p, m)
	}
	c.proposeToAgents(e.hosts)
	c.act(observe{})
	c.inPhase(prepareBy, dueAnswers)
}

// nextMembers returns the members of the next epoch: survivors by their
// ranks, and then newcomers by host and local rank.
func (c *coordinator) nextMembers() []*peer {
	old, fresh := c.epochMembers(), c.newcomers()
	slices.SortFunc(old, func(a, b *peer) int { return cmp.Compare(a.reg.Rank, b.reg.Rank) })
	slices.SortStableFunc(fresh, func(a, b *peer) int { return compareMembers(a.reg.Member, b.reg.Member) })
	return append(old, fresh...)
}

// isEnough reports whether workers can be a world.
func (c *coordinator) isEnough(ps []*peer) bool {
	hosts := map[string]bool{}
	for _, p := range ps {
		hosts[p.reg.Agent] = true
	}
	return len(ps) >= leastSize(ps) && len(hosts) >= c.cfg.leastHosts()
}

// leastSize returns the smallest world that workers can work with. All run one program, so the median is what most of them say:
// a single one cannot end the job.
func leastSize(ps []*peer) int {
	var all []int
	for _, p := range ps {
		all = append(all, p.reg.Least)
	}
	slices.Sort(all)
	if len(all) == 0 {
		return 1
	}
	return max(all[(len(all)-1)/2], 1)
}

// leastHosts returns the number of hosts that the job needs.
func (cfg *CoordConfig) leastHosts() int {
	if cfg.agents == 0 || cfg.least == 0 {
		return cfg.agents
	}
	return cfg.least
}

// nextPlan returns the plan without hosts that are lost or leave.
func (c *coordinator) nextPlan() *plan {
	if c.plan == nil {
		return nil
	}
	p := &plan{Restarts: c.plan.Restarts}
	here := func(uuid string) bool {
		return slices.ContainsFunc(c.agents, func(a *peer) bool { return a.host.UUID == uuid && !a.leaves })
	}
	for _, h := range c.plan.Hosts {
		if here(h.UUID) {
			p.Hosts = append(p.Hosts, h)
		}
	}
	return p
}

// planOfEpoch returns the hosts of the proposal, and after them hosts that have come since, because
// members name their hosts by their places in the proposal. The plan does not change before the epoch begins.
func (c *coordinator) planOfEpoch() *plan {
	p := *c.elastic.hosts
	for _, h := range c.nextPlan().Hosts {
		if p.nodeOf(h.UUID) < 0 {
			p = *p.with(h)
		}
	}
	return &p
}

// nextWorld returns the world of the workers ps, in their order, with their hosts' places in next.
func (c *coordinator) nextWorld(ps []*peer, next *plan) *World {
	left := slices.Clone(c.elastic.left)
	slices.SortFunc(left, func(a, b Departure) int { return cmp.Compare(a.Rank, b.Rank) })
	w := &World{By: c.leads(), Left: left}
	for rank, p := range ps {
		m := p.reg.Member
		if p.seat != c.epoch {
			w.New = append(w.New, rank)
		}
		m.Rank, m.Node = rank, -1
		if next != nil {
			m.Node = next.nodeOf(p.reg.Agent)
		}
		w.Members = append(w.Members, m)
	}
	numberHosts(w.Members)
	return w
}

// workerPrepared commits the proposal if all its members have it.
func (c *coordinator) workerPrepared(p *peer, try uint64) {
	e := c.elastic
	if e.phase != phasePropose || try != e.try {
		return
	}
	p.elastic.prepared = true
	c.checkPrepared()
}

// checkPrepared commits the proposal if all its workers and all agents have answered it. Only hosts that have
// answered count: those that are merely connected could still choose another coordinator without knowing of the epoch.
func (c *coordinator) checkPrepared() {
	if slices.ContainsFunc(c.elastic.peers, func(q *peer) bool { return !q.elastic.prepared }) || slices.ContainsFunc(c.agents, c.hasNotAnswered) {
		return
	}
	if c.plan != nil && !allow(c.voterSets, c.answered(), c.ended) { // hosts that have come since are needed
		c.form()
		return
	}
	if d := c.leased(); d > 0 {
		c.inPhase(d, dueLease)
		return
	}
	c.commitEpoch()
}

// answered returns the hosts that have answered the proposal, by UUID.
func (c *coordinator) answered() map[string]bool {
	m := map[string]bool{}
	for _, a := range c.agents {
		if a.state != peerGone && a.answered == c.elastic.try {
			m[a.host.UUID] = true
		}
	}
	return m
}

// commitEpoch begins the proposed epoch.
func (c *coordinator) commitEpoch() {
	e := c.elastic
	c.setPhase(phaseRun)
	e.proposed = nil
	line := c.epochLine()
	c.epoch++
	c.world = e.next
	c.act(openStore{len(e.next.Members)})
	for _, a := range slices.Clone(c.agents) {
		if a.leaves { // it has agreed to go
			c.dismiss(a)
		}
	}
	if c.plan != nil {
		c.plan = c.planOfEpoch()
		c.voterSets, e.inherited = []voterSet{e.voters}, nil
	}
	c.act(observe{begun: true})
	c.tellNews(line)
	m := say(KindWorld, e.next)
	m.epoch = c.epoch
	for i, p := range e.peers {
		p.reg.Member, p.seat, p.elastic = e.next.Members[i], c.epoch, answers{exit: p.elastic.exit}
		m.id = uint64(i)
		c.send(p, m)
	}
	if c.plan == nil {
		c.say(line)
	}
	e.left, e.peers, e.next, e.hosts, e.begun, e.why = nil, nil, nil, nil, 0, ""
	c.checkChanges()
}

// epochLine describes the proposed epoch in one line.
func (c *coordinator) epochLine() string {
	e := c.elastic
	parts := departures(e.next.Left)
	var fresh []Member
	for _, r := range e.next.New {
		fresh = append(fresh, e.next.Members[r])
	}
	if len(fresh) > 0 {
		parts = append(parts, memberList(fresh)+" joined")
	}
	if len(parts) == 0 {
		parts = append(parts, e.why)
	}
	hosts := map[int]bool{}
	for _, m := range e.next.Members {
		hosts[m.Node] = true
	}
	what := safe.Clip(strings.Join(parts, "; "), MaxText/2) // the whole line is a text of a record
	return fmt.Sprintf("epoch %d: %s on %s; %s; the job stood still for %v", c.epoch+1, quantity(len(e.next.Members), UnitProcess),
		quantity(len(hosts), unitHost), what, (c.now - e.begun).Round(time.Millisecond))
}

// shortageLine describes the wait for enough members of the next epoch, or returns "" at its beginning: a process may be
// starting.
func (c *coordinator) shortageLine() string {
	waits := c.sinceEnd()
	if waits < SettleTime*10 {
		return ""
	}
	ps, hosts := c.nextMembers(), map[string]bool{}
	for _, p := range ps {
		hosts[p.reg.Agent] = true
	}
	on, needs := "", quantity(leastSize(ps), UnitProcess)
	if least := c.cfg.leastHosts(); least > 0 {
		on, needs = " on "+quantity(len(hosts), unitHost), needs+" on "+quantity(least, unitHost)
	}
	line := fmt.Sprintf("epoch %d has ended %v ago, and the next one waits for more processes: it has %s%s, and needs at least %s",
		c.epoch, waits.Round(time.Second), quantity(len(ps), UnitProcess), on, needs)
	if parts := departures(c.elastic.left); len(parts) > 0 {
		line += "; " + safe.Clip(strings.Join(parts, "; "), MaxText/2)
	}
	return line
}

// departures describes the processes that have left, by host and reason.
func departures(left []Departure) []string {
	var parts []string
	for len(left) > 0 {
		if len(parts) == maxNamed {
			return append(parts, fmt.Sprintf("%d more left", len(left)))
		}
		first := left[0]
		together := func(d Departure) bool { return d.Host == first.Host && d.Reason == first.Reason }
		who := memberList([]Member{first.Member})
		var ranks []int
		for _, d := range left {
			if together(d) {
				ranks = append(ranks, d.Rank)
			}
		}
		if len(ranks) > 1 {
			who = fmt.Sprintf("%s of host %s", RankList(ranks), first.Host)
		}
		parts = append(parts, fmt.Sprintf("%s left: %s", who, first.Reason))
		left = without(left, together)
	}
	return parts
}

// tellNews tells the launchers of the epoch.
func (c *coordinator) tellNews(line string) {
	if c.plan == nil {
		return
	}
	n := news{By: c.leads(), Plan: *c.plan, Members: c.world.Members, Line: line, Voters: c.voterSets[0], Ledger: c.ledger()}
	if h := c.elastic.inherited; h != nil {
		n.Begun, n.Proposed = h.Epoch, h.Proposed
	}
	m := say(kindNews, n)
	m.epoch = c.epoch
	c.tellAgents(m)
}

// checkHope ends the job if it waits for processes and no launcher starts one.
func (c *coordinator) checkHope() {
	e := c.elastic
	if e.phase != phaseWait || len(e.expected) > 0 || c.faults.stop != nil {
		return
	}
	if c.cfg.agents > 0 && (c.cfg.again.most > 0 || c.cfg.leastHosts() < c.cfg.agents) && len(c.agents) < c.cfg.agents {
		return // a host may come
	}
	if c.plan != nil && !allow(c.voterSets, c.heard(), c.ended) { // this host is perhaps cut off, and the others can go on
		c.inPhase(c.cfg.Self.LostAfter/8, dueHope)
		return
	}
	if e.codeBy > c.now && e.last.Code < 0 { // the job ends with the exit code of its last failure
		c.inPhase(e.codeBy-c.now, dueHope)
		return
	}
	c.endElastic("")
}

// endElastic fails the job with the last loss.
func (c *coordinator) endElastic(note string) {
	e := c.elastic
	e.over = true
	f := e.last
	if f.Reason == "" {
		f = c.ownFault("no process is left")
	}
	if note != "" {
		f.Reason += "; " + note
	}
	c.fail(f, tellAll)
}

// beginHold ends the epoch at the end of a step. Each member answers how many steps it has
// begun, and begins no other one. The greatest number is the last step of the epoch:
// members with a smaller number go on up to it, so that all end at the same step.
func (c *coordinator) beginHold(why string) {
	e := c.elastic
	if e.phase != phaseRun || c.faults.stop != nil {
		return
	}
	e.why = why
	members := c.epochMembers()
	c.setPhase(phaseHold)
	for _, p := range members {
		p.elastic.held = false
		c.send(p, msg{kind: KindHold, epoch: c.epoch})
	}
	c.inPhase(c.cfg.DrainBy, dueHeld)
	c.checkReturned()
}

// stepsBegun records the answer of a member.
func (c *coordinator) stepsBegun(p *peer, steps uint64) {
	if c.elastic.phase != phaseHold || p.seat != c.epoch {
		return
	}
	p.elastic.held, p.elastic.steps = true, steps
	last := uint64(0)
	for _, q := range c.epochMembers() {
		if !q.elastic.held {
			return
		}
		last = max(last, q.elastic.steps)
	}
	for _, q := range c.epochMembers() {
		c.send(q, msg{kind: KindUntil, epoch: c.epoch, id: last})
	}
}

// revokePlanned ends the epoch although not all members have come to the end of a step.
func (c *coordinator) revokePlanned() {
	c.revoke(Fault{Rank: -1, Planned: true, Reason: c.elastic.why})
}

// checkChanges begins the next planned change, if there is one.
func (c *coordinator) checkChanges() {
	if c.elastic.phase != phaseRun {
		return
	}
	c.admitLate()
	for _, a := range c.agents {
		if a.draining != nil && a.state == peerJoined {
			c.beginHold("host " + a.host.Host + " leaves")
			return
		}
	}
	if len(c.newcomers()) > 0 {
		c.beginHold(c.arrivals())
	}
}

// drainHost handles a launcher that was asked to leave the job.
func (c *coordinator) drainHost(a *peer, f Fault) {
	if c.hasFinished() {
		a.draining = &f
		return
	}
	stay := len(without(c.agents, func(p *peer) bool { return p == a || p.draining != nil || p.state == peerGone }))
	for _, x := range c.away { // it may come back, also to the next coordinator
		if x.back > c.now {
			stay++
		}
	}
	if !c.isElastic() || stay < c.cfg.leastHosts() {
		c.stopped(a, f)
		return
	}
	a.draining = &f
	for at := range c.elastic.expected {
		if at.agent == a.host.UUID {
			delete(c.elastic.expected, at)
		}
	}
	c.checkChanges()
	if c.elastic.phase == phaseWait {
		c.form()
	}
}

// coordinates reports whether an agent is on the host of this coordinator.
func (c *coordinator) coordinates(a *peer) bool { return a.host.UUID == c.cfg.Self.Agent }

// successors returns the agents that could coordinate if this host leaves.
func (c *coordinator) successors() []*peer {
	return without(c.agents, func(a *peer) bool {
		return a.draining != nil || a.state == peerGone || a.host.Control == "" || c.coordinates(a)
	})
}

// canHandOver reports whether the other hosts can choose a coordinator when own, the agent of this host, has
// left. If they are not enough now, they are after the next epoch has begun.
func (c *coordinator) canHandOver(own *peer) bool {
	if slices.ContainsFunc(c.agents, func(a *peer) bool { return a.draining != nil && a != own }) {
		return false // they must agree to an epoch without them
	}
	here, ended := c.present(), maps.Clone(c.ended)
	if ended == nil {
		ended = map[string]bool{}
	}
	ended[own.host.UUID] = true
	delete(here, own.host.UUID)
	// If a proposal has failed, the others cannot know whether its epoch has begun.
	return allow(slices.Concat(c.voterSets, c.elastic.proposed), here, ended)
}

// handOver tells all members that another host must coordinate, while no epoch
// is running. This coordinator does nothing after that.
func (c *coordinator) handOver(h handover) {
	c.handedOver, c.elastic.over = true, true
	h.Ended = slices.Sorted(maps.Keys(c.ended))
	c.sendHandover(h, slices.Concat(c.agents, c.workers, c.late))
	c.agents, c.workers, c.late = nil, nil, nil
}

// sendHandover tells processes that this coordinator does nothing for them any more, and also those that have not registered.
func (c *coordinator) sendHandover(h handover, ps []*peer) {
	m := say(kindHandover, h)
	c.act(send{ps, m})
	for _, p := range ps {
		p.state = peerGone
		c.hangUp(p)
	}
	c.act(hangUpUnregistered{m})
}

// dismissDrained removes the workers of hosts that leave, after their functions have
// returned. Their launchers still decide on the epoch without them: until they have agreed to it, they could choose another
// coordinator with others. If this host leaves, another one coordinates from then on.
func (c *coordinator) dismissDrained() {
	for _, a := range slices.Clone(c.agents) {
		switch own := c.coordinates(a); {
		case a.draining == nil || a.state == peerGone:
			continue
		case own && len(c.successors()) == 0: // nobody is left who could go on
			c.stopped(a, *a.draining)
			continue
		case own && !c.canHandOver(a):
			continue
		}
		c.dismissWorkers(a)
		a.leaves = true
		if c.coordinates(a) {
			c.markEnded(a)
			c.dismiss(a)
			c.handOver(handover{Reason: a.draining.Reason})
			return
		}
	}
}

// dismissWorkers removes the workers of a host that leaves.
func (c *coordinator) dismissWorkers(a *peer) {
	for _, p := range without(c.workers, func(p *peer) bool { return p.reg.Agent != a.host.UUID }) {
		p.state = peerGone
		c.workers = remove(c.workers, p)
		if p.seat == c.epoch {
			c.elastic.left = append(c.elastic.left, Departure{Member: p.reg.Member, Planned: true, Reason: "its launcher " + a.draining.Reason})
		}
		c.send(p, msg{kind: KindDismiss, epoch: c.epoch})
		c.hangUp(p)
	}
}

// dismiss removes the launcher of a host that leaves.
func (c *coordinator) dismiss(a *peer) {
	c.agents = remove(c.agents, a)
	a.state = peerDone
	c.send(a, say(kindOrder, Order{Stop: true}))
}

// admitHost adds a host to a running job, if it has a place for one.
func (c *coordinator) admitHost(a *peer) {
	needed := len(c.agents) < c.cfg.leastHosts()
	if len(c.agents) >= c.cfg.agents || c.excludedFor(a.host.Host) > 0 && !needed {
		c.late = append(c.late, a)
		return
	}
	if taken := func(b *peer) bool { return a.host.NodeRank >= 0 && b.host.NodeRank == a.host.NodeRank }; slices.ContainsFunc(c.agents, taken) {
		c.refuse(a, Refusal{Reason: fmt.Sprintf("node rank %d is taken", a.host.NodeRank)})
		return
	}
	c.agents = append(c.agents, a)
	c.plan = c.plan.with(a.host)
	for local := range a.host.LocalSize {
		c.elastic.expected[place{a.host.UUID, local}] = true
	}
	c.send(a, c.planNote())
	c.send(a, msg{kind: kindComplete, epoch: c.epoch})
	c.tellNews("")
	if c.elastic.phase == phasePropose { // from now on it counts the end of this coordinator, and must know what may begin
		c.ask(a)
	}
}
