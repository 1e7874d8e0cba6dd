package cluster

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// An Exit describes the exit of a worker process, as its launcher saw it.
type Exit struct {
	Rank   int    `json:"rank"`
	Local  int    `json:"local"` // rank on its host
	Host   string `json:"host"`
	PID    int    `json:"pid"`
	Code   int    `json:"code"`   // as in a shell: 128+n for signal n
	Reason string `json:"reason"` // such as "exited with code 3"
	// Asked is true if the launcher had asked the worker to exit: then the exit
	// is a consequence of another failure, whatever the code.
	Asked bool `json:"asked,omitempty"`
}

func newFaults() faults { return faults{exits: map[int]Exit{}} }

func (e Exit) fault() fault {
	return fault{Rank: e.Rank, Host: e.Host, PID: e.PID, Reason: e.Reason, Code: e.Code}
}

// faults is the part of a coordinator that decides which failure was first.
// Sessions and launchers learn of different events. A worker that exits with code
// 0 and an open session is a loss for the other sessions, but not a failure that
// stops hosts. A launcher that was asked to stop stops hosts, but is not yet a
// loss: the workers may still need each other to exit cleanly.
type faults struct {
	lost    *fault // reported to sessions
	stop    *fault // reported to launchers
	exits   map[int]Exit
	pending *pending
	held    []func() // events after the pending loss, in order
}

// reach selects the receivers of a fault.
type reach int

const (
	tellAll      reach = iota // sessions report a loss, launchers stop
	tellNote                  // sessions report a loss, launchers only record it
	tellSessions              // launchers already know the cause
)

func (e Exit) reach() reach {
	switch {
	case e.Asked:
		return tellSessions
	case e.Code == 0:
		return tellNote
	}
	return tellAll
}

// A pending loss is incomplete: either the worker's connection closed and its
// launcher has not reported the exit yet, or the launcher reported the exit and
// the worker's last messages are not yet read.
type pending struct {
	peer   *peer
	fault  fault
	exited bool // the launcher has reported the exit
}

// lastFaults sends the remaining reports before the coordinator closes: pending
// losses, and a failure to hosts that have not finished.
func (c *coordinator) lastFaults() {
	for c.faults.pending != nil {
		c.resolve(c.faults.pending.fault, tellAll)
	}
	unfinished := func(p *peer) bool { return p.state == peerJoined }
	if c.plan != nil && slices.ContainsFunc(c.agents, unfinished) {
		c.fail(fault{Rank: -1, Host: c.cfg.self.Host, PID: c.cfg.self.PID, Code: -1,
			Reason: "its launcher, which coordinated the job, left before all workers had ended"}, tellAll)
	}
}

// firstExit returns the exit of a rank that never joined, so that the world
// cannot become complete.
func (f *faults) firstExit(c *coordinator) (Exit, bool) {
	for _, rank := range slices.Sorted(maps.Keys(f.exits)) {
		joined := func(p *peer) bool { return p.reg.Rank == rank }
		if c.world == nil && !slices.ContainsFunc(c.workers, joined) {
			e := f.exits[rank]
			e.Reason += " before it joined"
			return e, true
		}
	}
	return Exit{}, false
}

// disconnected handles the end of a connection.
func (c *coordinator) disconnected(p *peer, why ending) {
	p.over = true
	if !c.counts(p) || c.closed || c.handedOver {
		p.state = peerGone
		return
	}
	if (c.plan != nil || c.world != nil) && !c.isElastic() && !why.closed && c.isCutOff(p) {
		p.state = peerGone
		self := c.cfg.self
		c.later(func() {
			c.fail(fault{Rank: self.Rank, Host: self.Host, PID: self.PID, Silent: c.silent(p), Code: -1, Reason: fmt.Sprintf(
				"cut off from the other hosts: it coordinates the job and has heard none of them for %v", c.silent(p).Round(100*time.Millisecond))}, tellAll)
		})
		return
	}
	switch p.role {
	case roleAgent:
		c.agentDisconnected(p, why)
	case roleWorker:
		c.workerDisconnected(p, fault{Rank: p.reg.Rank, Host: p.reg.Host, PID: p.reg.PID,
			Silent: c.silent(p), Reason: why.reason, Code: -1, Closed: why.closed}, why.closed)
	}
}

// counts reports whether the end of p's connection is a loss. The launcher of a host without workers still votes if
// processes call Run.
func (c *coordinator) counts(p *peer) bool {
	return p.state == peerJoined || p.state == peerDone && c.isElastic() && slices.Contains(c.agents, p)
}

// isCutOff reports whether p and all other processes on other hosts have been silent for a similar
// time, so that the network of this host is the likely cause. With one other host, the cause cannot be known.
func (c *coordinator) isCutOff(p *peer) bool {
	silent, hosts := c.silent(p), map[string]bool{}
	for _, q := range slices.Concat(c.agents, c.workers) {
		host := q.member().Host
		if q.state != peerJoined || host == c.cfg.self.Host {
			continue
		}
		if c.silent(q) < silent/2 {
			return false
		}
		hosts[host] = true
	}
	return len(hosts) > 1 && silent >= c.cfg.self.LostAfter/2 && p.member().Host != c.cfg.self.Host
}

