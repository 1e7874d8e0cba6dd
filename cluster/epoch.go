package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/plain"
)

// prepareBy is the time that the members of a proposed world have to answer.
const prepareBy = 5 * time.Second

// form proposes a world of the members that have returned and of the newcomers, or waits
// for more of them.
func (c *coordinator) form() {
	e := c.elastic
	c.setPhase(phaseWait)
	if c.isMinority() {
		return
	}
	if c.dismissDrained(); c.handedOver || c.faults.stop != nil {
		return
	}
	e.peers = c.nextMembers()
	limit := min(c.cfg.joinBy, c.cfg.joinBy+c.cfg.revokeBy-c.sinceEnd())
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
	m := msg{kind: kindPropose, epoch: c.epoch + 1, id: e.try}
	for _, p := range e.peers {
		p.elastic.prepared = false
		c.send(p, m)
	}
	c.proposeToAgents(e.hosts)
	c.act(observe{})
	c.inPhase(prepareBy, dueAnswers)
}

// nextMembers returns the members of the next epoch: survivors in the order of their
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
func (cfg *coordConfig) leastHosts() int {
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
func (c *coordinator) nextWorld(ps []*peer, next *plan) *world {
	left := slices.Clone(c.elastic.left)
	slices.SortFunc(left, func(a, b Departure) int { return cmp.Compare(a.Rank, b.Rank) })
	w := &world{By: c.leads(), Left: left}
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
	if slices.ContainsFunc(c.elastic.peers, func(q *peer) bool { return !q.elastic.prepared }) || slices.ContainsFunc(c.agents, c.owesAnswer) {
		return
	}
	if c.plan != nil && !allow(c.electorates, c.answered(), c.ended) { // hosts that have come since are needed
		c.form()
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
		c.electorates, e.inherited = []electorate{e.voters}, false
	}
	c.act(observe{begun: true})
	c.tellNews(line)
	m := say(kindWorld, e.next)
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
	what := plain.Clip(strings.Join(parts, "; "), maxText/2) // the whole line is a text of a record
	return fmt.Sprintf("epoch %d: %s on %s; %s; the job stood still for %v", c.epoch+1, quantity(len(e.next.Members), unitProcess),
		quantity(len(hosts), unitHost), what, (c.now - e.begun).Round(time.Millisecond))
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
			who = fmt.Sprintf("%s of host %s", rankList(ranks), first.Host)
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
	n := news{By: c.leads(), Plan: *c.plan, Members: c.world.Members, Line: line, Ledger: c.ledger()}
	if !c.elastic.inherited {
		n.Voters = c.electorates[0]
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
	if c.plan != nil && !allow(c.electorates, c.heard(), c.ended) { // this host is perhaps cut off, and the others can go on
		c.inPhase(c.cfg.self.LostAfter/8, dueHope)
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
		f = fault{Rank: -1, Host: c.cfg.self.Host, PID: c.cfg.self.PID, Code: -1, Reason: "no process is left"}
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
		c.send(p, msg{kind: kindHold, epoch: c.epoch})
	}
	c.inPhase(c.cfg.drainBy, dueHeld)
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
		c.send(q, msg{kind: kindUntil, epoch: c.epoch, id: last})
	}
}

// revokePlanned ends the epoch although not all members have come to the end of a step.
func (c *coordinator) revokePlanned() {
	c.revoke(fault{Rank: -1, Planned: true, Reason: c.elastic.why})
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
func (c *coordinator) drainHost(a *peer, f fault) {
	stay := without(c.agents, func(p *peer) bool { return p == a || p.draining != nil || p.state == peerGone })
	if !c.isElastic() || len(stay) < c.cfg.leastHosts() {
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
func (c *coordinator) coordinates(a *peer) bool { return a.host.UUID == c.cfg.self.Agent }

// successors returns the agents that could coordinate if this host leaves.
func (c *coordinator) successors() []*peer {
	return without(c.agents, func(a *peer) bool {
		return a.draining != nil || a.state == peerGone || a.host.Control == "" || c.coordinates(a)
	})
}

// canHandOver reports whether the other hosts can choose a coordinator when own, the agent of this host, has
// left. If they are not enough now, they are after the next epoch has begun. Without any, the job is stopped.
func (c *coordinator) canHandOver(own *peer) bool {
	if len(c.successors()) == 0 {
		c.stopped(own, *own.draining)
		return false
	}
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
	return allow(slices.Concat(c.electorates, c.elastic.proposed), here, ended)
}

// handOver tells all members that another host must coordinate. No epoch is running. This
// coordinator does nothing after that.
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
	c.act(hangUpGuests{m})
}

// dismissDrained removes the workers of hosts that leave, after their functions have
// returned. Their launchers still decide on the epoch without them: until they have agreed to it, they could choose another
// coordinator with others. If this host leaves, another one coordinates from then on.
func (c *coordinator) dismissDrained() {
	for _, a := range slices.Clone(c.agents) {
		if a.draining == nil || a.state == peerGone || c.coordinates(a) && !c.canHandOver(a) {
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
		c.send(p, msg{kind: kindDismiss, epoch: c.epoch})
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
		c.refuse(a, refusal{Reason: fmt.Sprintf("node rank %d is taken", a.host.NodeRank)})
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
}
