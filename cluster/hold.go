package cluster

import (
	"fmt"
	"maps"
	"slices"
)

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
		p.send(message{kind: kindHold, epoch: c.epoch})
	}
	c.inPhase(c.cfg.drainBy, func() {
		c.revokePlanned()
	})
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
		q.send(message{kind: kindUntil, epoch: c.epoch, id: last})
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

// heirs returns the agents that could coordinate if this host leaves.
func (c *coordinator) heirs() []*peer {
	return without(c.agents, func(a *peer) bool {
		return a.draining != nil || a.state == peerGone || a.host.Control == "" || c.coordinates(a)
	})
}

// canHandOver reports whether the other hosts can choose a coordinator when own, the agent of this host, has
// left. If they are not enough now, they are after the next epoch has begun. Without any, the job is stopped.
func (c *coordinator) canHandOver(own *peer) bool {
	if len(c.heirs()) == 0 {
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
	c.sendHandover(h, slices.Concat(c.agents, c.workers, c.late, c.unregistered()))
	c.agents, c.workers, c.late = nil, nil, nil
}

// sendHandover tells processes that this coordinator does nothing for them any more.
func (c *coordinator) sendHandover(h handover, ps []*peer) {
	m := note(kindHandover, h)
	for _, p := range ps {
		p.state = peerGone
		p.send(m)
		p.closeAfterQueue()
	}
}

// unregistered returns the peers that have not registered.
func (c *coordinator) unregistered() []*peer {
	return without(slices.Collect(maps.Values(c.peers)), func(p *peer) bool { return p.role != roleNone })
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
		p.send(message{kind: kindDismiss, epoch: c.epoch})
		p.closeAfterQueue()
	}
}

// dismiss removes the launcher of a host that leaves.
func (c *coordinator) dismiss(a *peer) {
	c.agents = remove(c.agents, a)
	a.state = peerDone
	a.send(note(kindOrder, Order{Stop: true}))
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
	a.send(c.planNote())
	a.send(message{kind: kindComplete, epoch: c.epoch})
	c.tellNews("")
}
