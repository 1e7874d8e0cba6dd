package job

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// maxRedials limits the attempts of a member that run at the same time.
const maxRedials = 16

// redials are a client's attempts to connect again.
type redials struct {
	slots       chan struct{}
	unresumable chan error    // an attempt has shown that the stream cannot continue
	requests    atomic.Uint64 // how often the coordinator was asked to continue the stream
	asking      atomic.Bool   // mayReturn asks the launcher

	adopting sync.Mutex // guards newest
	newest   uint64     // the greatest request that was answered
}

func newRedials() redials {
	return redials{slots: make(chan struct{}, maxRedials), unresumable: make(chan error, 1)}
}

// BeStrict limits silence to LostAfter in d from now.
func (k *Client) BeStrict(d time.Duration) { k.strict.Store(int64(k.Clock.now() + d)) }

// silenceLimit returns the silence after which the coordinator is lost.
func (k *Client) silenceLimit() time.Duration {
	if int64(k.Clock.now()) < k.strict.Load() {
		return JoinFactor * k.Hello.LostAfter
	}
	return k.Hello.LostAfter
}

// watch sends heartbeats, and looks for silence of the coordinator. TCP repeats
// lost packets at growing intervals, so after an outage the connection may stay
// silent for as long as the outage took, unlike a new connection.
func (k *Client) watch() {
	t := time.NewTicker(k.Clock.step)
	defer t.Stop()
	beat := time.Now()
	for {
		select {
		case <-k.open.Done():
			return
		case <-t.C:
		}
		k.Clock.tick()
		if time.Since(beat) >= k.Hello.Heartbeat-k.Clock.step/2 {
			beat = time.Now()
			k.Stream.SendBeat()
		}
		switch overdue := k.Stream.silent() > k.Hello.overdueAfter(); {
		case overdue && k.isSuspended(): // when it continues, most of the limit is left
			k.Stream.touch()
		case k.Stream.isTooSilent(k.silenceLimit()) && !k.mayReturn():
			k.Stream.expire()
		case overdue:
			k.wg.Go(func() { _ = k.redial() }) // the next attempt has the same error
		}
	}
}

// mayReturn reports whether a coordinator that is silent for too long may still be heard again. While the launcher of this process follows
// it, the job goes on with it, and this process must not be the only one that has lost it. The limits of both do not end
// at the same time, and the network may return between them. But a launcher that was stopped may follow a coordinator that it has lost
// long ago, and its workers must not run for long beside an epoch that has begun without them.
func (k *Client) mayReturn() bool {
	limit := k.silenceLimit()
	if k.To.Follows == nil || k.Stream.silent() > limit+min(limit/2, 3*time.Second/2) {
		return false
	}
	if k.asking.CompareAndSwap(false, true) {
		k.wg.Go(func() {
			defer k.asking.Store(false)
			ctx, cancel := context.WithTimeout(k.open, limit/8)
			defer cancel()
			if !k.To.Follows(ctx, k.Since) && k.Stream.isTooSilent(limit) {
				k.Stream.expire()
			}
		})
	}
	return true
}

