package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"
)

// If the workers call Run and the coordinator is lost, the agents of the last epoch choose
// another one among themselves, as seeds do at the start. Each agent runs a coordinator, and
// registers with the first one that answers in the order of succession. A coordinator takes over
// if enough agents agree (quorum.go). Epochs begin only if enough agents have the proposal, so
// that agents of two parts of a network never begin two epochs.

// A memory is what an agent has to tell the next coordinator. Agent.mu guards it.
type memory struct {
	leadership
	charter  *charter // nil unless the workers call Run and their first world is complete
	running  map[int]bool
	exits    map[int][]Exit // by local rank, without the exits before the start of a member of the last epoch
	owed     map[int]Exit   // failures for which no order has come
	fresh    map[int]int    // PIDs of workers that were proposed as new members, by local rank
	drains   *fault         // this host was asked to leave
	stops    *fault         // the job was asked to end here
	kills    bool           // all workers were asked to be killed here
	done     bool           // the workers of this host have exited
	book     ledger
	finished bool     // the program has ended
	over     bool     // the job goes on without this host, or its program has ended
	ended    []string // hosts whose launchers are known to have ended
	choosing bool
	moved    chan struct{} // closed when another coordinator has taken over
}

func newMemory(workers int) memory {
	m := memory{running: map[int]bool{}, exits: map[int][]Exit{}, owed: map[int]Exit{}, fresh: map[int]int{}, moved: make(chan struct{})}
	for local := range workers {
		m.running[local] = true
	}
	return m
}

// exited records the exit of a worker.
func (m *memory) exited(e Exit) {
	delete(m.running, e.Local)
	m.exits[e.Local] = append(m.exits[e.Local], e)
	if m.fresh[e.Local] == e.PID {
		delete(m.fresh, e.Local)
	}
	if e.Code != 0 && !e.Asked {
		m.owed[e.Local] = e
	}
}

// begun forgets the exits of the processes that were in the place of a member before it. The member may have exited.
func (m *memory) begun(local, pid int) {
	if i := exitOf(m.exits[local], pid); i < 0 {
		delete(m.exits, local)
	} else {
		m.exits[local] = m.exits[local][i:]
	}
}

// exitOf returns the place of the exit of a process in a list, or -1.
func exitOf(exits []Exit, pid int) int {
	return slices.IndexFunc(exits, func(e Exit) bool { return e.PID == pid })
}

// ordered records a command of the coordinator.
func (m *memory) ordered(o Order) {
	switch {
	case o.Stop, o.Finish:
		m.over, m.finished = true, m.finished || o.Finish
	case o.Kill:
	default:
		delete(m.owed, o.Local)
		if o.Start {
			m.running[o.Local] = true
		}
	}
}

// client returns the current connection to the coordinator.
func (a *Agent) client() *client {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.k
}

// referral is the answer to processes that look for the coordinator.
func (a *Agent) referral() welcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.greeting()
	w.Refers, w.Finished = true, a.finished
	if a.k != nil && !a.choosing && a.k.ctx.Err() == nil {
		w.At = a.addr
	}
	if t := a.now.Load(); t != nil && t.ctx.Err() != nil {
		w.Over = context.Cause(t.ctx).Error()
		if lost, ok := errors.AsType[*MemberLostError](context.Cause(t.ctx)); ok {
			w.Over = lost.Reason
		}
	}
	return w
}

