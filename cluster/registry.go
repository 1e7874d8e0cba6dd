package cluster

import (
	"errors"
	"fmt"
	"slices"
)

// register adds a peer. The id of the message is 1 for an agent and 0 for a
// worker.
func (c *coordinator) register(p *peer, m msg) error {
	if p.role != roleNone {
		return fmt.Errorf("second registration")
	}
	if m.id == registerAgent && p.worker {
		return errors.New("a worker registers as a launcher: CHORUS_TOKEN is valid for workers only")
	}
	if m.id == registerAgent {
		p.role = roleAgent
		p.host = *m.rec.value.(*host)
		return c.registerAgent(p)
	}
	p.role = roleWorker
	p.reg = *m.rec.value.(*registration)
	p.home = c.homeOf(p.reg)
	return c.registerWorker(p)
}

const (
	registerWorker = 0
	registerAgent  = 1
)

// registerWorker adds a worker, and commits the world if it is the last one.
func (c *coordinator) registerWorker(p *peer) error {
	if c.isElastic() {
		c.registerNewcomer(p)
		return nil
	}
	if c.succession != nil { // the worker asked before this host became a candidate
		c.hangUp(p)
		return nil
	}
	if c.elastic != nil && p.reg.Elastic && c.faults.lost == nil { // it comes after the end
		c.admit(p)
		c.workers = append(c.workers, p)
		c.send(p, msg{kind: kindFinish, epoch: c.epoch})
		return nil
	}
	if c.faults.lost != nil {
		c.send(p, say(kindFault, c.faults.lost))
		p.state = peerGone
		return nil
	}
	if r := c.objection(p.reg); r != nil {
		c.refuse(p, *r)
		if r.First != nil {
			c.endJoin(*r)
		}
		return nil
	}
	c.admit(p)
	c.gone = without(c.gone, func(q Member) bool { return q.Rank >= 0 && q.Rank == p.reg.Rank })
	c.workers = append(c.workers, p)
	if len(c.workers) == c.size() {
		c.commitWorld()
	} else if e, ok := c.faults.firstExit(c); ok {
		c.fail(e.fault(), e.reach())
	}
	return nil
}

// objection returns the reason why a worker cannot join, or nil.
func (c *coordinator) objection(reg registration) *refusal {
	size := c.size()
	if r := checkNames(reg.Host, reg.Name); r != nil {
		return r
	}
	switch {
	case c.verdict != nil:
		return c.verdict
	case size == 0:
		return &refusal{Reason: "some hosts of the job have not joined yet"}
	case reg.Epoch > 0 && reg.Epoch != c.epoch:
		return &refusal{Reason: fmt.Sprintf("the process was started in epoch %d of the job, which is in epoch %d", reg.Epoch, c.epoch)}
	case reg.Size > 0 && reg.Size != size:
		return &refusal{Reason: fmt.Sprintf("the process has world size %d, the coordinator %d", reg.Size, size)}
	case reg.Rank >= size:
		return &refusal{Reason: fmt.Sprintf("rank %d in a world of size %d", reg.Rank, size)}
	}
	for _, q := range c.workers {
		if q.reg.Elastic != reg.Elastic {
			return &refusal{Reason: "some processes call cluster.Run and some cluster.Attach or Join; use one of them in all processes"}
		}
		if (q.reg.Rank < 0) != (reg.Rank < 0) {
			return &refusal{Reason: "some processes have a rank and some do not; set it in all processes or in none"}
		}
		if reg.Rank >= 0 && q.reg.Rank == reg.Rank {
			return &refusal{Place: fmt.Sprintf("rank %d", reg.Rank), First: &q.reg.Member, Second: &reg.Member}
		}
	}
	if c.world != nil {
		return &refusal{Reason: fmt.Sprintf("the world of %d processes is complete (epoch %d)", size, c.epoch)}
	}
	return nil
}

// endJoin fails the incomplete job: it sends the reason to all members, also to
// those that connect later.
func (c *coordinator) endJoin(r refusal) {
	if c.verdict != nil || c.world != nil || c.cfg.agents > 0 && c.plan != nil {
		return
	}
	c.verdict = &r
	for _, p := range slices.Concat(c.agents, c.workers) {
		if p.state == peerJoined {
			c.refusePeer(p, r)
		}
	}
}

func (e gaveUp) happen(c *coordinator) error {
	c.endJoin(refusal{Waited: e.waited, Attendance: &e.attendance})
	return nil
}

