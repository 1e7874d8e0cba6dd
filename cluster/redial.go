package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// maxRedials limits the attempts of a member that run at the same time.
const maxRedials = 16

// redials are a client's attempts to connect again.
type redials struct {
	slots       chan struct{}
	unresumable chan error    // an attempt has shown that the stream cannot continue
	resuming    chan struct{} // full while the coordinator is asked to continue the stream
	requests    uint64        // how often it was asked; guarded by resuming
}

func newRedials() redials {
	return redials{slots: make(chan struct{}, maxRedials), unresumable: make(chan error, 1), resuming: make(chan struct{}, 1)}
}

// beStrict limits silence to LostAfter in d from now.
func (k *client) beStrict(d time.Duration) { k.strict.Store(int64(k.clock.now() + d)) }

// silenceLimit returns the silence after which the coordinator is lost.
func (k *client) silenceLimit() time.Duration {
	if int64(k.clock.now()) < k.strict.Load() {
		return joinFactor * k.hello.LostAfter
	}
	return k.hello.LostAfter
}

// watch sends heartbeats, and looks for silence of the coordinator. TCP repeats lost
// packets at growing intervals, so after an outage the connection may stay silent for as
// long as the outage took. A new connection does not have to wait.
func (k *client) watch() {
	t := time.NewTicker(k.clock.step)
	defer t.Stop()
	beat := time.Now()
	for {
		select {
		case <-k.open.Done():
			return
		case <-t.C:
		}
		k.clock.tick()
		if time.Since(beat) >= k.hello.Heartbeat-k.clock.step/2 {
			beat = time.Now()
			k.stream.sendBeat()
		}
		switch overdue := k.stream.silent() > k.hello.overdueAfter(); {
		case overdue && k.isSuspended(): // when it continues, most of the limit is left
			k.stream.touch()
		case k.stream.isTooSilent(k.silenceLimit()):
			k.stream.expire()
		case overdue:
			k.wg.Go(func() { _ = k.redial() }) // the next attempt has the same error
		}
	}
}

// reconnect returns another link after err ended the current one. If the coordinator's process has ended
// or does not know this process, it returns err.
func (k *client) reconnect(err error) (renewal, error) {
	if k.ended.Load() || k.final.Load() || k.isDown() {
		return renewal{}, err
	}
	select {
	case <-k.unresumable: // of an earlier connection
	default:
	}
	slow := max(k.hello.LostAfter/24, firstRetry) // an attempt that takes longer gets a second one beside it
	failed := make(chan struct{}, 1)
	t := time.NewTimer(0)
	defer t.Stop()
	for delay := firstRetry; ; {
		select {
		case r := <-k.stream.renewals:
			return r, nil
		case <-k.stream.expired:
			return renewal{}, os.ErrDeadlineExceeded
		case <-k.open.Done():
			return renewal{}, err
		case why := <-k.unresumable:
			return renewal{}, why
		case <-failed:
			t.Reset(delay)
			delay = min(2*delay, slow)
		case <-t.C:
			k.wg.Go(func() {
				k.redialOrGiveUp(err)
				select {
				case failed <- struct{}{}:
				default:
				}
			})
			t.Reset(slow)
		}
	}
}

// redialOrGiveUp reports an attempt whose error no other attempt can fix.
func (k *client) redialOrGiveUp(broken error) {
	err := k.redial()
	refused, isRefused := errors.AsType[*RefusedError](err)
	_, refers := errors.AsType[*referral](err)
	switch {
	case isRefused:
		k.loss.Store(int32(lostByIt))
		broken = fmt.Errorf("%w; connected again: %s", broken, refused.Reason)
	case provesEnd(err, k.to.addr, k.ip):
		// After a longer silence it may have gone on with other hosts before it ended, and they may go on now.
		if k.stream.isCertain(k.hello.LostAfter) {
			k.loss.Store(int32(lostEnded))
		}
	case refers: // its process does not coordinate any more
	default: // also if a stranger answers, who proves nothing
		return
	}
	select {
	case k.unresumable <- broken:
	default:
	}
}

// redial tries once to continue the stream over a new link.
func (k *client) redial() error {
	select {
	case k.slots <- struct{}{}:
	default:
		return nil
	}
	defer func() { <-k.slots }()
	links := k.stream.generation()
	limit := max(k.hello.LostAfter/4, time.Millisecond)
	ctx, cancel := context.WithTimeout(k.open, limit)
	defer cancel()
	l, hello, err := k.to.dial(ctx)
	if r, refers := errors.AsType[*referral](err); refers && hello.Agent != k.hello.Agent {
		return errReplaced{r.ip}
	}
	if err != nil {
		return err
	}
	if hello.Agent != k.hello.Agent {
		l.close()
		return errReplaced{addrIP(l.c.RemoteAddr())}
	}
	k.resuming <- struct{}{}
	defer func() { <-k.resuming }()
	if k.stream.generation() != links || k.isDown() {
		return l.close()
	}
	stop := context.AfterFunc(k.open, func() { l.close() })
	defer stop()
	r, err := k.resume(l, limit)
	if err != nil {
		k.keepOpen(l)
		return err
	}
	k.stream.replaceBy(r)
	return nil
}

// keepOpen keeps a link that has not answered in time. The coordinator may have continued the stream on it, and
// would take its end for the end of this process, before another attempt succeeds.
func (k *client) keepOpen(l *link) {
	k.wg.Go(func() {
		sleep(k.open, k.hello.LostAfter)
		l.close()
	})
}

// resume asks the coordinator to continue the stream on l.
func (k *client) resume(l *link, limit time.Duration) (renewal, error) {
	k.requests++
	ask := message{kind: kindResume, epoch: k.requests, id: k.stream.receivedSoFar(), body: []byte(k.hello.Stream)}
	if err := l.write(frame{body: ask.encode()}, limit); err != nil {
		return renewal{}, err
	}
	m, f, err := l.readMessage(limit)
	if err != nil {
		return renewal{}, err
	}
	switch m.kind {
	case kindResumed:
		return renewal{link: l, acked: f.ack}, nil
	case kindRefuse:
		var r refusal
		if err := m.record(&r); err != nil {
			return renewal{}, err
		}
		return renewal{}, r.err(k.to.job, k.addr)
	}
	return renewal{}, fmt.Errorf("message of kind %d after the request to resume", m.kind)
}