// proposed answers the proposal of an epoch.
func (a *Agent) proposed(k *client, m message) {
	var n news
	err := m.record(&n)
	if err == nil {
		err = n.check()
	}
	if err != nil {
		a.end(k, err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.follow(n.By); err != nil {
		a.refuseLeader(k, err)
		return
	}
	if a.charter != nil {
		a.charter.propose(proposal{m.epoch, n.Voters})
		for _, uuid := range n.Ended {
			if !slices.Contains(a.ended, uuid) {
				a.ended = append(a.ended, uuid)
			}
		}
	}
	for _, f := range n.Fresh {
		if f.Agent == a.uuid && exitOf(a.exits[f.Local], f.PID) < 0 {
			a.fresh[f.Local] = f.PID
		}
	}
	_ = k.send(message{kind: kindPrepared, epoch: m.epoch, id: m.id}) // the reader handles a failure
}

// voteFor promises to ignore coordinators of smaller terms.
func (a *Agent) voteFor(by leader) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.vote(by)
}

// followPlan follows the coordinator that sends a plan.
func (a *Agent) followPlan(p plan) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.follow(p.By)
}

// promise returns the coordinator of the greatest term that this host has followed or voted for.
func (a *Agent) promise() leader {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.promised
}

// mayFollow reports whether this host may register with a coordinator after the loss of another one: a candidate, or
// the leader of a term that is at least the greatest that this host knows. Both must belong to the same run of the job.
func (a *Agent) mayFollow(hello welcome) bool {
	by := a.promise()
	return hello.Run == by.Run && (hello.Elects || hello.Running && hello.Term >= by.Term)
}

// refuseLeader ends the connection to a coordinator that this host must not follow, and this host's part in the job if
// it followed that coordinator.
func (a *Agent) refuseLeader(k *client, err error) {
	if t := a.now.Load(); t != nil && a.k == k {
		t.cancel(err)
	}
	k.cancel(err)
}

// end ends the attempt and the connection.
func (a *Agent) end(k *client, err error) {
	if t := a.now.Load(); t != nil {
		t.cancel(err)
	}
	k.cancel(err)
}

// orphaned is called when the connection to the coordinator has ended during the attempt t.
func (a *Agent) orphaned(k *client, t *attempt) {
	cause := context.Cause(k.ctx)
	ch := a.mourn(k, t, cause)
	if ch == nil {
		if a.hasFinished(k) {
			a.conclude()
			return
		}
		t.cancel(cause)
		return
	}
	defer a.wg.Done()
	if err := a.choose(k, t, ch); errors.Is(err, errFinished) || err != nil && ch.Ledger.Finished && a.life.Err() == nil {
		a.conclude() // all functions have returned nil: nothing is left to do
	} else if err != nil {
		t.cancel(err)
	}
}

// errFinished is the error of a choice of a coordinator that is not needed: another host knows that the program has ended.
var errFinished = errors.New("the program has ended")

// hasFinished reports whether the program has ended, so that the loss of the coordinator at the other end of k does not matter.
func (a *Agent) hasFinished(k *client) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.finished && a.k == k && a.coord == nil && a.life.Err() == nil && loss(k.loss.Load()) != notLost
}

// mourn returns what this agent knows if the agents may choose another coordinator. It counts in a.wg.
func (a *Agent) mourn(k *client, t *attempt, cause error) *charter {
	a.mu.Lock()
	defer a.mu.Unlock()
	how := loss(k.loss.Load())
	lost, isLoss := errors.AsType[*MemberLostError](cause)
	if !isLoss || how == notLost || a.charter == nil || a.over || a.coord != nil || a.life.Err() != nil || a.now.Load() != t || a.k != k {
		return nil
	}
	a.wg.Add(1)
	a.choosing = true
	if how == lostEnded || how == lostLeaving || how == lostResigned {
		a.ended = append(a.ended, k.hello.Agent)
	}
	ch := *a.charter
	ch.Run, ch.Ledger = a.followed.Run, a.book
	ch.Term, ch.lostAfter = a.promised.Term, k.hello.LostAfter
	ch.Planned = how == lostLeaving
	ch.Lost, ch.Reason, ch.Ended = k.hello.Agent, lost.Reason, slices.Clone(a.ended)
	ch.Running, ch.Exits = slices.Sorted(maps.Keys(a.running)), maps.Clone(a.exits)
	ch.Fresh = maps.Clone(a.fresh)
	return &ch
}