func (c *coordinator) agentDisconnected(p *peer, why ending) {
	p.state = peerGone
	if slices.Contains(c.late, p) {
		c.late = remove(c.late, p)
		return
	}
	if c.plan == nil {
		c.agents = remove(c.agents, p)
		c.withdraw()
		c.voterLeft(p)
		return
	}
	reason := why.reason
	switch {
	case why.found == foundEnded:
		reason = "its launcher ended"
		if why.certain { // otherwise it may have agreed with others before
			c.markEnded(p)
		}
	case why.found == foundAlive:
		reason = "its connection closed, and its launcher did not connect again"
	case why.closed && c.isElastic():
		reason = "its connection closed, and it does not answer"
	case why.closed:
		reason = "its launcher ended"
	}
	if why.path != "" {
		reason += "; " + why.path
	}
	c.hostLost(p, reason)
}

// hostLost fails the job because of a host. A pending loss of one of its workers
// is a consequence.
func (c *coordinator) hostLost(p *peer, reason string) {
	defer c.checkRecorded()
	f := fault{Rank: -1, Host: p.host.Host, PID: p.host.PID, Silent: c.silent(p), Reason: reason, Code: -1}
	if c.isElastic() {
		c.loseHost(p, f)
		return
	}
	if w := c.faults.pending; w != nil && !w.exited && c.uuidOf(w.peer) == p.host.UUID {
		c.resolve(f, tellAll)
		return
	}
	c.later(func() { c.fail(f, tellAll) })
}

// workerDisconnected handles the end of a worker's connection. It gives the
// launcher, if any, time to report the worker's exit.
func (c *coordinator) workerDisconnected(p *peer, f fault, closed bool) {
	if c.isElastic() {
		c.elasticDisconnected(p, f, closed)
		return
	}
	if w := c.faults.pending; w != nil && (w.peer != p || !w.exited) {
		c.later(func() { c.workerDisconnected(p, f, closed) })
		return
	}
	p.state = peerGone
	if w := c.faults.pending; w != nil {
		c.resolve(w.fault, tellAll)
		return
	}
	if f.Rank < 0 { // no rank was assigned yet
		f.Reason += " before the world was complete"
	}
	if e, ok := c.faults.exits[f.Rank]; ok && closed {
		c.fail(openSession(e), e.reach())
		return
	}
	if c.faults.lost != nil && c.faults.stop != nil {
		return // a consequence
	}
	if c.agentOf(p) == nil || !closed {
		c.fail(f, tellAll)
		return
	}
	c.awaitReport(&pending{peer: p, fault: f})
}

// awaitReport waits for the second half of a loss.
func (c *coordinator) awaitReport(w *pending) {
	c.faults.pending = w
	c.after(exitGrace, deadline{what: dueReport, of: w})
}

// openSession returns the fault of a worker that exited with an open session.
func openSession(e Exit) fault {
	f := e.fault()
	if e.Code == 0 {
		f.Reason += " without Close or Shutdown of its session"
	}
	return f
}

// exited handles a launcher's report of a worker's exit.
func (c *coordinator) exited(a *peer, e Exit) {
	e.Host = a.host.Host
	if c.isElastic() {
		c.elasticExit(a, e)
		return
	}
	if c.isUnneeded(a, e) {
		return
	}
	c.faults.exits[e.Rank] = e
	for _, p := range c.workers {
		if p.reg.Rank == e.Rank {
			c.act(awaitNoLink{p})
		}
	}
	if w := c.faults.pending; w != nil {
		if w.peer.reg.Rank != e.Rank {
			c.later(func() { c.exited(a, e) })
			return
		}
		c.resolve(openSession(e), e.reach())
		return
	}
	switch {
	case e.Asked:
	case e.Code != 0 && c.world == nil && slices.ContainsFunc(c.gone, func(m Member) bool { return m.Rank == e.Rank }):
		c.fail(c.absent(e), tellAll)
	case e.Code != 0:
		open := func(p *peer) bool { return p.reg.Rank == e.Rank && p.state == peerJoined }
		if i := slices.IndexFunc(c.workers, open); i >= 0 && c.faults.lost == nil {
			c.awaitReport(&pending{peer: c.workers[i], fault: e.fault(), exited: true})
			return
		}
		c.fail(e.fault(), tellAll)
	case len(c.workers) > 0:
		if early, ok := c.faults.firstExit(c); ok {
			c.fail(early.fault(), early.reach())
		}
	}
}

// absent returns the fault of a worker that gave up because others never joined: the first of those is
// the cause.
func (c *coordinator) absent(e Exit) fault {
	f := e.fault()
	missing := c.attendance().Missing
	if len(missing) == 0 {
		return f
	}
	f.Reason = fmt.Sprintf("never joined the job (missing %s), so rank %d gave up and %s", rankList(missing), e.Rank, e.Reason)
	f.Rank, f.PID = missing[0], 0
	if c.plan != nil {
		f.Host = c.plan.hostOf(missing[0])
	}
	return f
}

