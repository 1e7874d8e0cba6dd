package cluster

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"syscall"
	"time"
)

// An Exit says how a worker's process ended, as its launcher saw it.
type Exit struct {
	Rank   int    `json:"rank"`
	Host   string `json:"host"`
	PID    int    `json:"pid"`
	Code   int    `json:"code"`   // as a shell shows it: 128+n for signal n
	Reason string `json:"reason"` // such as "exited with code 3"
	// Asked says that the launcher had asked the worker to end before it did:
	// whatever the code, it is a consequence of something else.
	Asked bool `json:"asked,omitempty"`
}

func (e Exit) fault() fault {
	return fault{Rank: e.Rank, Host: e.Host, PID: e.PID, Reason: e.Reason, Code: e.Code}
}

// faults is the part of a coordinator that decides what failed first. What
// sessions see and what stops launchers differ: a worker that exits with code 0
// and an open session is a loss to the other sessions, but no failure that
// stops hosts; a launcher that is told to stop stops hosts, whose workers may
// still need each other to end well.
type faults struct {
	lost    *fault // what sessions were told
	stop    *fault // what launchers were told
	exits   map[int]Exit
	pending *pending
	held    []func() // what came after the pending loss, in order
}

// reach says who has to know of a fault.
type reach int

const (
	tellAll      reach = iota // sessions lose a member, launchers stop
	tellNote                  // launchers go on, and know why others may fail
	tellSessions              // launchers know the cause of this already
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

// A pending loss is half of what there is to know of a worker's end: its
// connection ended and its launcher can still say how the worker did, or its
// launcher said so and what the worker itself said last is still to be read.
type pending struct {
	peer   *peer
	fault  fault
	exited bool // the second
	timer  *time.Timer
}

// lastFaults tells, before the coordinator closes, what it still knows: the
// pending losses, and to hosts that have not finished that they cannot go on.
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

// firstExit returns an exit of a rank that had not joined, which the world
// therefore waits for in vain.
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

// disconnected acts on the end of a connection.
func (c *coordinator) disconnected(p *peer, err error) {
	state := p.state
	if state != peerJoined || c.closed {
		p.state = peerGone
		return
	}
	reason := reasonOf(err, c.cfg.self.LostAfter)
	switch p.role {
	case roleAgent:
		c.agentDisconnected(p, reason, err)
	case roleWorker:
		c.workerDisconnected(p, fault{Rank: p.reg.Rank, Host: p.reg.Host, PID: p.reg.PID,
			Silent: p.silent(), Reason: reason, Code: -1}, isClosedByPeer(err))
	}
}

func (c *coordinator) agentDisconnected(p *peer, reason string, err error) {
	p.state = peerGone
	if c.plan == nil {
		c.agents = remove(c.agents, p)
		c.withdraw()
		return
	}
	if isClosedByPeer(err) {
		reason = "its launcher ended"
	}
	if c.cfg.path != nil {
		if s := c.cfg.path(p.host); s != "" {
			reason += "; " + s
		}
	}
	c.hostLost(p, reason)
}

// hostLost fails the job for a host. A pending loss of one of its workers is
// its consequence.
func (c *coordinator) hostLost(p *peer, reason string) {
	f := fault{Rank: -1, Host: p.host.Host, PID: p.host.PID, Silent: p.silent(), Reason: reason, Code: -1}
	if w := c.faults.pending; w != nil && !w.exited && c.uuidOf(w.peer) == p.host.UUID {
		c.resolve(f, tellAll)
		return
	}
	c.later(func() { c.fail(f, tellAll) })
}

// workerDisconnected acts on the end of a worker's connection. Its launcher, if
// it has one, is given a moment to say how the worker ended.
func (c *coordinator) workerDisconnected(p *peer, f fault, closed bool) {
	if w := c.faults.pending; w != nil && (w.peer != p || !w.exited) {
		c.later(func() { c.workerDisconnected(p, f, closed) })
		return
	}
	p.state = peerGone
	c.checkDrained()
	if w := c.faults.pending; w != nil {
		c.resolve(w.fault, tellAll)
		return
	}
	if f.Rank < 0 { // it had no rank yet
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
	c.hold(&pending{peer: p, fault: f})
}

// hold waits a moment for the other half of a loss.
func (c *coordinator) hold(w *pending) {
	c.faults.pending = w
	w.timer = time.AfterFunc(exitGrace, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.faults.pending == w {
			c.resolve(w.fault, tellAll)
		}
	})
}

// openSession is the fault of a worker that ended with its session open.
func openSession(e Exit) fault {
	f := e.fault()
	if e.Code == 0 {
		f.Reason += " without Close or Shutdown of its session"
	}
	return f
}

// exited acts on a launcher's word of a worker's end.
func (c *coordinator) exited(a *peer, e Exit) {
	e.Host = a.host.Host
	c.faults.exits[e.Rank] = e
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
	case e.Code != 0:
		open := func(p *peer) bool { return p.reg.Rank == e.Rank && p.state == peerJoined }
		if i := slices.IndexFunc(c.workers, open); i >= 0 && c.faults.lost == nil {
			c.hold(&pending{peer: c.workers[i], fault: e.fault(), exited: true})
			return
		}
		c.fail(e.fault(), tellAll)
	case len(c.workers) > 0:
		if early, ok := c.faults.firstExit(c); ok {
			c.fail(early.fault(), early.reach())
		}
	}
}

