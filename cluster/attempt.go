package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// An attempt is an agent's part in the job from one start of all processes to the next.
type attempt struct {
	epoch  uint64
	plan   plan
	node   int
	ctx    context.Context
	cancel context.CancelCauseFunc
	again  atomic.Bool // the processes are started again after the failure
	noted  atomic.Pointer[MemberLostError]
}

func (a *Agent) newAttempt(k *client, epoch uint64, p plan) (*attempt, error) {
	t := &attempt{epoch: epoch, plan: p, node: p.nodeOf(a.uuid)}
	if t.node < 0 {
		return nil, fmt.Errorf("cluster: join job %q: the coordinator's plan does not include this host, %s", a.cfg.Job, a.cfg.Host)
	}
	t.ctx, t.cancel = context.WithCancelCause(k.ctx)
	return t, nil
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
			a.plans <- t // the coordinator sends one plan for each call of Next
			return
		}
	}
	k.cancel(err)
}

// Restarting reports whether all processes of the job are started again after the failure
// that ended Context. The launcher must then stop its workers and call Next.
func (a *Agent) Restarting() bool { return a.now.Load().again.Load() }

// Next reports that all workers of this host have exited after a failure, and returns when
// the job's processes can start again. The agent then has new ranks, and Context returns a new context.
// Next fails with the cause if the job is stopped meanwhile, and with a *JoinTimeoutError if
// hosts are missing after Timing.Join.
func (a *Agent) Next(ctx context.Context) error {
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timing.Join)
	defer cancel()
	if err := a.k.send(message{kind: kindReady, epoch: a.now.Load().epoch}); err != nil {
		return fmt.Errorf("cluster: restart job %q: %w", a.cfg.Job, err)
	}
	select {
	case t := <-a.plans:
		a.now.Store(t)
		if t.plan.News != "" {
			a.cfg.Notify(fmt.Sprintf("job %s: %s", a.cfg.Job, t.plan.News))
		}
		return nil
	case <-a.k.ctx.Done():
		return context.Cause(a.k.ctx)
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
	r, err := a.k.askMissing()
	e.fill(r)
	e.Err = err
	return e
}