// successionTime is the time for the choice of a coordinator.
func (t Timing) successionTime() time.Duration { return 2*t.LostAfter + 2*dialAttempt }

// choose finds or becomes the next coordinator.
func (a *Agent) choose(k *client, t *attempt, ch *charter) error {
	begun := time.Now()
	cause := context.Cause(k.ctx)
	a.cfg.Notify(fmt.Sprintf("job %s: %s; the hosts of epoch %d choose another coordinator", a.cfg.Job, ch.why(k, cause), ch.Epoch))
	limit := Timing{LostAfter: ch.lostAfter}.successionTime()
	if loss(k.loss.Load()) == lostByIt { // if the coordinator goes on, no other hosts will come
		limit -= ch.lostAfter
	}
	ctx, cancel := context.WithTimeout(a.life, limit)
	defer cancel()
	e := &election{agent: a, heir: ch, seeds: ch.addresses(), mine: a.port.at, lostAt: k.addr, patience: begun.Add(ch.lostAfter)}
	if !ch.isPossible() {
		return a.alone(ch, cause, nil)
	}
	if slices.Contains(e.seeds, e.mine) {
		a.serve(a.port.let(), candidacy{*ch, time.Since(begun)})
	}
	o, err := e.elect(ctx, begun)
	if err != nil {
		a.resign()
		if a.life.Err() != nil {
			return ErrClosed
		}
		if errors.Is(err, errFinished) {
			return err
		}
		return a.alone(ch, cause, err)
	}
	if e.addr != e.mine {
		a.resign()
	}
	a.followNext(t, o.k, e.addr)
	return nil
}

// why describes the loss of the coordinator at the other end of k.
func (c *charter) why(k *client, cause error) string {
	if c.Planned {
		return fmt.Sprintf("host %s, which coordinated the job, leaves: its launcher %s", k.hello.Host, c.Reason)
	}
	return cause.Error()
}

// addresses returns the addresses of the candidates in the order of succession.
func (c *charter) addresses() []string {
	var out []string
	ended := setOf(c.Ended)
	for _, uuid := range c.hosts() {
		i := c.Plan.nodeOf(uuid)
		if i < 0 || uuid == c.Lost || ended[uuid] {
			continue
		}
		if addr := c.Plan.Hosts[i].Control; addr != "" && !slices.Contains(out, addr) {
			out = append(out, addr)
		}
	}
	return out
}

// isPossible reports whether all hosts without the lost one would be enough.
func (c *charter) isPossible() bool {
	all := setOf(c.hosts())
	delete(all, c.Lost)
	return allow(c.electorates(), all, setOf(c.Ended))
}

// resign closes this host's coordinator.
func (a *Agent) resign() {
	a.mu.Lock()
	c := a.coord
	a.coord = nil
	a.mu.Unlock()
	if c != nil {
		c.close()
	}
}

// alone returns the error of an agent whose part of the network cannot go on.
func (a *Agent) alone(ch *charter, cause, err error) error {
	here := map[string]bool{a.uuid: true}
	var t *JoinTimeoutError
	if errors.As(err, &t) && t.Want > 0 {
		for _, m := range t.Have {
			for _, h := range ch.Plan.Hosts {
				if h.Host == m.Host && h.PID == m.PID {
					here[h.UUID] = true
				}
			}
		}
	}
	why := minority(ch.electorates(), here, setOf(ch.Ended), ch.Epoch)
	if why == "" {
		why = fmt.Sprintf("the hosts that are left have not agreed on another coordinator: %v", err)
	}
	lost := *cause.(*MemberLostError)
	lost.Reason += "; " + why
	return &lost
}

// warnEvery is the time between two attempts to find a seed that has started again.
const warnEvery = lastCallTime / 6

