package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// A succession is the state of a coordinator that wants to go on for one that was lost. It
// collects agents until they are enough, and proposes itself to them. See failover.go for
// the agents' side.
type succession struct {
	charter charter
	begun   time.Time
	hosts   map[string]*charter // of the agents that have registered, by UUID
	timer   *time.Timer         // runs when enough agents are present
	due     bool                // the others have had their time
}

// succeed makes a new coordinator continue the job of ch after the agents have agreed.
func (c *coordinator) succeed(ch charter, begun time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.succession = &succession{charter: ch, begun: begun, hosts: map[string]*charter{}}
}

// registerVoter adds an agent that has lost its coordinator.
func (c *coordinator) registerVoter(p *peer) {
	s, ch := c.succession, p.host.Charter
	p.host.Charter = nil
	p.admit()
	p.ready = true
	c.agents = append(c.agents, p)
	s.hosts[p.host.UUID] = ch
	s.charter.merge(ch)
	switch here := c.present(); {
	case c.attempt == 0:
		c.trySucceed()
	case allow(s.charter.electorates(), here, setOf(s.charter.Ended)): // this agent must be asked, too
		c.propose()
	default: // it knows of an epoch whose hosts are not enough here
		c.withdraw()
	}
}

// voterLeft continues without an agent that had registered.
func (c *coordinator) voterLeft(p *peer) {
	if s := c.succession; s != nil {
		delete(s.hosts, p.host.UUID)
		c.trySucceed()
	}
}

// present returns the agents of the job that are connected, by UUID.
func (c *coordinator) present() map[string]bool {
	m := map[string]bool{}
	for _, a := range c.agents {
		if a.state != peerGone {
			m[a.host.UUID] = true
		}
	}
	return m
}

// jobElsewhere handles the message of a coordinator of this job that is running: this one must
// not begin another job, and its agents join the other one.
func (c *coordinator) jobElsewhere(p *peer, m message) {
	p.closeAfterQueue()
	if c.plan != nil || c.succession != nil {
		return
	}
	c.elsewhere = time.Now()
	c.withdraw()
	c.tellAgents(m)
	time.AfterFunc(c.elsewhereTime(), func() { // the other job may have ended
		c.mu.Lock()
		defer c.unlock()
		c.tryPropose()
	})
}

// mustWait reports whether another coordinator runs the job.
func (c *coordinator) mustWait() bool {
	return !c.elsewhere.IsZero() && time.Since(c.elsewhere) < c.elsewhereTime()
}

func (c *coordinator) elsewhereTime() time.Duration { return 2*c.cfg.self.LostAfter + 2*warnEvery }

// markEnded records that a host does not take part in decisions any more.
func (c *coordinator) markEnded(a *peer) {
	if c.ended == nil {
		c.ended = map[string]bool{}
	}
	c.ended[a.host.UUID] = true
}

// trySucceed proposes this coordinator if enough agents are present. It gives the others some
// time to notice the loss.
func (c *coordinator) trySucceed() {
	s, here := c.succession, c.present()
	ended := setOf(s.charter.Ended)
	if c.attempt != 0 || c.closed || !allow(s.charter.electorates(), here, ended) {
		return
	}
	others := without(s.charter.Voters, func(u string) bool { return here[u] || ended[u] || u == s.charter.Lost })
	if len(others) == 0 || s.due {
		c.propose()
		return
	}
	if s.timer == nil {
		s.timer = time.AfterFunc(c.cfg.self.LostAfter/2, func() {
			c.mu.Lock()
			defer c.unlock()
			s.due = true
			if c.succession == s {
				c.trySucceed()
			}
		})
	}
}