// memberTimedOut handles a member that timed out waiting for this process. Later failures
// of that member are consequences.
func (c *coordinator) memberTimedOut(p *peer) {
	if !c.counts(p) {
		return
	}
	if c.isElastic() {
		c.lostTouch(p)
		return
	}
	// If it is a launcher, it stops its workers: their losses are consequences too.
	w := c.faults.pending
	consequence := w != nil && (w.peer == p || c.agentOf(w.peer) == p)
	p.state = peerGone
	self := c.cfg.self
	f := fault{Rank: self.Rank, Host: self.Host, PID: self.PID, Code: -1, Reason: fmt.Sprintf(
		"silent for %v, so that %s disconnected: stopped or starved", self.LostAfter, memberList([]Member{p.member()}))}
	if consequence {
		c.resolve(f, tellAll)
		return
	}
	c.later(func() { c.fail(f, tellAll) })
}

// stopped handles a launcher that was asked to stop the job.
func (c *coordinator) stopped(a *peer, f fault) {
	f.Stop, f.Rank, f.Host, f.PID = true, -1, a.host.Host, a.host.PID
	if c.faults.stop == nil || c.restart != nil {
		c.restart = nil
		c.faults.stop = &f
		c.tellAgents(say(kindFault, f))
	}
}

// later runs f now or, if a loss is pending, after it. Causes are reported in the
// order of their arrival.
func (c *coordinator) later(f func()) {
	if c.faults.pending != nil {
		c.faults.held = append(c.faults.held, f)
		return
	}
	f()
}

// resolve completes the pending loss. If the launcher had asked the worker to
// exit, it reports the held events first: the cause is among them, delayed on
// another connection.
func (c *coordinator) resolve(f fault, r reach) {
	c.faults.pending = nil
	held := c.faults.held
	c.faults.held = nil
	if r != tellSessions {
		c.fail(f, r)
	}
	for _, h := range held {
		c.later(h)
	}
	if r == tellSessions {
		c.later(func() { c.fail(f, r) })
	}
}

// fail reports the first loss to sessions and the first failure to launchers.
// Later ones are consequences.
func (c *coordinator) fail(f fault, r reach) {
	if c.faults.lost == nil {
		c.faults.lost = &f
		for _, p := range c.workers {
			if p.state == peerJoined || p.reg.Rank == f.Rank {
				c.send(p, say(kindFault, f))
			}
		}
		if r == tellNote {
			c.tellAgents(say(kindNote, f))
		}
	}
	if r == tellAll && c.faults.stop == nil {
		c.planRestart(&f)
		c.faults.stop = &f
		c.tellAgents(say(kindFault, f))
		if f.Again {
			c.awaitHosts(f)
		}
	}
}

func (c *coordinator) tellAgents(m msg) {
	for _, p := range c.agents {
		if p.state != peerGone {
			c.send(p, m)
		}
	}
}

// agentOf returns the connected agent of a worker's host, or nil.
func (c *coordinator) agentOf(p *peer) *peer {
	for _, a := range c.agents {
		if a.host.UUID == c.uuidOf(p) && a.state != peerGone {
			return a
		}
	}
	return nil
}

// uuidOf returns the UUID of the agent of a worker's host, or "".
func (c *coordinator) uuidOf(p *peer) string {
	if p.reg.Agent != "" {
		return p.reg.Agent
	}
	if c.plan == nil || p.reg.Node < 0 || p.reg.Node >= len(c.plan.Hosts) {
		return ""
	}
	return c.plan.Hosts[p.reg.Node].UUID
}

// describe returns the text for an exit code if the launcher provides none.
func describe(code int) string {
	if code > 128 && code < 128+65 {
		return fmt.Sprintf("killed by signal %d", code-128)
	}
	return fmt.Sprintf("exited with code %d", code)
}

// pathFailed handles the report of an agent that it does not reach another host. If the coordinator
// does not hear one of both either, the reason is another one.
func (c *coordinator) pathFailed(from *peer, r pathReport) {
	heard := func(p *peer) bool { return p.state == peerJoined && c.silent(p) < c.cfg.self.LostAfter/2 }
	for _, p := range c.agents {
		if p.host.UUID != r.UUID || !heard(p) || !heard(from) {
			continue
		}
		what := fmt.Sprintf("%s %v", memberList([]Member{from.member()}), r.State)
		if !r.Before { // perhaps a firewall lets only the coordinator's port pass
			c.sayOf(p.addr, fmt.Sprintf("warning: the path to %s: %s, at the port of gossip; collectives between both may hang", memberList([]Member{p.member()}), what))
			return
		}
		c.hostLost(p, what+"; both reach the coordinator, so a link, a route or a firewall between them fails")
		return
	}
}