// gaveUp acts on a member that could not wait for this process any longer. What
// it did after that, such as to fail, is a consequence.
func (c *coordinator) gaveUp(p *peer) {
	if p.state != peerJoined {
		return
	}
	// A launcher that gives up ends its workers: their loss is a consequence too.
	w := c.faults.pending
	consequence := w != nil && (w.peer == p || c.agentOf(w.peer) == p)
	p.state = peerGone
	c.checkDrained()
	self := c.cfg.self
	f := fault{Rank: self.Rank, Host: self.Host, PID: self.PID, Code: -1, Reason: fmt.Sprintf(
		"silent for %v, so that %s gave up: stopped or starved", self.LostAfter, memberList([]Member{p.member()}))}
	if consequence {
		c.resolve(f, tellAll)
		return
	}
	c.later(func() { c.fail(f, tellAll) })
}

// stopped acts on a launcher that was told to stop the job.
func (c *coordinator) stopped(a *peer, f fault) {
	f.Stop, f.Rank, f.Host, f.PID = true, -1, a.host.Host, a.host.PID
	if c.faults.stop == nil {
		c.faults.stop = &f
		c.tellAgents(note(kindFault, f))
	}
}

// later runs f now, or when the pending loss is resolved: causes are told in
// the order in which they were received.
func (c *coordinator) later(f func()) {
	if c.faults.pending != nil {
		c.faults.held = append(c.faults.held, f)
		return
	}
	f()
}

// resolve ends the pending loss with what is now known of it. A worker that had
// been asked to end is told of last: its cause is among what was held, which
// another connection's delay has put behind it.
func (c *coordinator) resolve(f fault, r reach) {
	c.faults.pending.timer.Stop()
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

// fail tells sessions of the first loss, and launchers of the first failure.
// Later ones are consequences.
func (c *coordinator) fail(f fault, r reach) {
	if c.faults.lost == nil {
		c.faults.lost = &f
		for _, p := range c.workers {
			if p.state == peerJoined || p.reg.Rank == f.Rank {
				p.send(note(kindFault, f))
			}
		}
		if r == tellNote {
			c.tellAgents(note(kindNote, f))
		}
		c.checkDrained()
	}
	if r == tellAll && c.faults.stop == nil {
		c.faults.stop = &f
		c.tellAgents(note(kindFault, f))
	}
}

func (c *coordinator) tellAgents(m message) {
	for _, p := range c.agents {
		if p.state != peerGone {
			p.send(m)
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

// uuidOf returns the identity of a worker's host's agent, or "".
func (c *coordinator) uuidOf(p *peer) string {
	if c.plan == nil || p.reg.Node < 0 || p.reg.Node >= len(c.plan.Hosts) {
		return ""
	}
	return c.plan.Hosts[p.reg.Node].UUID
}

// isClosedByPeer reports whether an error means that the other process closed
// the connection or ended.
func isClosedByPeer(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// describe is how an exit code is put in words where a launcher has no better.
func describe(code int) string {
	if code > 128 && code < 128+65 {
		return fmt.Sprintf("killed by signal %d", code-128)
	}
	return fmt.Sprintf("exited with code %d", code)
}
