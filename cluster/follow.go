package cluster

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/safe"
)

// whereabouts asks the launcher of this process who coordinates the job, and since when the launcher is registered there. The time is not
// after that registration: a slow answer must not look like a later one. The address is "" if the launcher does not know yet. If over is
// not "", it is why the job has ended on this host.
func (cfg *JoinConfig) whereabouts(ctx context.Context, key job.Credential) (at string, since time.Time, over string) {
	begun := time.Now()
	l, hello, err := cfg.to(cfg.agentAt, key).Dial(ctx)
	if r, ok := errors.AsType[*job.Referral](err); ok {
		if r.Finished {
			return "", since, job.ErrFinished.Error()
		}
		return r.At, begun.Add(-hello.Follows), r.Over
	}
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			over = "the launcher of this host has ended"
		}
		return "", since, over
	}
	l.Close()
	if hello.Elects {
		return "", since, ""
	}
	return cfg.agentAt, since, ""
}

// hasLostCoordinator reports whether this process may go on with another coordinator.
func (r *runner) hasLostCoordinator() bool {
	how := job.Loss(r.k.Loss.Load())
	return !r.once && r.cfg.agentAt != "" && r.k.Ctx.Err() != nil && r.parent.Err() == nil && how != job.NotLost && len(r.end) == 0
}

// followAgent registers with the coordinator that the launcher has chosen after the loss of the last one.
func (r *runner) followAgent() error {
	lost := r.k
	lost.Close()
	select {
	case <-r.worlds: // its coordinator is lost
	default:
	}
	limit := lost.Hello.LostAfter
	ctx, cancel := context.WithTimeout(r.parent, job.SuccessionTime(limit)+job.JoinFactor*limit)
	defer cancel()
	begun := time.Now()
	for delay := job.FirstRetry; ; delay = min(2*delay, job.LastRetry/16) {
		at, since, over := r.cfg.whereabouts(ctx, r.key)
		if over == job.ErrFinished.Error() {
			return job.ErrFinished
		}
		if over != "" {
			return lostBecause(lost, over)
		}
		same := at == lost.To.Addr && since.Before(lost.Since) // otherwise the launcher has lost it, too, and has returned to it
		if at != "" && !same {
			l, hello, err := r.cfg.to(at, r.key).Dial(ctx)
			same = err == nil && hello.Agent == lost.Hello.Agent && since.Before(lost.Since)
			if err == nil && !hello.Elects && !same {
				r.cfg.Addr, r.cfg.at = at, at
				return r.register(l, hello)
			}
			if err == nil {
				l.Close()
			}
		}
		if same && time.Since(begun) > 2*limit { // the launcher would have noticed a loss by now
			return lostBecause(lost, "this process has lost it, and the launcher of this host has not: the job goes on without this process")
		}
		if !job.Sleep(ctx, delay) {
			return context.Cause(lost.Ctx)
		}
	}
}

// lostBecause returns the loss of a coordinator with the launcher's reason why no other follows.
func lostBecause(k *job.Client, why string) error {
	e, ok := errors.AsType[*MemberLostError](context.Cause(k.Ctx))
	if !ok {
		return context.Cause(k.Ctx)
	}
	f := *e
	f.Reason = safe.Text(why)
	return &f
}

// register tells a coordinator of this process.
func (r *runner) register(l *job.Link, hello job.Welcome) error {
	reg := r.cfg.registration()
	if !r.once {
		reg.Elastic, reg.Agent, reg.Least = true, r.cfg.agent, r.least
	}
	if r.now != nil {
		reg.Seat, reg.By, reg.Member = r.now.epoch, r.Followed, r.now.me
	}
	ready := make(chan struct{}) // r.k is set
	k, err := r.cfg.register(l, hello, r.key, reg, func(k *job.Client, m job.Message) {
		<-ready
		r.event(k, m)
	})
	r.k = k
	close(ready)
	if err != nil {
		k.Close()
	}
	return err
}
