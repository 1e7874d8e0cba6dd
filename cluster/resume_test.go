package cluster

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
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
				links[i] = s.k.Stream.Generation()
			}
			r.reset()
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) // any moment is good
			r.reset()
			for i, s := range ss[1:] {
				for s.k.Stream.Generation() == links[i] && s.Context().Err() == nil {
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
		require.Greater(t, s.k.Stream.Generation(), 1)
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
		"CHORUS_JOB=killed", "CHORUS_HOST=a", "CHORUS_INSECURE=yes", "CHORUS_LOST_AFTER=60s")
	s, err := Join(t.Context(), &JoinConfig{Job: "killed", Size: 2, Rank: new(1), Addr: addr, Insecure: true, Timing: quick})
	require.NoError(t, err)
	defer s.Close()
	require.NoError(t, cmd.Process.Kill())
	begin := time.Now()
	lost := requireCause[*MemberLostError](t, s.Context())
	require.Equal(t, []any{0, "a", "the coordinator's connection closed: its process ended"}, []any{lost.Rank, lost.Host, lost.Reason})
	require.Less(t, time.Since(begin), 30*time.Second, "half of the time limit for silence")
}