// commitWorld assigns the ranks and notifies all workers.
func (c *coordinator) commitWorld() {
	ms := members(c.workers)
	for i := range ms {
		ms[i].arrival = i
	}
	ms = assignRanks(ms)
	c.world = &world{Members: ms}
	c.act(openStore{len(ms)})
	c.tellAgents(msg{kind: kindComplete, epoch: c.epoch})
	for _, member := range ms {
		p := c.workers[member.arrival]
		p.reg.Member, p.seat = member, c.epoch
	}
	ps, epoch, by := slices.Clone(c.workers), c.epoch, c.leads()
	start := func() {
		m := say(kindWorld, &world{By: by, Members: ms})
		m.epoch = epoch
		for _, member := range ms {
			m.id = uint64(member.Rank)
			c.send(ps[member.arrival], m)
		}
	}
	if len(ps) > 0 && ps[0].reg.Elastic {
		c.beginElastic(start)
		return
	}
	start()
}

// workerLeft handles a graceful exit. Before the world is complete it frees the
// place.
func (c *coordinator) workerLeft(p *peer, gaveUp bool) {
	if p.state != peerJoined {
		return
	}
	if c.isElastic() {
		c.loseWorker(p, fault{Rank: p.reg.Rank, Host: p.reg.Host, PID: p.reg.PID, Reason: "left the job", Code: -1})
		return
	}
	p.state = peerGone
	if c.world == nil {
		c.workers = remove(c.workers, p)
		if gaveUp {
			c.gaveUp(p)
		}
		return
	}
	c.act(leaveStore{p.reg.Rank})
}

// gaveUp records that a member timed out before the job was complete. A job of n members
// has the last n of them.
func (c *coordinator) gaveUp(p *peer) {
	if n := max(c.size(), c.cfg.agents); len(c.gone) >= n {
		c.gone = c.gone[len(c.gone)-n+1:]
	}
	c.gone = append(c.gone, p.member())
}

// registerAgent adds a host, and proposes a plan if it is the last one.
func (c *coordinator) registerAgent(p *peer) error {
	if ch := p.host.History; ch != nil {
		if err := ch.check(); err != nil {
			c.refuse(p, refusal{Reason: fmt.Sprintf("the history of host %s: %v", p.host.Host, err)})
			return nil
		}
	}
	if ch := p.host.History; ch != nil && ch.Run != c.run {
		c.refuse(p, refusal{Reason: fmt.Sprintf("host %s comes from another run of the job", p.host.Host)})
		return nil
	}
	if c.succession != nil && p.host.History != nil {
		c.registerVoter(p)
		return nil
	}
	if ch := p.host.History; ch != nil && c.plan != nil {
		c.checkTerm(leader{Term: ch.Term, Run: ch.Run, Name: "another host"})
	}
	if r := c.hostObjection(p.host); r != nil {
		c.refuse(p, *r)
		if r.First != nil || r.All {
			c.endJoin(*r)
		}
		return nil
	}
	c.admit(p)
	p.ready, p.host.History = true, nil
	if c.isElastic() {
		c.admitHost(p)
		return nil
	}
	if c.plan != nil || c.succession != nil {
		c.late = append(c.late, p)
		return nil
	}
	c.gone = without(c.gone, func(q Member) bool { return q.Host == p.host.Host })
	c.agents = append(c.agents, p)
	c.tryPropose()
	return nil
}

func (c *coordinator) hostObjection(h host) *refusal {
	n := c.cfg.agents
	if r := checkNames(h.Host, h.UUID, h.MasterAddr); r != nil {
		return r
	}
	switch {
	case c.verdict != nil:
		return c.verdict
	case n == 0:
		return &refusal{Reason: "the coordinator's job was not started by chorus run"}
	case h.History != nil && !c.isElastic():
		return &refusal{Reason: fmt.Sprintf("host %s comes from epoch %d of the job, and this coordinator has started another one", h.Host, h.History.Epoch)}
	case h.Unfit != "":
		return &refusal{All: true, Reason: fmt.Sprintf("host %s cannot take part: %s", h.Host, h.Unfit)}
	case h.Nodes != n:
		return &refusal{All: true, Reason: fmt.Sprintf("host %s has a job of %s, the coordinator of %d; use the same --nnodes on all hosts", h.Host, quantity(h.Nodes, unitHost), n)}
	case h.MinNodes != c.cfg.leastHosts():
		return &refusal{All: true, Reason: fmt.Sprintf("host %s has a job of at least %s, the coordinator of %d; use the same --nnodes on all hosts", h.Host, quantity(h.MinNodes, unitHost), c.cfg.leastHosts())}
	case h.Restarts != c.cfg.again.most:
		return &refusal{All: true, Reason: fmt.Sprintf("host %s has --max-restarts %d, the coordinator %d; use the same on all hosts", h.Host, h.Restarts, c.cfg.again.most)}
	case h.NodeRank >= n:
		return &refusal{Reason: fmt.Sprintf("node rank %d in a job of %s", h.NodeRank, quantity(n, unitHost))}
	case h.LocalSize < 1 || h.LocalSize > maxLocalSize:
		return &refusal{Reason: fmt.Sprintf("host %s brings %d processes: want 1 to %d", h.Host, h.LocalSize, maxLocalSize)}
	}
	if (c.plan != nil || c.succession != nil) && (c.admitsLateHosts() || c.isElastic()) {
		return nil
	}
	mine := h.member()
	for _, q := range c.agents {
		theirs := q.host.member()
		if (q.host.NodeRank < 0) != (h.NodeRank < 0) {
			return &refusal{Reason: "some hosts have a --node-rank and some do not; set it on all hosts or on none"}
		}
		if h.NodeRank >= 0 && q.host.NodeRank == h.NodeRank {
			return &refusal{Place: fmt.Sprintf("node rank %d", h.NodeRank), First: &theirs, Second: &mine}
		}
	}
	if c.plan != nil {
		return &refusal{Reason: fmt.Sprintf("the job's %s are complete (epoch %d)", quantity(n, unitHost), c.epoch)}
	}
	return nil
}