// takeOver begins to coordinate, after all agents that are present have agreed. The last epoch
// has ended with its coordinator: each worker registers when its function has returned.
func (c *coordinator) takeOver() {
	s := c.succession
	ch := &s.charter
	c.succession, c.attempt = nil, 0
	c.epoch = max(ch.Epoch, ch.Next)
	p := ch.Plan
	for _, a := range c.agents { // hosts that came after the last epoch began
		if p.nodeOf(a.host.UUID) < 0 {
			p.Hosts = append(slices.Clone(p.Hosts), a.host)
		}
	}
	c.plan, c.planned = &p, time.Now()
	c.world = &world{Members: ch.Members}
	c.newStore(len(ch.Members))
	c.electorates, c.ended = ch.electorates(), setOf(ch.Ended)
	c.retries.total = ch.Used
	e := newElastic()
	e.begun, e.inherited = s.begun, true
	took := "took over from a coordinator that was lost: " + ch.Reason
	e.last = fault{Rank: -1, Host: c.cfg.self.Host, PID: c.cfg.self.PID, Code: -1, Reason: "it " + took}
	e.why = fmt.Sprintf("host %s %s", c.cfg.self.Host, took)
	c.elastic = e
	m := note(kindPlan, c.plan)
	m.epoch = c.epoch
	c.tellAgents(m)
	c.tellAgents(message{kind: kindComplete, epoch: c.epoch})
	c.awaitSurvivors(s)
	c.say(fmt.Sprintf("host %s coordinates the job now", c.cfg.self.Host))
}

// awaitSurvivors waits for the workers of the hosts that are present, and records the others as lost.
func (c *coordinator) awaitSurvivors(s *succession) {
	e := c.elastic
	for _, m := range s.charter.Members {
		uuid := s.charter.hostOf(m)
		at := place{uuid, m.LocalRank}
		switch h := s.hosts[uuid]; {
		case h == nil && uuid == s.charter.Lost && s.charter.Planned:
			e.left = append(e.left, Departure{Member: m, Planned: true, Reason: "its launcher " + s.charter.Reason})
		case h == nil && uuid == s.charter.Lost:
			e.left = append(e.left, Departure{Member: m, Reason: "its host was lost: " + s.charter.Reason})
		case h == nil && c.ended[uuid]:
			e.left = append(e.left, Departure{Member: m, Reason: "the launcher of its host has ended"})
		case h == nil:
			e.left = append(e.left, Departure{Member: m, Reason: "its host did not take part in the choice of a coordinator"})
		case exitOf(h.Exits[m.LocalRank], m.PID) >= 0: // another process may run in its place
			exits := h.Exits[m.LocalRank]
			e.left = append(e.left, Departure{Member: m, Reason: exits[exitOf(exits, m.PID)].Reason})
		case slices.Contains(h.Running, m.LocalRank):
			e.absent[at] = m
		default:
			e.left = append(e.left, Departure{Member: m, Reason: "it has exited"})
		}
	}
	c.awaitNewcomers(s)
	c.setPhase(phaseRevoke)
	e.quiet = time.Now()
	c.inPhase(c.cfg.revokeBy, func() {
		reason := fmt.Sprintf("its function did not return within %v after the loss of the coordinator", c.cfg.revokeBy)
		for at, m := range maps.Clone(e.absent) {
			c.giveUp(at, reason)
			for _, a := range c.agents {
				if a.host.UUID == at.agent {
					a.send(note(kindOrder, Order{Local: at.local, PID: m.PID, Kill: true}))
				}
			}
		}
	})
	c.checkReturned()
}

// awaitNewcomers waits for the workers that are not members of the last epoch, if the hosts that are present have
// proposals with them: they have perhaps begun the next one. The others are expected.
func (c *coordinator) awaitNewcomers(s *succession) {
	e := c.elastic
	for uuid, h := range s.hosts {
		for local, pid := range h.Fresh {
			at := place{uuid, local}
			if _, ok := e.absent[at]; !ok {
				e.absent[at] = Member{Rank: -1, LocalRank: local, PID: pid}
			}
		}
		for _, local := range h.Running {
			if _, ok := e.absent[place{uuid, local}]; !ok {
				e.expected[place{uuid, local}] = true
			}
		}
	}
}

// hostOf returns the UUID of the agent of a member.
func (c *charter) hostOf(m Member) string {
	if m.Node < 0 || m.Node >= len(c.Plan.Hosts) {
		return ""
	}
	return c.Plan.Hosts[m.Node].UUID
}

