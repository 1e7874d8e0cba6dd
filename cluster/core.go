package cluster

import (
	"container/heap"
	"fmt"
	"time"
)

// The decisions of a coordinator are a function of its state and of events: coordinator.step. It uses no goroutines, locks,
// connections, files or clocks, so that tests and simulations drive it directly, and the same events always lead to the same
// decisions. A server (server.go) turns what happens to its connections into events, and carries out the actions.

// An instant is a time of the coordinator's clock, which stands still while its process is suspended or starved. 0 means never.
type instant = time.Duration

// An event happens to a coordinator.
type event interface{ happen(c *coordinator) error }

type (
	// connected: an authenticated process has connected.
	connected struct{ p *peer }
	// received: a peer has sent a message.
	received struct {
		p *peer
		m msg
	}
	// disconnected: the connection of a peer has ended, and the peer has not connected again.
	disconnected struct {
		p   *peer
		why ending
	}
	// probed: the hosts that an action of type probe has named have answered, or not.
	probed struct{ alive map[string]bool }
	// candidacy: this coordinator offers to continue the job of a history, whose hosts have lost the last coordinator some time ago.
	candidacy struct {
		history history
		ago     time.Duration
	}
	// gaveUp: the join of this process has timed out.
	gaveUp struct {
		attendance attendance
		waited     time.Duration
	}
	// stalled: this process was suspended or starved for a large part of the limit of silence.
	stalled struct{}
	// closing: this process closes the coordinator.
	closing struct{}
)

// An ending describes the end of a connection.
type ending struct {
	closed  bool    // the other process has closed the connection, or has ended
	reason  string  // such as "its connection failed: …"
	found   finding // about the launcher's process
	certain bool    // the launcher cannot have lost this coordinator for silence
	path    string  // what gossip knows of the path to the host, or ""
}

// An action is what the server must do for a coordinator. Actions are carried out in order.
type action interface{}

type (
	// send sends a message to peers.
	send struct {
		to []*peer
		m  msg
	}
	// hangUp ends connections after the messages that were sent.
	hangUp struct{ p *peer }
	// hangUpGuests sends a message to all processes that have not registered, and ends their connections.
	hangUpGuests struct{ m msg }
	// admit lifts the limits of a peer that is not a member.
	admit struct{ p *peer }
	// awaitNoLink gives up the connection of a process that has exited as soon as it ends: the process will not connect again.
	awaitNoLink struct{ p *peer }
	// openStore replaces the store by an empty one for a world of a size; 0 means none.
	openStore struct{ size int }
	// leaveStore ends the part of a rank in the store.
	leaveStore struct{ rank int }
	// probe asks for the event probed.
	probe struct {
		hosts []host
		limit time.Duration
	}
	// notify tells the user of this host a line. A line about a process at ip is dropped if it was told lately.
	notify struct {
		ip, line string
	}
	// observe shows a simulation that an epoch was proposed, or has begun.
	observe struct{ begun bool }
)

// A msg is a message with its record. Messages to many peers share one record, which is encoded once.
type msg struct {
	kind      kind
	epoch, id uint64
	rec       *record
}

// A record is the content of a message.
type record struct {
	value   any
	encoded []byte
}

// say returns a message with a record.
func say(k kind, v any) msg { return msg{kind: k, epoch: firstEpoch, rec: &record{value: v}} }

// encode returns the message for a stream.
func (m msg) encode() message {
	out := message{kind: m.kind, epoch: m.epoch, id: m.id}
	if m.rec != nil {
		if m.rec.encoded == nil {
			m.rec.encoded = note(m.kind, m.rec.value).body
		}
		out.body = m.rec.encoded
	}
	return out
}

// step handles an event at a time, after the deadlines until then, and returns what must be done. A nil event lets only time
// pass. An error means that the peer of the event has violated the protocol.
func (c *coordinator) step(now instant, e event) ([]action, error) {
	c.now = max(c.now, now)
	for !c.closed && !c.handedOver && len(c.deadlines) > 0 && c.deadlines[0].at <= c.now {
		c.pass(heap.Pop(&c.deadlines).(deadline))
	}
	var err error
	if e != nil {
		err = e.happen(c)
	}
	out := c.actions
	c.actions = nil
	return out, err
}

// next returns the next deadline. Without any, ok is false.
func (c *coordinator) next() (at instant, ok bool) {
	if c.closed || c.handedOver || len(c.deadlines) == 0 {
		return 0, false
	}
	return c.deadlines[0].at, true
}

func (c *coordinator) act(a action) { c.actions = append(c.actions, a) }

func (c *coordinator) send(p *peer, m msg) { c.act(send{[]*peer{p}, m}) }

// hangUp ends a peer's connection.
func (c *coordinator) hangUp(p *peer) { c.act(hangUp{p}) }

// say tells the user of this host a line.
func (c *coordinator) say(text string) { c.act(notify{line: text}) }

// sayOf tells the user of this host a line about a process at ip.
func (c *coordinator) sayOf(ip, text string) { c.act(notify{ip, text}) }

