package cluster

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/plain"
)

// whereabouts asks the launcher of this process who coordinates the job. The address is "" if the
// launcher does not know yet. If over is not "", it is why the job has ended on this host.
func (cfg *JoinConfig) whereabouts(ctx context.Context, key credential) (at, over string) {
	l, hello, err := cfg.to(cfg.agentAt, key).dial(ctx)
	if r, ok := errors.AsType[*referral](err); ok {
		if r.finished {
			return "", errFinished.Error()
		}
		return r.at, r.over
	}
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			over = "the launcher of this host has ended"
		}
		return "", over
	}
	l.close()
	if hello.Elects {
		return "", ""
	}
	return cfg.agentAt, ""
}

// hasLostCoordinator reports whether this process may go on with another coordinator.
func (r *runner) hasLostCoordinator() bool {
	how := loss(r.k.loss.Load())
	return r.cfg.agentAt != "" && r.k.ctx.Err() != nil && r.parent.Err() == nil && how != notLost && len(r.end) == 0
}

// followAgent registers with the coordinator that the launcher has chosen after the loss of the last one.
func (r *runner) followAgent() error {
	lost := r.k
	lost.close()
	select {
	case <-r.worlds: // its coordinator is lost
	default:
	}
	limit := lost.hello.LostAfter
	ctx, cancel := context.WithTimeout(r.parent, successionTime(limit)+joinFactor*limit)
	defer cancel()
	begun := time.Now()
	for delay := firstRetry; ; delay = min(2*delay, lastRetry/16) {
		at, over := r.cfg.whereabouts(ctx, r.key)
		if over == errFinished.Error() {
			return errFinished
		}
		if over != "" {
			return lostBecause(lost, over)
		}
		same := at == lost.to.addr
		if at != "" && !same {
			l, hello, err := r.cfg.to(at, r.key).dial(ctx)
			same = err == nil && hello.Agent == lost.hello.Agent
			if err == nil && !hello.Elects && !same {
				r.cfg.Addr, r.cfg.at = at, at
				return r.register(l, hello)
			}
			if err == nil {
				l.close()
			}
		}
		if same && time.Since(begun) > 2*limit { // the launcher would have noticed a loss by now
			return lostBecause(lost, "this process has lost it, and the launcher of this host has not: the job goes on without this process")
		}
		if !sleep(ctx, delay) {
			return context.Cause(lost.ctx)
		}
	}
}

// lostBecause returns the loss of a coordinator with the launcher's reason why no other follows.
func lostBecause(k *client, why string) error {
	e, ok := errors.AsType[*MemberLostError](context.Cause(k.ctx))
	if !ok {
		return context.Cause(k.ctx)
	}
	f := *e
	f.Reason = plain.Text(why)
	return &f
}

// register tells a coordinator of this process.
func (r *runner) register(l *link, hello welcome) error {
	reg := r.cfg.registration()
	reg.Elastic, reg.Agent, reg.Least = true, r.cfg.agent, r.least
	if r.now != nil {
		reg.Seat, reg.By, reg.Member = r.now.epoch, r.followed, r.now.me
	}
	ready := make(chan struct{}) // r.k is set
	k, err := r.cfg.register(l, hello, r.key, reg, func(k *client, m message) {
		<-ready
		r.event(k, m)
	})
	r.k = k
	close(ready)
	if err != nil {
		k.close()
	}
	return err
}
