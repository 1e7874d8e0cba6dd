package job

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// If the workers call Run and the coordinator is lost, the agents of the last epoch choose
// another one among themselves, as seeds do at the start. Each agent runs a coordinator, and
// registers with the first one that answers, by succession. A coordinator takes over
// if enough agents agree (quorum.go). Epochs begin only if enough agents have the proposal, so
// that agents of two parts of a network never begin two epochs.

// Client returns the current connection to the coordinator.
func (a *Agent) Client() *Client {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.k
}

// referral is the answer to processes that look for the coordinator.
func (a *Agent) referral() Welcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.greeting()
	w.Refers, w.Finished, w.Run = true, a.finished, a.promised.Run
	if a.k != nil && !a.choosing && a.k.Ctx.Err() == nil {
		w.At, w.Follows = a.Addr, time.Since(a.k.Since)
	}
	if t := a.Now.Load(); t != nil && t.ctx.Err() != nil {
		w.Over = context.Cause(t.ctx).Error()
		if lost, ok := errors.AsType[*MemberLostError](context.Cause(t.ctx)); ok {
			w.Over = lost.Reason
		}
	}
	return w
}

// proposed answers the proposal of an epoch.
func (a *Agent) proposed(k *Client, m Message) {
	a.answer(k, m, kindAccepted, func(n news) error { return a.proposal(a.UUID, m.Epoch, n) })
}

// keepLedger records the ledger of the coordinator on this host.
func (a *Agent) keepLedger(k *Client, m Message) {
	a.answer(k, m, kindRecorded, a.keep)
}

// answer lets this host as a voter handle a message of the coordinator, and answers it unless it is refused.
func (a *Agent) answer(k *Client, m Message, with Kind, handle func(news) error) {
	var n news
	if err := m.Record(&n); err != nil {
		a.end(k, err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := handle(n); errors.As(err, new(*badNews)) {
		a.end(k, err)
	} else if err != nil {
		a.refuseLeader(k, err)
	} else {
		_ = k.Send(Message{Kind: with, Epoch: m.Epoch, ID: m.ID}) // the reader handles a failure
	}
}

// followPlan follows the coordinator that sends a plan.
func (a *Agent) followPlan(p plan) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.Follow(p.By)
}

// promise returns the coordinator of the greatest term that this host has followed or voted for.
func (a *Agent) promise() Leader {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.promised
}

// refuseLeader ends the connection to a coordinator that this host must not follow, and this host's part in the job if
// it followed that coordinator.
func (a *Agent) refuseLeader(k *Client, err error) {
	if t := a.Now.Load(); t != nil && a.k == k {
		t.cancel(err)
	}
	k.Cancel(err)
}

// end ends the attempt and the connection.
func (a *Agent) end(k *Client, err error) {
	if t := a.Now.Load(); t != nil {
		t.cancel(err)
	}
	k.Cancel(err)
}

// coordinatorLost is called when the connection to the coordinator has ended during the attempt t.
func (a *Agent) coordinatorLost(k *Client, t *attempt) {
	cause := context.Cause(k.Ctx)
	ch := a.loseCoordinator(k, t, cause)
	if ch == nil {
		if a.hasFinished(k) {
			a.conclude()
			return
		}
		t.cancel(cause)
		return
	}
	defer a.wg.Done()
	if err := a.choose(k, t, ch); errors.Is(err, ErrFinished) || err != nil && ch.Ledger.Finished && a.life.Err() == nil {
		a.conclude() // all functions have returned nil: nothing is left to do
	} else if err != nil {
		t.cancel(err)
	}
}

// hasFinished reports whether the program has ended, so that the loss of the coordinator at the other end of k does not matter.
func (a *Agent) hasFinished(k *Client) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.finished && a.k == k && a.Coord == nil && a.life.Err() == nil && Loss(k.Loss.Load()) != NotLost
}

// loseCoordinator returns what this agent knows if the agents may choose another coordinator. It counts in a.wg.
func (a *Agent) loseCoordinator(k *Client, t *attempt, cause error) *history {
	a.mu.Lock()
	defer a.mu.Unlock()
	how := Loss(k.Loss.Load())
	lost, isLoss := errors.AsType[*MemberLostError](cause)
	if !isLoss || !a.mayChoose(how) || a.Coord != nil || a.life.Err() != nil || a.Now.Load() != t || a.k != k {
		return nil
	}
	a.wg.Add(1)
	a.choosing = true
	return a.candidacy(how, k.Hello, lost.Reason, time.Since(a.begun))
}