// silent returns for how long nothing has arrived from a peer.
func (c *coordinator) silent(p *peer) time.Duration { return c.now - p.heard }

// due is what a deadline is for.
type due int

const (
	// Of a phase: they have no effect after it.
	dueSettled  due = iota // losses that belong together have happened
	dueReturned            // all functions should have returned
	dueHeld                // all members should have come to the end of a step
	dueMembers             // there should be enough members
	dueAnswers             // the proposal should have been answered
	dueGathered            // processes that start together have come
	dueHope                // look again whether processes may come
	dueBack                // after a takeover, the members should have come back
	// Of what follows c.elastic, c.restart, c.succession or c.faults.pending:
	dueDeath    // a launcher should have killed a process
	dueMajority // after a takeover, hosts that are needed should have come
	dueReturnTo // an excluded host may take part again
	dueBackoff  // the back-off of a restart is over
	dueVoters   // voters should have come
	dueLook     // look for voters
	dueReport   // the second half of a loss should have come
	dueExit     // a launcher should have reported an exit
	dueOwnExit  // a process that has failed should have exited
	dueKill     // try again to order a kill
	dueProposal // look again whether a plan can be proposed
	dueWaitLine // tell the user who is missing
)

// A deadline is something to do at a time. It has only the fields that it needs.
type deadline struct {
	at     instant
	number uint64 // deadlines of one time pass in the order in which they were set
	what   due
	turn   uint64 // the phase of the epoch that it belongs to
	of     any    // the *elastic, *restart, *succession or *pending that it belongs to
	peer   *peer
	place  place
	pid    int
	fault  fault
}

// after sets a deadline.
func (c *coordinator) after(d time.Duration, x deadline) {
	c.lastDeadline++
	x.at, x.number = c.now+max(d, 0), c.lastDeadline
	heap.Push(&c.deadlines, x)
}

// inPhase sets a deadline that has no effect if the phase has changed by then.
func (c *coordinator) inPhase(d time.Duration, what due) {
	c.after(d, deadline{what: what, of: c.elastic, turn: c.elastic.turn})
}

// pass does what is due.
func (c *coordinator) pass(d deadline) {
	if d.what <= dueBack {
		if e := c.elastic; e != nil && d.of == e && e.turn == d.turn && !e.over {
			c.passPhase(d.what)
		}
		return
	}
	switch d.what {
	case dueDeath:
		if c.elastic != nil && d.of == c.elastic && c.elastic.dying[d.place] == d.pid {
			c.hasDied(d.place)
		}
	case dueMajority:
		if d.of == c.elastic && c.isElastic() && !c.isMinority() && c.elastic.phase == phaseWait {
			c.form()
		}
	case dueReturnTo:
		if c.isElastic() {
			c.checkChanges()
		}
	case dueBackoff:
		if r := d.of.(*restart); true {
			r.due = true
			c.tryPropose()
		}
	case dueVoters:
		s := d.of.(*succession)
		if s.due = true; c.succession == s {
			c.trySucceed()
		}
	case dueLook:
		if c.succession != nil && d.of == c.succession {
			c.lookForVoters()
		}
	case dueReport:
		if w := c.faults.pending; w != nil && d.of == w {
			c.resolve(w.fault, tellAll)
		}
	case dueExit:
		if c.isElastic() {
			c.loseWorker(d.peer, d.fault)
		}
	case dueOwnExit:
		c.send(d.peer, killOf(d.place.local, d.pid))
	case dueKill:
		if d.peer.state != peerGone {
			c.sendKill(d.peer, d.place.local, d.pid)
		}
	case dueProposal:
		c.tryPropose()
	case dueWaitLine:
		if line := c.waitingLine(); line != "" {
			c.say(line)
		}
		c.after(waitLine, deadline{what: dueWaitLine})
	}
}

// passPhase does what is due in the phase of the epoch.
func (c *coordinator) passPhase(what due) {
	switch what {
	case dueSettled:
		c.checkReturned()
	case dueReturned:
		c.killRunning()
	case dueHeld:
		c.revokePlanned()
	case dueMembers:
		c.endElastic(fmt.Sprintf("not enough processes for %v", c.sinceEnd().Round(100*time.Millisecond)))
	case dueAnswers:
		c.loseUnprepared()
	case dueGathered:
		c.beginHold(c.arrivals())
	case dueHope:
		c.checkHope()
	case dueBack:
		c.giveUpAbsent()
	}
}

// deadlines is a heap.
type deadlines []deadline

func (d deadlines) Len() int { return len(d) }
func (d deadlines) Less(i, j int) bool {
	return d[i].at < d[j].at || d[i].at == d[j].at && d[i].number < d[j].number
}
func (d deadlines) Swap(i, j int) { d[i], d[j] = d[j], d[i] }
func (d *deadlines) Push(x any)   { *d = append(*d, x.(deadline)) }
func (d *deadlines) Pop() any {
	old := *d
	x := old[len(old)-1]
	old[len(old)-1] = deadline{}
	*d = old[:len(old)-1]
	return x
}
