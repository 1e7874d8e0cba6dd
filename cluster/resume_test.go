package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// joinOverRelay joins n ranks, all but rank 0 over a relay.
func joinOverRelay(t *testing.T, n int, timing Timing) ([]*Session, *relay) {
	t.Helper()
	addr := freeAddr(t)
	r := newRelay(t, addr)
	ss := joinWorld(t, n, func(rank int, c *JoinConfig) {
		c.Addr, c.Timing = addr, timing
		if rank > 0 {
			c.Addr = r.addr()
		}
	})
	return ss, r
}

// count lets each rank add to a sum and write values of many sizes until stop is closed, and
// returns how many calls of all ranks have succeeded.
func count(t *testing.T, ss []*Session, stop <-chan struct{}) int64 {
	t.Helper()
	var mu sync.Mutex
	var calls int64
	err := every(ss, func(s *Session) error {
		for i := 1; ; i++ {
			select {
			case <-stop:
				return nil
			default:
			}
			sum, err := s.Add(t.Context(), "sum", 1)
			if err != nil {
				return err
			}
			key := fmt.Sprint("of ", s.Rank())
			if own, err := s.Add(t.Context(), key, 1); err != nil || own != int64(i) {
				return fmt.Errorf("rank %d has added %d times, and the sum is %d: %w", s.Rank(), i, own, err)
			}
			value := make([]byte, sum%(1<<18))
			if err := s.Set(t.Context(), "value", value); err != nil {
				return err
			}
			if _, err := s.Get(t.Context(), "value"); err != nil {
				return err
			}
			mu.Lock()
			calls++
			mu.Unlock()
		}
	})
	require.NoError(t, err)
	return calls
}

// TestResets resets the connections of a busy job again and again, in pairs, so that some resets
// meet a member that connects again: no call fails, and none is lost or repeated.
func TestResets(t *testing.T) {
	timing := quick
	timing.Heartbeat, timing.LostAfter = 5*time.Second, 20*time.Second // the heartbeat is a part of the time to connect again
	ss, r := joinOverRelay(t, 4, timing)
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		for range 25 {
			links := make([]int, len(ss))
			for i, s := range ss[1:] {
				links[i] = s.k.stream.generation()
			}
			r.reset()
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) // any moment is good
			r.reset()
			for i, s := range ss[1:] {
				for s.k.stream.generation() == links[i] && s.Context().Err() == nil {
					time.Sleep(time.Millisecond)
				}
			}
		}
	}()
	calls := count(t, ss, stop)
	sum, err := ss[1].Add(t.Context(), "sum", 0)
	require.NoError(t, err)
	require.Equal(t, calls, sum)
	for _, s := range ss[1:] {
		require.Greater(t, s.k.stream.generation(), 1)
		require.NoError(t, s.Context().Err())
	}
	require.NoError(t, every(ss, func(s *Session) error { return s.Shutdown(t.Context()) }))
}

// TestOutage cuts a job off for 80 % of the time limit. The old connections never work again.
func TestOutage(t *testing.T) {
	t.Parallel()
	timing := quick
	timing.LostAfter = 10 * time.Second // a busy machine needs some of the last fifth
	ss, r := joinOverRelay(t, 4, timing)
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		r.freeze()
		time.Sleep(timing.LostAfter * 8 / 10)
		r.thaw()
		time.Sleep(timing.LostAfter / 2) // any loss would be seen now
	}()
	calls := count(t, ss, stop)
	sum, err := ss[1].Add(t.Context(), "sum", 0)
	require.NoError(t, err)
	require.Equal(t, calls, sum)
	for _, s := range ss {
		require.NoError(t, s.Context().Err())
	}
}

// TestLongOutage cuts a job off for good.
func TestLongOutage(t *testing.T) {
	t.Parallel()
	ss, r := joinOverRelay(t, 3, quick)
	r.freeze()
	for i, s := range ss {
		lost := requireCause[*MemberLostError](t, s.Context())
		require.Contains(t, lost.Reason, "silent for 2s: stopped, starved or unreachable")
		require.Equal(t, i > 0, lost.Rank == 0, "rank %d blames rank %d", i, lost.Rank)
	}
}