// reconnect returns another link after err ended the current one. If the coordinator's process has ended
// or does not know this process, it returns err.
func (k *Client) reconnect(err error) (renewal, error) {
	if k.ended.Load() || k.final.Load() || k.isDown() {
		return renewal{}, err
	}
	select {
	case <-k.unresumable: // of an earlier connection
	default:
	}
	slow := max(k.Hello.LostAfter/24, FirstRetry) // an attempt that takes longer gets a second one beside it
	failed := make(chan struct{}, 1)
	t := time.NewTimer(0)
	defer t.Stop()
	for delay := FirstRetry; ; {
		select {
		case r := <-k.Stream.renewals:
			return r, nil
		case <-k.Stream.expired:
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

// errProcessEnded says that an attempt to connect again has shown that the coordinator's process has ended.
var errProcessEnded = errors.New("its process ended")

// redialOrGiveUp reports an attempt whose error no other attempt can fix.
func (k *Client) redialOrGiveUp(broken error) {
	err := k.redial()
	refused, isRefused := errors.AsType[*RefusedError](err)
	_, refers := errors.AsType[*Referral](err)
	switch {
	case isRefused:
		k.Loss.Store(int32(lostByIt))
		broken = fmt.Errorf("%w; connected again: %w", broken, refused)
	case provesEnd(err, k.To.Addr, k.ip):
		broken = fmt.Errorf("%w: %w", broken, errProcessEnded)
		// After a longer silence it may have gone on with other hosts before it ended, and they may go on now.
		if k.Stream.isCertain(k.Hello.LostAfter) {
			k.Loss.Store(int32(lostEnded))
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

// redial tries once to continue the stream over a new link. Several attempts may ask the coordinator at the same time: one that
// waits until TCP repeats a lost segment does not delay the others.
func (k *Client) redial() error {
	select {
	case k.slots <- struct{}{}:
	default:
		return nil
	}
	defer func() { <-k.slots }()
	links := k.Stream.Generation()
	limit := max(k.Hello.LostAfter/4, time.Millisecond)
	ctx, cancel := context.WithTimeout(k.open, limit)
	defer cancel()
	l, err := k.dialAgain(ctx, k.To)
	if host, port, _ := net.SplitHostPort(k.To.Addr); err != nil && k.ip != "" && ParseIP(host) == nil {
		to := k.To // the name may lead to another host by now, for example because a pod was replaced, and the process may live on
		to.Addr = net.JoinHostPort(k.ip, port)
		if again, failed := k.dialAgain(ctx, to); failed == nil {
			l, err = again, nil
		}
	}
	if err != nil {
		return err
	}
	if k.Stream.Generation() != links || k.isDown() {
		return l.Close()
	}
	stop := context.AfterFunc(k.open, func() { l.Close() })
	defer stop()
	request := k.requests.Add(1)
	r, err := k.resume(l, request, limit)
	if err != nil {
		k.keepOpen(l)
		return err
	}
	k.adopting.Lock()
	defer k.adopting.Unlock()
	if request < k.newest { // the coordinator continues the stream on the link of the newest request
		return l.Close()
	}
	k.newest = request
	k.Stream.replaceBy(r)
	return nil
}

// dialAgain connects to the coordinator's process at an address.
func (k *Client) dialAgain(ctx context.Context, to Target) (*Link, error) {
	l, hello, err := to.Dial(ctx)
	if r, refers := errors.AsType[*Referral](err); refers && hello.Agent != k.Hello.Agent {
		return nil, errReplaced{r.ip}
	}
	if err == nil && hello.Agent != k.Hello.Agent {
		l.Close()
		return nil, errReplaced{addrIP(l.Conn.RemoteAddr())}
	}
	return l, err
}

// keepOpen keeps a link that has not answered in time. The coordinator may have continued the stream on it, and
// would take its end for the end of this process, before another attempt succeeds.
func (k *Client) keepOpen(l *Link) {
	k.wg.Go(func() {
		Sleep(k.open, k.Hello.LostAfter)
		l.Close()
	})
}

// resume asks the coordinator to continue the stream on l.
func (k *Client) resume(l *Link, request uint64, limit time.Duration) (renewal, error) {
	ask := Message{Kind: kindResume, Epoch: request, ID: k.Stream.receivedSoFar(), Body: []byte(k.Hello.Stream)}
	if err := l.Write(Frame{Body: ask.Encode()}, limit); err != nil {
		return renewal{}, err
	}
	m, f, err := l.readMessage(limit)
	if err != nil {
		return renewal{}, err
	}
	switch m.Kind {
	case kindResumed:
		return renewal{link: l, acked: f.ack}, nil
	case KindRefuse:
		var r Refusal
		if err := m.Record(&r); err != nil {
			return renewal{}, err
		}
		return renewal{}, r.Err(k.To.Job, k.Addr)
	}
	return renewal{}, fmt.Errorf("message of kind %d after the request to resume", m.Kind)
}
