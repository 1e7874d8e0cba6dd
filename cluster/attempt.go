package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/plain"
)

// An attempt is an agent's part in the job from one start of all processes to the next.
type attempt struct {
	place  atomic.Pointer[placement]
	ctx    context.Context
	cancel context.CancelCauseFunc
	again  atomic.Bool // the processes are started again after the failure
	noted  atomic.Pointer[MemberLostError]
}

func (a *Agent) newAttempt(k *client, epoch uint64, p plan) (*attempt, error) {
	t := &attempt{}
	at := &placement{epoch: epoch, plan: p, node: p.nodeOf(a.uuid)}
	if at.node < 0 {
		return nil, fmt.Errorf("cluster: join job %q: the coordinator's plan does not include this host, %s", a.cfg.Job, a.cfg.Host)
	}
	t.place.Store(at)
	t.ctx, t.cancel = context.WithCancelCause(context.Background())
	context.AfterFunc(k.ctx, func() { a.coordinatorLost(k, t) })
	return t, nil
}

// news receives an epoch of workers that call Run.
func (a *Agent) news(epoch uint64, n news) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.now.Load()
	if t == nil {
		a.early = func() error { return a.news(epoch, n) }
		return nil
	}
	at, err := a.begins(a.uuid, epoch, n)
	if at == nil || err != nil {
		return err
	}
	t.place.Store(at)
	if n.Line != "" {
		a.cfg.Notify(fmt.Sprintf("job %s: %s", a.cfg.Job, n.Line))
	}
	return nil
}

// adopt begins the first attempt.
func (a *Agent) adopt(t *attempt) error {
	a.mu.Lock()
	a.now.Store(t)
	early := a.early
	a.mu.Unlock()
	if early != nil {
		return early()
	}
	return nil
}

// order receives a command of the coordinator.
func (a *Agent) order(k *client, o Order) {
	if o.Local < 0 || o.Local >= a.cfg.LocalSize || o.After < 0 {
		a.end(k, fmt.Errorf("cluster: the coordinator's order is for local rank %d of %d", o.Local, a.cfg.LocalSize))
		return
	}
	a.mu.Lock()
	a.ordered(o)
	a.mu.Unlock()
	select {
	case a.orders <- o:
	default:
		a.end(k, errors.New("cluster: the launcher does not obey the coordinator"))
	}
}

// Orders returns the coordinator's commands, which the launcher must obey in their order.
// They come only if the workers call Run.
func (a *Agent) Orders() <-chan Order { return a.orders }

// CanDrain reports whether the job can go on without this host: it has several hosts, and its workers call
// Run. It asks the coordinator unless it knows of an epoch.
func (a *Agent) CanDrain() bool {
	if a.cfg.Nodes == 1 || a.Context().Err() != nil {
		return false
	}
	a.mu.Lock()
	k, begun := a.k, a.history != nil && !a.over
	a.mu.Unlock()
	if begun {
		return true
	}
	r, err := k.askMissing()
	return err == nil && r.Elastic
}

// Drain asks the other hosts to go on without this one after the current step. If this host
// coordinates, another one does so afterwards. The launcher gets an Order with Stop when its workers have left. If too few hosts would
// remain, the job is stopped as by Stop.
func (a *Agent) Drain(reason string, code int) error {
	f := fault{Reason: plain.Clip(reason, maxText), Code: code}
	a.mu.Lock()
	a.drains = &f
	a.mu.Unlock()
	if err := a.client().send(note(kindDrain, f)); err != nil {
		return fmt.Errorf("cluster: leave job %q: %w", a.cfg.Job, err)
	}
	return nil
}

// fail ends the attempt with a failure after which the job goes on.
func (t *attempt) fail(f fault) {
	t.again.Store(true)
	t.cancel(f.err())
}

// planned receives a plan after the first, on the reader goroutine.
func (a *Agent) planned(k *client, epoch uint64, p plan, err error) {
	if err == nil {
		var t *attempt
		if t, err = a.newAttempt(k, epoch, p); err == nil {
			a.mu.Lock()
			a.now.Store(t)
			a.mu.Unlock()
			a.plans <- t // the coordinator sends one plan for each call of Next
			return
		}
	}
	a.end(k, err)
}

// Restarting reports whether all processes of the job are started again after the failure
// that ended Context. The launcher must then stop its workers and call Next.
func (a *Agent) Restarting() bool { return a.now.Load().again.Load() }

// Next reports that all workers of this host have exited after a failure, and returns when
// the job's processes can start again. The agent then has new ranks, and Context returns a new context.
// Next fails with the cause if the job is stopped meanwhile, and with a *JoinTimeoutError if
// hosts are missing after Timing.Join.
func (a *Agent) Next(ctx context.Context) error {
	begun, k := time.Now(), a.client()
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timing.Join)
	defer cancel()
	if err := k.send(message{kind: kindReady, epoch: a.now.Load().place.Load().epoch}); err != nil {
		return fmt.Errorf("cluster: restart job %q: %w", a.cfg.Job, err)
	}
	select {
	case t := <-a.plans:
		if n := t.place.Load().plan.News; n != "" {
			a.cfg.Notify(fmt.Sprintf("job %s: %s", a.cfg.Job, n))
		}
		return nil
	case <-k.ctx.Done():
		return context.Cause(k.ctx)
	case <-ctx.Done():
		return a.restartEnd(ctx, begun)
	}
}

// restartEnd returns the error of a Next whose context has ended.
func (a *Agent) restartEnd(ctx context.Context, begun time.Time) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("cluster: restart job %q: %w", a.cfg.Job, context.Cause(ctx))
	}
	e := &JoinTimeoutError{Job: a.cfg.Job, Waited: time.Since(begun), Addr: a.addr, Unit: unitHost}
	r, err := a.client().askMissing()
	e.fill(r)
	e.Err = err
	return e
}