// propose asks all agents to stay with this coordinator. An agent may move to a
// smaller seed only before it accepts, so that two coordinators never commit the
// same agent.
func (c *coordinator) propose() {
	c.lastTry++
	c.attempt = c.lastTry
	if s := c.succession; s != nil {
		c.term = max(c.term, s.history.Term+1)
	}
	m := say(kindRequestVote, c.leads())
	m.id = c.attempt
	for _, p := range c.agents {
		p.voted = false
		c.send(p, m)
	}
}

// withdraw releases the agents from a proposal that cannot succeed.
func (c *coordinator) withdraw() {
	if c.attempt == 0 || c.plan != nil {
		return
	}
	c.attempt = 0
	for _, p := range c.agents {
		c.send(p, msg{kind: kindRequestVote, epoch: firstEpoch})
	}
}

// voted records that an agent stays with this coordinator.
func (c *coordinator) voted(p *peer, attempt uint64) {
	if c.plan != nil || attempt != c.attempt || attempt == 0 {
		return
	}
	p.voted = true
	for _, q := range c.agents {
		if !q.voted {
			return
		}
	}
	if c.succession != nil {
		c.takeOver()
		return
	}
	hosts := make([]host, 0, len(c.agents))
	for _, q := range c.agents {
		hosts = append(hosts, q.host)
	}
	c.attempt = 0
	c.commitPlan(&plan{Hosts: assignNodes(hosts)})
}

// commitPlan starts an epoch with the hosts of p.
func (c *coordinator) commitPlan(p *plan) {
	c.beginAttempt(p)
	c.plan = p
	c.gone, c.planned = nil, c.now
	c.tellAgents(c.planNote())
}

// planNote returns the message with the plan.
func (c *coordinator) planNote() msg {
	p := *c.plan
	p.By = c.leads()
	m := say(kindPlan, p)
	m.epoch = c.epoch
	return m
}

// agentDone records that a host's workers have exited. The job ends when all
// hosts are done.
func (c *coordinator) agentDone(p *peer) {
	if p.state != peerJoined {
		return
	}
	p.state = peerDone
	for _, q := range c.agents {
		if q.state == peerJoined {
			return
		}
	}
	for _, q := range c.agents {
		c.send(q, say(kindEnded, nil))
	}
}

// agentLeft handles the departure of a launcher. Before the plan it frees the
// place. Later, a host that is not done loses its ranks, and one that is done frees its place if
// processes call Run.
func (c *coordinator) agentLeft(p *peer, gaveUp bool) {
	state := p.state
	p.state = peerGone
	defer c.checkRecorded()
	if slices.Contains(c.late, p) {
		c.late = remove(c.late, p)
		return
	}
	if c.plan == nil {
		c.agents = remove(c.agents, p)
		if gaveUp && state == peerJoined {
			c.gaveUp(p)
		}
		c.withdraw()
		c.voterLeft(p)
		return
	}
	c.markEnded(p)
	switch {
	case state == peerJoined:
		c.hostLost(p, "its launcher left before its workers had exited")
	case c.isElastic(): // another host may take its place
		c.agents = remove(c.agents, p)
		c.admitLate()
		if c.elastic.phase == phasePropose && c.faults.stop == nil {
			c.form()
		}
	}
}