// TestKilledCoordinator is noticed because its port is closed, not because it is silent.
func TestKilledCoordinator(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	cmd, _ := spawn(t, "wait", "RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port,
		"CHORUS_JOB=killed", "CHORUS_HOST=a", "CHORUS_INSECURE=yes", "CHORUS_LOST_AFTER=20s")
	s, err := Join(t.Context(), &JoinConfig{Job: "killed", Size: 2, Rank: new(1), Addr: addr, Insecure: true, Timing: quick})
	require.NoError(t, err)
	defer s.Close()
	require.NoError(t, cmd.Process.Kill())
	begin := time.Now()
	lost := requireCause[*MemberLostError](t, s.Context())
	require.Equal(t, []any{0, "a", "the coordinator's connection closed: its process ended"}, []any{lost.Rank, lost.Host, lost.Reason})
	require.Less(t, time.Since(begin), 10*time.Second, "half of the time limit for silence")
}

// TestAwaitLink judges how the end of a connection is told from the end of its process.
func TestAwaitLink(t *testing.T) {
	reset := errors.New("connection reset by peer")
	for name, tc := range map[string]struct {
		err   error
		event string
		took  time.Duration
	}{
		"closed":            {io.EOF, "", resumeGrace},
		"reset":             {reset, "", resumeGrace + 500*time.Millisecond},
		"its launcher says": {io.EOF, "exit", 10 * time.Millisecond},
		"left":              {io.EOF, "leave", 0},
		"silent":            {os.ErrDeadlineExceeded, "", 0},
		"silent at last":    {reset, "expire", 10 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j, agent, worker := judged()
				j.cfg.self = welcome{Heartbeat: 500 * time.Millisecond, LostAfter: 3 * time.Second}
				s, of := j.served()
				p := of(worker(1))
				a, b := net.Pipe()
				defer a.Close()
				defer b.Close()
				p.reading = &link{c: a}
				if tc.event == "leave" {
					p.peer.state = peerGone
				}
				begin := time.Now()
				time.AfterFunc(10*time.Millisecond, func() {
					switch tc.event {
					case "exit":
						m, err := note(kindExit, Exit{Rank: 1, PID: 101, Code: 9}).decode()
						require.NoError(t, err)
						require.NoError(t, s.happen(received{agent, m}))
					case "expire":
						p.expire()
					}
				})
				_, err := s.awaitLink(p, tc.err)
				require.Error(t, err)
				require.Equal(t, tc.took, time.Since(begin))
				time.Sleep(time.Second)
			})
		})
	}
}

// TestResumeNeedsTheStream refuses members of the job that do not know the stream's id, or
// have it and only a worker's credential.
func TestResumeNeedsTheStream(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 2, 1)...)
	require.NoError(t, errors.Join(errs...))
	worker, err := as[0].keys.control.forWorkers(as[0].promise().Run)
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		key credential
		id  string
	}{
		"unknown id":         {as[0].keys.control, newUUID()},
		"worker as an agent": {worker, as[1].k.hello.Stream},
	} {
		l, _ := target{job: as[0].Job(), addr: as[0].addr, key: tc.key}.persist(t)
		defer l.close()
		k := &client{stream: newStream(nil, newRunClock(time.Second), 0), hello: welcome{Stream: tc.id}, to: target{job: "j"}}
		_, err := k.resume(l, time.Minute)
		var r *RefusedError
		require.ErrorAs(t, err, &r, name)
		require.Contains(t, r.Reason, "not a member of the job any more")
	}
	require.NoError(t, as[1].Context().Err())
	require.Equal(t, 1, as[1].k.stream.generation())
}

// TestBackpressure fills the queue of a stream that nobody reads: send waits for space.
func TestBackpressure(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	s := newStream(&link{c: a}, newRunClock(time.Second), time.Minute)
	big := message{kind: kindCall, body: make([]byte, MaxValueBytes-messageBytes)}
	for range maxUnackedBytes / big.cost() {
		require.NoError(t, s.sendWait(big))
	}
	sent := make(chan error, 1)
	go func() { sent <- s.sendWait(big) }()
	select {
	case <-sent:
		require.FailNow(t, "did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	fresh, err := s.accept(frame{ack: 1})
	require.NoError(t, err)
	require.True(t, fresh)
	require.NoError(t, <-sent)
	s.send(big) // a peer that does not read is lost
	require.True(t, s.isClosed())
	require.ErrorIs(t, s.sendWait(message{}), errStreamClosed)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { s.flush(time.Hour); cancel() }()
	<-ctx.Done()
	require.ErrorIs(t, ctx.Err(), context.Canceled, "nothing to wait for")
}