// choose finds or becomes the next coordinator.
func (a *Agent) choose(k *Client, t *attempt, ch *history) error {
	begun, cause := time.Now(), context.Cause(k.Ctx)
	a.cfg.Notify(fmt.Sprintf("job %s: %s; %s", a.cfg.Job, ch.why(k, cause), ch.next(Loss(k.Loss.Load()))))
	e := &election{agent: a}
	o, err := e.elect(a.life, begun, newSuccession(&a.voter, ch, a.port.at, k.Addr, Loss(k.Loss.Load()), 1))
	if err != nil {
		a.resign()
		switch {
		case a.life.Err() != nil:
			return ErrClosed
		case errors.Is(err, ErrFinished):
			return err
		case errors.Is(err, errNoMajority):
			err = nil
		}
		return a.alone(ch, cause, err)
	}
	if !o.self {
		a.resign()
	}
	a.followNext(t, o.k, o.addr)
	return nil
}

// why describes the loss of the coordinator at the other end of k.
func (c *history) why(k *Client, cause error) string {
	if c.Planned {
		return fmt.Sprintf("host %s, which coordinated the job, leaves: its launcher %s", k.Hello.Host, c.Reason)
	}
	return cause.Error()
}

// next says what the hosts do after the loss of a coordinator. If it has lost this host, it may go on, and nobody chooses another one.
func (c *history) next(how Loss) string {
	if how == lostByIt {
		return "this host looks for the job's coordinator"
	}
	return fmt.Sprintf("the hosts of epoch %d choose another coordinator", c.Epoch)
}

// resign closes this host's coordinator.
func (a *Agent) resign() {
	a.mu.Lock()
	c := a.Coord
	a.Coord = nil
	a.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// alone returns the error of an agent whose part of the network cannot go on.
func (a *Agent) alone(ch *history, cause, err error) error {
	here := map[string]bool{a.UUID: true}
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
	why := minority(ch.voterSets(), here, setOf(ch.Ended), ch.Epoch)
	if why == "" {
		why = fmt.Sprintf("the hosts that are left have not agreed on another coordinator: %v", err)
	}
	lost := *cause.(*MemberLostError)
	lost.Reason += "; " + why
	return &lost
}

// warnSeeds tells seeds that start again where the job is, until this host does
// not coordinate any more. Such a seed, which knows no other address than the
// seeds', would otherwise begin another job.
func (a *Agent) warnSeeds(k *Client) {
	ctx, cancel := context.WithCancel(a.life)
	defer cancel()
	defer context.AfterFunc(k.Ctx, cancel)()
	for Sleep(ctx, warnEvery) {
		var all sync.WaitGroup
		for _, seed := range a.cfg.Seeds {
			all.Go(func() { a.warnSeed(ctx, seed) })
		}
		all.Wait()
	}
}

// warnSeed tells one seed, if it has a coordinator.
func (a *Agent) warnSeed(ctx context.Context, seed string) {
	h, p, err := SplitAddr(seed, DefaultPort)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, DialAttempt/2)
	defer cancel()
	l, hello, err := a.to(net.JoinHostPort(h, p)).Dial(ctx)
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
func (a *Agent) tellElsewhere(l *Link, at string) {
	_ = l.Write(Frame{Body: Note(kindElsewhere, elsewhere{At: at, By: a.promise()}).Encode()}, HandshakeTimeout) // the next attempt follows
	l.finish()
}

// followNext continues with k as the connection to the coordinator, and repeats what the last one may not know.
func (a *Agent) followNext(t *attempt, k *Client, addr string) {
	a.mu.Lock()
	old := a.k
	a.k, a.Addr, a.choosing = k, addr, false
	repeat := a.repeats()
	moved := a.moved
	a.moved = make(chan struct{})
	coordinates := a.Coord != nil
	a.mu.Unlock()
	old.Close()
	for _, m := range repeat {
		_ = k.Send(m.encode()) // the reader handles a failure
	}
	close(moved)
	if coordinates && !a.seed {
		a.wg.Go(func() { a.warnSeeds(k) })
	}
	context.AfterFunc(k.Ctx, func() { a.coordinatorLost(k, t) })
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
