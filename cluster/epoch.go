package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
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
	if !c.isEnough(e.peers) {
		c.inPhase(c.cfg.joinBy, func() { c.endElastic("not enough processes after " + c.cfg.joinBy.String()) })
		c.checkHope()
		return
	}
	c.setPhase(phasePropose)
	e.try++
	e.hosts = c.nextPlan()
	e.next = c.nextWorld(e.peers, e.hosts)
	m := message{kind: kindPropose, epoch: c.epoch + 1, id: e.try}
	for _, p := range e.peers {
		p.elastic.prepared = false
		p.send(m)
	}
	c.proposeToAgents(e.hosts)
	c.cfg.sys.observe(c, false)
	c.inPhase(prepareBy, func() {
		c.loseUnprepared()
		c.killSilent(func(p *peer) bool { return p.elastic.prepared },
			fmt.Sprintf("no answer to the proposal of epoch %d within %v", c.epoch+1, prepareBy), slices.Clone(e.peers))
	})
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
	return len(ps) >= max(c.elastic.least, 1) && len(hosts) >= c.cfg.leastHosts()
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
	c.world, c.engine = e.next, newEngine(len(e.next.Members))
	for _, a := range slices.Clone(c.agents) {
		if a.leaves { // it has agreed to go
			c.dismiss(a)
		}
	}
	if c.plan != nil {
		c.plan = c.planOfEpoch()
		c.electorates, e.inherited = []electorate{e.voters}, false
	}
	c.cfg.sys.observe(c, true)
	c.tellNews(line)
	m := note(kindWorld, e.next)
	m.epoch = c.epoch
	for i, p := range e.peers {
		p.reg.Member, p.seat, p.elastic = e.next.Members[i], c.epoch, answers{exit: p.elastic.exit}
		m.id = uint64(i)
		p.send(m)
	}
	if c.plan == nil {
		c.say(line)
	}
	e.left, e.peers, e.next, e.hosts, e.begun, e.why = nil, nil, nil, nil, time.Time{}, ""
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
	return fmt.Sprintf("epoch %d: %s on %s; %s; the job stood still for %v", c.epoch+1, quantity(len(e.next.Members), unitProcess),
		quantity(len(hosts), unitHost), strings.Join(parts, "; "), time.Since(e.begun).Round(time.Millisecond))
}

// departures describes the processes that have left, by host and reason.
func departures(left []Departure) []string {
	var parts []string
	for len(left) > 0 {
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
	m := note(kindNews, n)
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
		c.inPhase(c.cfg.self.LostAfter/8, c.checkHope)
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