// isBack reports whether a worker that registers is the member m of the last epoch. A worker that
// has begun no epoch is new, also if the last coordinator has made it a member.
func (p *peer) isBack(m Member) bool {
	return m.Rank >= 0 && m.PID == p.reg.PID && p.reg.Seat > 0
}

// giveUp records that a worker does not come back.
func (c *coordinator) giveUp(at place, reason string) {
	e := c.elastic
	m, ok := e.absent[at]
	if !ok {
		return
	}
	delete(e.absent, at)
	if m.Rank >= 0 {
		e.left = append(e.left, Departure{Member: m, Reason: reason})
	}
	c.checkReturned()
}

// voters returns the hosts of a plan in the order in which they would coordinate: this
// one, the seeds, and the others.
func (c *coordinator) voters(of *plan) electorate {
	rank := func(h host) int {
		switch {
		case h.UUID == c.cfg.self.Agent:
			return 0
		case h.Seed:
			return 1
		}
		return 2
	}
	hosts := slices.Clone(of.Hosts)
	slices.SortStableFunc(hosts, func(a, b host) int { return cmp.Compare(rank(a), rank(b)) })
	var out electorate
	for _, h := range hosts {
		out = append(out, h.UUID)
	}
	return out
}

// votes reports whether a host belongs to the electorate of the epoch, and is not known to have ended.
func (c *coordinator) votes(a *peer) bool {
	return !c.ended[a.host.UUID] && slices.ContainsFunc(c.electorates, func(e electorate) bool { return slices.Contains(e, a.host.UUID) })
}

// isMinority reports whether the hosts that are left may not form another epoch, and then ends
// the job in this part of the network.
func (c *coordinator) isMinority() bool {
	here := c.present()
	if c.plan == nil || allow(c.electorates, here, c.ended) {
		return false
	}
	c.endElastic(minority(c.electorates, here, c.ended, c.epoch))
	return true
}

// proposeToAgents tells the agents of the next epoch, so that each can go on if this
// coordinator is lost while it begins.
func (c *coordinator) proposeToAgents(next *plan) {
	if next == nil {
		return
	}
	e := c.elastic
	e.voters = c.voters(next)
	e.proposed = append(e.proposed, e.voters)
	m := note(kindPropose, news{Voters: e.voters, Ended: slices.Sorted(maps.Keys(c.ended)), Fresh: c.freshMembers()})
	m.epoch, m.id = c.epoch+1, e.try
	for _, a := range c.agents {
		a.prepared = false
		a.send(m)
	}
}

// freshMembers returns the members of the proposal that are new. If this coordinator is lost, the next one
// waits for their functions: they may have begun the epoch.
func (c *coordinator) freshMembers() (out []fresh) {
	for _, r := range c.elastic.next.New {
		p := c.elastic.peers[r]
		out = append(out, fresh{Agent: p.home.agent, Local: p.home.local, PID: p.reg.PID})
	}
	return out
}

// agentPrepared records that an agent has the proposal, or knows of the first epoch.
func (c *coordinator) agentPrepared(a *peer, try uint64) {
	switch e := c.elastic; {
	case e.start != nil:
		a.prepared = true
		first := c.electorates[0]
		if !slices.ContainsFunc(c.agents, func(a *peer) bool { return a.owes(first) }) {
			c.startFirst()
		}
	case e.phase == phasePropose && try == e.try:
		a.prepared = true
		c.checkPrepared()
	}
}

// owesAnswer reports whether an agent has not answered the proposal.
func (c *coordinator) owesAnswer(a *peer) bool { return a.owes(c.elastic.voters) }

// owes reports whether an agent belongs to an electorate and has not answered.
func (p *peer) owes(e electorate) bool {
	return !p.prepared && p.state == peerJoined && slices.Contains(e, p.host.UUID)
}

// loseUnprepared removes the hosts whose agents have not answered the proposal.
func (c *coordinator) loseUnprepared() {
	for _, a := range slices.Clone(c.agents) {
		if c.owesAnswer(a) {
			c.hostLost(a, fmt.Sprintf("no answer to the proposal of epoch %d within %v", c.epoch+1, prepareBy))
		}
	}
}
