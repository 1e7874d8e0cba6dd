package job

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// register adds a peer, as an agent if the id of the message is 1 and as a
// worker if it is 0.
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
	p.reg = *m.rec.value.(*Registration)
	p.home = c.homeOf(p.reg)
	return c.registerWorker(p)
}

const (
	RegisterWorker = 0
	registerAgent  = 1
)

// registerWorker adds a worker, and commits the world if it is the last one.
func (c *coordinator) registerWorker(p *peer) error {
	if c.cfg.Registry {
		c.enlist(p)
		return nil
	}
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
		if c.elastic.told {
			c.send(p, msg{kind: KindFinish, epoch: c.epoch})
		}
		return nil
	}
	if c.faults.lost != nil {
		c.send(p, say(KindFault, c.faults.lost))
		p.state = peerGone
		return nil
	}
	if r := c.objection(p.reg); r != nil {
		c.noteRefused(p.reg.Member, r)
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

// enlist puts a worker on the list of a registry.
func (c *coordinator) enlist(p *peer) {
	if r := roster(c.workers).objection(p.reg); r != nil {
		c.refuse(p, *r)
		return
	}
	c.admit(p)
	c.workers = append(c.workers, p)
	c.act(listed{}) // first: a process that knows it is on the list finds the list changed
	c.send(p, msg{kind: KindEnlisted, epoch: c.epoch})
}

// noteRefused keeps who was refused before the world was complete, for those who wait.
func (c *coordinator) noteRefused(m Member, r *Refusal) {
	text := memberList([]Member{m}) + ": " + r.Reason
	if c.world == nil && r.Reason != "" && r != c.joinFailure && checkNames(m.Host, m.Name) == nil && len(c.refused) < maxNamed && !slices.Contains(c.refused, text) {
		c.refused = append(c.refused, text)
	}
}

// objection returns the reason why a worker cannot join, or nil.
func (c *coordinator) objection(reg Registration) *Refusal {
	size := c.size()
	if r := checkNames(reg.Host, reg.Name); r != nil {
		return r
	}
	switch {
	case reg.Enlists:
		return &Refusal{Reason: "the coordinator at this address has a world and no registry: call cluster.Join"}
	case c.joinFailure != nil:
		return c.joinFailure
	case size == 0:
		return &Refusal{Reason: "some hosts of the job have not joined yet"}
	case reg.Epoch > 0 && reg.Epoch != c.epoch:
		return &Refusal{Reason: fmt.Sprintf("the process was started in epoch %d of the job, which is in epoch %d", reg.Epoch, c.epoch)}
	case reg.Size > 0 && reg.Size != size:
		return &Refusal{Reason: fmt.Sprintf("the process has world size %d, the coordinator %d", reg.Size, size)}
	case reg.Peers != c.cfg.Peers:
		return &Refusal{Reason: "the process has another list of peers than the coordinator: give all processes the same list in the same order"}
	case reg.Rank >= size:
		return &Refusal{Reason: fmt.Sprintf("rank %d in a world of size %d", reg.Rank, size)}
	}
	for _, q := range c.workers {
		if q.reg.Elastic != reg.Elastic {
			return &Refusal{Reason: "some processes call cluster.Run and some cluster.Attach or Join; use one of them in all processes"}
		}
		if (q.reg.Rank < 0) != (reg.Rank < 0) {
			return &Refusal{Reason: "some processes have a rank and some do not; set it in all processes or in none"}
		}
		if reg.Rank >= 0 && q.reg.Rank == reg.Rank {
			return &Refusal{Place: fmt.Sprintf("rank %d", reg.Rank), First: &q.reg.Member, Second: &reg.Member}
		}
	}
	if c.world != nil {
		return &Refusal{Reason: fmt.Sprintf("the world of %d processes is complete (epoch %d)", size, c.epoch)}
	}
	return nil
}

// endJoin fails the incomplete job: it sends the reason to all members, also to
// those that connect later.
func (c *coordinator) endJoin(r Refusal) {
	if c.joinFailure != nil || c.world != nil || c.cfg.agents > 0 && c.plan != nil {
		return
	}
	c.joinFailure = &r
	for _, p := range slices.Concat(c.agents, c.late, c.workers) {
		if p.state == peerJoined {
			c.refusePeer(p, r)
		}
	}
}

func (e gaveUp) happen(c *coordinator) error {
	c.endJoin(Refusal{Waited: e.waited, Attendance: &e.attendance})
	return nil
}

// commitWorld assigns the ranks and notifies all workers.
func (c *coordinator) commitWorld() {
	ms := members(c.workers)
	for i := range ms {
		ms[i].arrival = i
	}
	ms = assignRanks(ms)
	c.world = &World{Members: ms}
	c.act(openStore{len(ms)})
	c.tellAgents(msg{kind: kindComplete, epoch: c.epoch})
	for _, member := range ms {
		p := c.workers[member.arrival]
		p.reg.Member, p.seat = member, c.epoch
	}
	ps, epoch, by := slices.Clone(c.workers), c.epoch, c.leads()
	start := func() {
		m := say(KindWorld, &World{By: by, Members: ms})
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

// workerLeft handles a graceful exit, which frees the place if the world is not
// complete yet.
func (c *coordinator) workerLeft(p *peer, gaveUp bool) {
	if p.state != peerJoined {
		return
	}
	if c.cfg.Registry {
		c.delist(p, "")
		return
	}
	if c.isElastic() {
		c.loseWorker(p, p.fault(leftReason))
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
			c.refuse(p, Refusal{Reason: fmt.Sprintf("the history of host %s: %v", p.host.Host, err)})
			return nil
		}
	}
	if ch := p.host.History; ch != nil && ch.Run != c.run {
		c.refuse(p, Refusal{Reason: fmt.Sprintf("host %s comes from another run of the job", p.host.Host)})
		return nil
	}
	if c.succession != nil && p.host.History != nil {
		c.registerVoter(p)
		return nil
	}
	if ch := p.host.History; ch != nil && c.plan != nil {
		c.checkTerm(Leader{Term: ch.Term, Run: ch.Run, Name: "another host"})
	}
	if p.host.History != nil && c.hasFinished() {
		c.returnAfterEnd(p)
		return nil
	}
	if r := c.hostObjection(p.host); r != nil {
		c.refuse(p, *r)
		if r.First != nil || r.All {
			c.endJoin(*r)
		}
		return nil
	}
	if again := func(q *peer) bool { return q.host.UUID == p.host.UUID && q.state != peerGone }; c.isElastic() && slices.ContainsFunc(c.agents, again) {
		c.hangUp(p) // it has lost this coordinator, which has not noticed that yet: the launcher tries again
		return nil
	}
	c.admit(p)
	delete(c.away, p.host.UUID) // it has lost this coordinator, and follows it again
	p.ready, p.host.History = true, nil
	c.place(p)
	return nil
}

// returnAfterEnd answers a host of the job that comes back when the program has ended.
func (c *coordinator) returnAfterEnd(p *peer) {
	if !c.elastic.told {
		if x, ok := c.away[p.host.UUID]; ok {
			x.follows = 0
			c.away[p.host.UUID] = x
			c.checkRecorded()
		}
		c.hangUp(p) // it tries again
		return
	}
	c.refusePeer(p, Refusal{Finished: true, Reason: "the program has ended"})
	delete(c.away, p.host.UUID)
}

// place gives a host a place in the job, or lets it wait for one.
func (c *coordinator) place(p *peer) {
	switch {
	case c.isElastic():
		c.admitHost(p)
	case c.plan != nil || c.succession != nil || len(c.agents) >= c.cfg.agents:
		c.late = append(c.late, p)
	default:
		c.gone = without(c.gone, func(q Member) bool { return q.Host == p.host.Host })
		c.agents = append(c.agents, p)
		if c.attempt != 0 { // this host must be asked, too
			c.propose()
			return
		}
		c.tryPropose()
	}
}

// admitLate gives free places to hosts that wait for one and may have one.
func (c *coordinator) admitLate() {
	late := c.late
	c.late = nil
	for _, p := range late {
		if r := c.hostObjection(p.host); r != nil && !c.isElastic() { // another host has its node rank, or no host may wait
			c.refuse(p, *r)
			continue
		}
		c.place(p)
	}
}

func (c *coordinator) hostObjection(h host) *Refusal {
	n := c.cfg.agents
	if r := checkNames(h.Host, h.UUID, h.MasterAddr); r != nil {
		return r
	}
	switch {
	case c.joinFailure != nil:
		return c.joinFailure
	case n == 0:
		return &Refusal{Reason: "the coordinator's job was not started by chorus run"}
	case h.History != nil && !c.isElastic():
		return &Refusal{Reason: fmt.Sprintf("host %s comes from epoch %d of the job, and this coordinator has started another one", h.Host, h.History.Epoch)}
	case h.Unfit != "":
		return &Refusal{All: true, Reason: fmt.Sprintf("host %s cannot take part: %s", h.Host, h.Unfit)}
	case h.Nodes != n:
		return &Refusal{All: true, Reason: fmt.Sprintf("host %s has a job of %s, the coordinator of %d; use the same --nnodes on all hosts", h.Host, quantity(h.Nodes, unitHost), n)}
	case h.MinNodes != c.cfg.leastHosts():
		return &Refusal{All: true, Reason: fmt.Sprintf("host %s has a job of at least %s, the coordinator of %d; use the same --nnodes on all hosts", h.Host, quantity(h.MinNodes, unitHost), c.cfg.leastHosts())}
	case h.Restarts != c.cfg.again.most:
		return &Refusal{All: true, Reason: fmt.Sprintf("host %s has --max-restarts %d, the coordinator %d; use the same on all hosts", h.Host, h.Restarts, c.cfg.again.most)}
	case h.NodeRank >= n:
		return &Refusal{Reason: fmt.Sprintf("node rank %d in a job of %s", h.NodeRank, quantity(n, unitHost))}
	case h.LocalSize < 1 || h.LocalSize > maxLocalSize:
		return &Refusal{Reason: fmt.Sprintf("host %s brings %d processes: want 1 to %d", h.Host, h.LocalSize, maxLocalSize)}
	}
	if (c.plan != nil || c.succession != nil) && (c.admitsLateHosts() || c.isElastic()) {
		return nil
	}
	mine := h.member()
	for _, q := range c.agents {
		theirs := q.host.member()
		if (q.host.NodeRank < 0) != (h.NodeRank < 0) {
			return &Refusal{Reason: "some hosts have a --node-rank and some do not; set it on all hosts or on none"}
		}
		if h.NodeRank >= 0 && q.host.NodeRank == h.NodeRank {
			return &Refusal{Place: fmt.Sprintf("node rank %d", h.NodeRank), First: &theirs, Second: &mine}
		}
	}
	if c.plan != nil {
		return &Refusal{Reason: fmt.Sprintf("the job's %s are complete (epoch %d)", quantity(n, unitHost), c.epoch)}
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
		c.send(p, msg{kind: kindRequestVote, epoch: FirstEpoch})
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
	c.admitLate()
}

// planNote returns the message with the plan.
func (c *coordinator) planNote() msg {
	p := *c.plan
	p.By = c.leads()
	m := say(kindPlan, p)
	m.epoch = c.epoch
	return m
}

// A straggler is the state of a launcher that is lost here and is not known to have ended.
type straggler struct {
	// It may still follow this coordinator until then: it would count the end of this coordinator, and not know of epochs that have begun
	// without it. None begins before the launcher has registered again, or must have lost this coordinator for silence.
	follows instant
	back    instant // it may come back until then, to learn that the program has ended
}

// miss records that a launcher is lost here and may come back.
func (c *coordinator) miss(uuid string, follows bool) {
	if c.away == nil {
		c.away = map[string]straggler{}
	}
	maps.DeleteFunc(c.away, func(_ string, x straggler) bool { return x.back < c.now })
	limit := c.cfg.Self.LostAfter
	x := straggler{back: c.now + returnTime(limit)}
	if follows {
		x.follows = c.now + limit + limit/32
	}
	c.away[uuid] = x
}

// returnTime is the time in which a launcher that is lost notices that, and finds out whether the program has ended.
func returnTime(lostAfter time.Duration) time.Duration {
	return lostAfter + lostAfter/32 + 2*searchInterval
}

// leased returns the time until no launcher that was lost follows this coordinator.
func (c *coordinator) leased() (d time.Duration) {
	for _, x := range c.away {
		d = max(d, x.follows-c.now)
	}
	return d
}

// missed returns the time until no launcher that was lost comes back to learn that the program has ended.
func (c *coordinator) missed(now instant) (d time.Duration) {
	if !c.hasFinished() || c.faults.stop != nil || c.handedOver {
		return 0
	}
	for _, x := range c.away {
		d = max(d, x.back-now)
	}
	return d
}

// agentDone records that a host's workers have exited. The job ends when all
// hosts are done, except in the middle of a program, unless all members of the epoch have exited with code 0 or all hosts are being
// drained. Then a host whose workers may not start again is of no use, and the job waits for other hosts or fails.
func (c *coordinator) agentDone(p *peer) {
	if p.state != peerJoined {
		return
	}
	p.state = peerDone
	c.checkDone()
}

// checkDone ends the job if the workers of all hosts have exited.
func (c *coordinator) checkDone() {
	for _, q := range c.agents {
		if q.state == peerJoined {
			return
		}
	}
	if c.isUnfinished() {
		c.checkHope()
		return
	}
	c.tellAgents(say(kindEnded, nil))
}

// isUnfinished reports whether the job is in the middle of a program: not all members of the epoch have exited with code 0, and a host
// is not being drained.
func (c *coordinator) isUnfinished() bool {
	exited := func(m Member) bool { return c.elastic.clean[process{m.Host, m.LocalRank, m.PID}] }
	return c.isElastic() && slices.ContainsFunc(c.world.Members, func(m Member) bool { return !exited(m) }) &&
		slices.ContainsFunc(c.agents, func(q *peer) bool { return q.draining == nil && q.state != peerGone })
}

// An agentEnd says how a launcher has left or was lost.
type agentEnd struct {
	reason string
	ended  bool // it takes part in no decision any more
	knows  bool // it follows this coordinator no more, or its process has ended
	left   bool // it has said that it leaves
	gaveUp bool // because its join timed out
}

// loseAgent removes a launcher that has left or was lost. Before the plan it frees its place. Later, a host that is not done loses
// its ranks, and one that is done frees its place if processes call Run.
func (c *coordinator) loseAgent(p *peer, end agentEnd) {
	defer c.checkRecorded()
	state := p.state
	p.state = peerGone
	if slices.Contains(c.late, p) {
		c.late = remove(c.late, p)
		return
	}
	if c.plan == nil {
		c.agents = remove(c.agents, p)
		if end.gaveUp && state == peerJoined {
			c.gaveUp(p)
		}
		c.withdraw()
		if s := c.succession; s != nil {
			delete(s.hosts, p.host.UUID)
		}
		c.admitLate()
		c.tryPropose()
		return
	}
	if end.ended {
		c.markEnded(p)
	}
	if !end.ended && !end.left && c.isDeciding() {
		c.miss(p.host.UUID, !end.knows && c.silent(p) <= c.cfg.Self.LostAfter)
	}
	f := c.lossOf(p, end.reason)
	switch elastic := c.isElastic(); {
	case elastic && (state == peerJoined || !end.left):
		c.loseHost(p, f)
	case elastic: // another host may take its place
		c.agents = remove(c.agents, p)
		c.admitLate()
		if c.elastic.phase == phasePropose && c.faults.stop == nil {
			c.form()
		}
	case state != peerJoined && end.left:
	case !c.hasFinished() || c.faults.stop != nil:
		c.failHost(p, f)
	case !c.elastic.told && !c.hasMajority(): // the others may go on
		c.endMinority()
	default:
		c.say(fmt.Sprintf("host %s is lost after the end of the program: %s", p.host.Host, f.Reason))
		c.checkDone()
	}
}

// A succession is the state of a coordinator that wants to go on for one that was lost. It
// collects agents until they are enough, and proposes itself to them. See failover.go for
// the agents' side.
type succession struct {
	history history
	begun   instant
	hosts   map[string]*history // of the agents that have registered, by UUID
	waits   bool                // enough agents are present, and the others have some time
	due     bool                // the others have had it
	looked  bool                // this host has tried to reach all others
	alive   map[string]bool     // hosts that have answered: they will notice the loss, too
	other   string              // address of another candidate, with which this host has registered, or ""
}

// The agents must agree before the coordinator continues the job.
func (e candidacy) happen(c *coordinator) error {
	c.run = e.history.Run
	c.succession = &succession{history: e.history, begun: c.now - e.ago, hosts: map[string]*history{}}
	if c.cfg.probes {
		c.lookForVoters()
	}
	return nil
}

// missingVoters returns the hosts that may decide and have not registered, without those that have ended.
func (s *succession) missingVoters(here map[string]bool) (out []host) {
	not := setOf(s.history.Ended)
	maps.Copy(not, here)
	not[s.history.Lost] = true
	for _, u := range s.history.hosts() {
		if i := s.history.Plan.nodeOf(u); !not[u] && i >= 0 {
			not[u] = true
			out = append(out, s.history.Plan.Hosts[i])
		}
	}
	return out
}

// lookForVoters tries to reach the hosts that have not registered, until this coordinator has taken over. Those that answer have not
// noticed the loss yet, and are waited for. Those that have vanished or ended are not, but they count: one that has ended may
// have agreed to an epoch of another coordinator before.
func (c *coordinator) lookForVoters() {
	s, limit := c.succession, slowAfter(c.cfg.Self.LostAfter)
	missing := s.missingVoters(c.present())
	// In a large job only the candidate that the others choose looks for hosts, unless no other comes.
	if len(s.hosts) < 2 && len(missing) > atOnce && c.now-s.begun < c.cfg.Self.LostAfter/2 {
		c.after(limit, deadline{what: dueLook, of: s})
		return
	}
	c.act(probe{missing, limit})
}

func (e registered) happen(c *coordinator) error {
	if c.succession != nil {
		c.succession.other = e.addr
	}
	return nil
}

func (e probed) happen(c *coordinator) error {
	s := c.succession
	if s == nil {
		return nil
	}
	s.looked, s.alive = true, e.alive
	c.after(slowAfter(c.cfg.Self.LostAfter), deadline{what: dueLook, of: s})
	c.trySucceed()
	return nil
}

// registerVoter adds an agent that has lost its coordinator.
func (c *coordinator) registerVoter(p *peer) {
	s, ch := c.succession, p.host.History
	p.host.History = nil
	c.admit(p)
	p.ready = true
	c.agents = append(c.agents, p)
	s.hosts[p.host.UUID] = ch
	s.history.merge(ch)
	switch here := c.present(); {
	case c.attempt == 0:
		c.trySucceed()
	case allow(s.history.voterSets(), here, setOf(s.history.Ended)): // this agent must be asked, too
		c.propose()
	default: // it knows of an epoch whose hosts are not enough here
		c.withdraw()
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

// jobElsewhere handles the message that another coordinator of this job leads: this one must not begin another
// job, and its agents join the other one. If its job is running, a greater term of the same run has replaced it.
func (c *coordinator) jobElsewhere(p *peer, other elsewhere) {
	c.hangUp(p)
	if c.plan != nil && other.By.Run != c.run {
		c.sayOf(p.addr, fmt.Sprintf("refused the process at %s: %v belongs to another run of the job, whose terms say nothing about this one", p.addr, other.By))
		return
	}
	if c.plan != nil {
		c.checkTerm(other.By)
		return
	}
	if c.succession != nil {
		return
	}
	c.elsewhere = c.now
	c.withdraw()
	c.tellAgents(say(kindElsewhere, other))
	c.after(c.elsewhereTime(), deadline{what: dueProposal}) // the other job may have ended
}

// checkTerm ends this coordinator if another one of the same run and of a greater term has replaced it.
func (c *coordinator) checkTerm(by Leader) {
	if by.Run != c.run || by.Term <= c.term || !c.isDeciding() {
		return
	}
	c.stepDown(fmt.Sprintf("%v coordinates the job now, and this host did not take part in its choice in term %d", by, c.term))
}

// stepDown ends this coordinator and its host's part in the job, while the
// other hosts may choose another coordinator.
func (c *coordinator) stepDown(reason string) {
	e, self := c.elastic, c.cfg.Self
	f := e.last
	if f.Reason == "" {
		f = c.ownFault(reason)
	} else {
		f.Reason += "; " + reason
	}
	own := func(p *peer) bool {
		return p.role == roleAgent && c.coordinates(p) || p.role == roleWorker && p.reg.Agent == self.Agent
	}
	c.sendHandover(handover{Reason: f.Reason, Failed: true, Ended: append(slices.Sorted(maps.Keys(c.ended)), self.Agent)},
		without(slices.Concat(c.agents, c.workers, c.late), own))
	others := func(p *peer) bool { return !own(p) }
	c.agents, c.workers, c.late = without(c.agents, others), without(c.workers, others), nil
	e.over = true
	c.fail(f, tellAll)
	c.handedOver = true
}

// warnEvery is the time between two attempts to find a seed that has started again.
const warnEvery = lastCallTime / 6

// mustWait reports whether another coordinator runs the job.
func (c *coordinator) mustWait() bool {
	return c.elsewhere != 0 && (c.now-c.elsewhere) < c.elsewhereTime()
}

func (c *coordinator) elsewhereTime() time.Duration { return 2*c.cfg.Self.LostAfter + 2*warnEvery }

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
	ended := setOf(s.history.Ended)
	if c.attempt != 0 || c.closed || !allow(s.history.voterSets(), here, ended) {
		return
	}
	others := without(s.history.Voters, func(u string) bool {
		return here[u] || ended[u] || u == s.history.Lost || s.looked && !s.alive[u]
	})
	if len(others) == 0 || s.due {
		c.propose()
		return
	}
	if !s.waits {
		s.waits = true
		c.after(c.cfg.Self.LostAfter/2, deadline{what: dueVoters, of: s})
	}
}

// takeOver begins to coordinate, after all agents that are present have agreed. The last epoch
// has ended with its coordinator: each worker registers when its function has returned.
func (c *coordinator) takeOver() {
	s := c.succession
	ch := &s.history
	c.succession, c.attempt = nil, 0
	c.epoch = ch.last()
	p := ch.Plan
	for _, a := range c.agents { // hosts that came after the last epoch began
		if p.nodeOf(a.host.UUID) < 0 {
			p.Hosts = append(slices.Clone(p.Hosts), a.host)
		}
	}
	c.plan, c.planned = &p, c.now
	c.world = &World{Members: ch.Members}
	c.act(openStore{len(ch.Members)})
	c.voterSets, c.ended = ch.voterSets(), setOf(ch.Ended)
	e := newElastic()
	e.begun, e.inherited, e.takenOver = s.begun, &history{Epoch: ch.Epoch, Voters: ch.Voters, Proposed: ch.open(ch.Epoch)}, c.now
	took := "took over from a coordinator that was lost: " + ch.Reason
	e.last = c.ownFault("it " + took)
	e.why = fmt.Sprintf("host %s %s", c.cfg.Self.Host, took)
	c.elastic = e
	for _, u := range slices.Concat(ch.Voters, ch.dropped) {
		if s.hosts[u] == nil && u != ch.Lost && !c.ended[u] {
			c.miss(u, false)
		}
	}
	c.inherit(ch.Ledger)
	c.tellAgents(c.planNote())
	c.tellAgents(msg{kind: kindComplete, epoch: c.epoch})
	if ch.Ledger.Finished { // the last coordinator was lost while it said so
		e.finished, e.over = true, true
		c.finish()
		return
	}
	c.tellNews("") // the hosts that have agreed may know less
	c.awaitSurvivors(s)
	c.say(fmt.Sprintf("host %s coordinates the job now", c.cfg.Self.Host))
}

// awaitSurvivors waits for the workers of the hosts that are present, and records the others as lost.
func (c *coordinator) awaitSurvivors(s *succession) {
	e := c.elastic
	for _, m := range s.history.Members {
		uuid := s.history.hostOf(m)
		at := place{uuid, m.LocalRank}
		switch h := s.hosts[uuid]; {
		case h == nil && uuid == s.history.Lost && s.history.Planned:
			e.left = append(e.left, Departure{Member: m, Planned: true, Reason: "its launcher " + s.history.Reason})
		case h == nil && uuid == s.history.Lost:
			e.left = append(e.left, Departure{Member: m, Reason: "its host was lost: " + s.history.Reason})
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
	e.settlesAt = c.now
	c.inPhase(c.cfg.RevokeBy, dueBack)
	c.checkReturned()
}

// giveUpAbsent gives up the workers whose functions have not returned in time after the loss of the coordinator.
func (c *coordinator) giveUpAbsent() {
	reason := fmt.Sprintf("its function did not return within %v after the loss of the coordinator", c.cfg.RevokeBy)
	for _, at := range sortedPlaces(c.elastic.absent) {
		m := c.elastic.absent[at]
		for _, a := range c.agents {
			if a.host.UUID == at.agent {
				c.awaitKill(at, m.PID)
				c.send(a, killOf(at.local, m.PID))
			}
		}
		c.giveUp(at, reason)
	}
}

// awaitNewcomers waits for the workers that are not members of the last epoch, if the hosts that are present have
// proposals with them: they have perhaps begun the next one. The others are expected.
func (c *coordinator) awaitNewcomers(s *succession) {
	e := c.elastic
	for uuid, h := range s.hosts {
		for local, pid := range h.NewMembers {
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
func (c *history) hostOf(m Member) string {
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
func (c *coordinator) voters(of *plan) voterSet {
	rank := func(h host) int {
		switch {
		case h.UUID == c.cfg.Self.Agent:
			return 0
		case h.Seed:
			return 1
		}
		return 2
	}
	hosts := slices.Clone(of.Hosts)
	slices.SortStableFunc(hosts, func(a, b host) int { return cmp.Compare(rank(a), rank(b)) })
	var out voterSet
	for _, h := range hosts {
		out = append(out, h.UUID)
	}
	return out
}

// votes reports whether a host belongs to the voter set of the epoch, and is not known to have ended.
func (c *coordinator) votes(a *peer) bool {
	return !c.ended[a.host.UUID] && slices.ContainsFunc(c.voterSets, func(e voterSet) bool { return slices.Contains(e, a.host.UUID) })
}

// hasMajority reports whether the hosts that are left may form another epoch.
func (c *coordinator) hasMajority() bool {
	return c.plan == nil || allow(c.voterSets, c.present(), c.ended)
}

// endMinority ends the job in this part of the network. After a takeover, hosts that have not come yet have some time.
func (c *coordinator) endMinority() {
	if left := c.cfg.Self.LostAfter - (c.now - c.elastic.takenOver); c.elastic.inherited != nil && left > 0 {
		c.after(left, deadline{what: dueMajority, of: c.elastic})
		return
	}
	c.stepDown(minority(c.voterSets, c.present(), c.ended, c.epoch))
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
	e.proposal = say(KindPropose, news{By: c.leads(), Voters: e.voters, Ended: slices.Sorted(maps.Keys(c.ended)), NewMembers: c.proposedMembers()})
	e.proposal.epoch, e.proposal.id = c.epoch+1, e.try
	for _, a := range c.agents {
		c.ask(a)
	}
}

// ask asks an agent to agree to the proposal. All agents that follow this coordinator when an epoch begins have agreed to it.
func (c *coordinator) ask(a *peer) {
	a.asked = c.elastic.try
	c.send(a, c.elastic.proposal)
}

// proposedMembers returns the members of the proposal that are new. If this coordinator is lost, the next one
// waits for their functions: they may have begun the epoch.
func (c *coordinator) proposedMembers() (out []newMember) {
	for _, r := range c.elastic.next.New {
		p := c.elastic.peers[r]
		out = append(out, newMember{Agent: p.home.agent, Local: p.home.local, PID: p.reg.PID})
	}
	return out
}

// accepted records that an agent has the proposal.
func (c *coordinator) accepted(a *peer, try uint64) {
	if e := c.elastic; e != nil && e.phase == phasePropose && try == e.try && a.asked == try {
		a.answered = try
		c.checkPrepared()
	}
}

// hasNotAnswered reports whether an agent has not answered the proposal, whatever its workers do.
func (c *coordinator) hasNotAnswered(a *peer) bool {
	return a.state != peerGone && a.asked == c.elastic.try && a.answered != a.asked
}

// loseUnprepared removes the hosts and processes that have not answered the proposal.
func (c *coordinator) loseUnprepared() {
	reason := fmt.Sprintf("no answer to the proposal of epoch %d within %v", c.epoch+1, prepareBy)
	agents := without(c.agents, func(a *peer) bool { return !c.hasNotAnswered(a) })
	workers := without(c.elastic.peers, func(p *peer) bool { return p.elastic.prepared })
	for _, a := range agents { // the others are asked again
		c.loseAgent(a, agentEnd{reason: reason})
	}
	c.killSilent(workers, reason)
}