// warnSeeds tells seeds that start again where the job is, until this host does not coordinate any more. Such a
// seed would otherwise begin another job. It knows no other address than the seeds'.
func (a *Agent) warnSeeds(k *client) {
	ctx, cancel := context.WithCancel(a.life)
	defer cancel()
	defer context.AfterFunc(k.ctx, cancel)()
	for sleep(ctx, warnEvery) {
		var all sync.WaitGroup
		for _, seed := range a.cfg.Seeds {
			all.Go(func() { a.warnSeed(ctx, seed) })
		}
		all.Wait()
	}
}

// warnSeed tells one seed, if it has a coordinator.
func (a *Agent) warnSeed(ctx context.Context, seed string) {
	h, p, err := splitAddr(seed, defaultPort)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dialAttempt/2)
	defer cancel()
	l, hello, err := a.cfg.sys.dialCoordinator(ctx, a.cfg.Job, net.JoinHostPort(h, p), a.keys.control)
	if err != nil {
		return // no seed, or one that has joined the job
	}
	if by := a.promise(); !hello.Running && !hello.Elects || hello.Running && hello.Run == by.Run && hello.Term < by.Term {
		a.tellElsewhere(l, a.port.at)
		return
	}
	l.finish()
}

// tellElsewhere tells the coordinator at the other end of a link that another one leads the job, and closes the link.
func (a *Agent) tellElsewhere(l *link, at string) {
	_ = l.write(frame{body: note(kindElsewhere, elsewhere{At: at, By: a.promise()}).encode()}, handshakeTimeout) // the next attempt follows
	l.finish()
}

// repeats returns the messages that the last coordinator may have got, but the next one may not know of.
func (m *memory) repeats() (list []message) {
	for _, local := range slices.Sorted(maps.Keys(m.exits)) {
		last := m.exits[local][len(m.exits[local])-1]
		_, owed := m.owed[local]
		if owed || !m.running[local] && (last.Code == 0 || last.Asked) { // the others were ordered to start again
			list = append(list, note(kindExit, last))
		}
	}
	if m.drains != nil {
		list = append(list, note(kindDrain, *m.drains))
	}
	if m.stops != nil {
		list = append(list, note(kindStop, *m.stops))
	}
	if m.kills {
		list = append(list, message{kind: kindKill, epoch: firstEpoch})
	}
	if m.done {
		list = append(list, message{kind: kindDone, epoch: firstEpoch})
	}
	return list
}

// followNext makes k the connection to the coordinator, and repeats what the last one may not know.
func (a *Agent) followNext(t *attempt, k *client, addr string) {
	a.mu.Lock()
	old := a.k
	a.k, a.addr, a.choosing = k, addr, false
	repeat := a.repeats()
	moved := a.moved
	a.moved = make(chan struct{})
	coordinates := a.coord != nil
	a.mu.Unlock()
	old.close()
	for _, m := range repeat {
		_ = k.send(m) // the reader handles a failure
	}
	close(moved)
	if coordinates && !a.seed {
		a.wg.Go(func() { a.warnSeeds(k) })
	}
	context.AfterFunc(k.ctx, func() { a.orphaned(k, t) })
}

// keepLedger records the ledger of the coordinator on this host.
func (a *Agent) keepLedger(k *client, m message) {
	var n news
	if err := m.record(&n); err != nil {
		a.end(k, err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.follow(n.By); err != nil {
		a.refuseLeader(k, err)
		return
	}
	a.book.merge(n.Ledger)
	_ = k.send(message{kind: kindRecorded, epoch: m.epoch, id: m.id}) // the reader handles a failure
}

// conclude ends the job on this host with success, although the coordinator is lost: the program has ended.
func (a *Agent) conclude() {
	a.mu.Lock()
	first := !a.finished
	a.finished, a.over, a.choosing = true, true, false
	a.mu.Unlock()
	a.concluding.Do(func() { close(a.concluded) })
	if first {
		select {
		case a.orders <- Order{Finish: true}:
		default:
		}
	}
}
