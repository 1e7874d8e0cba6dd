package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// quick is a timing for tests that lose members; brisk enough to wait for and
// slow enough for two busy cores under the race detector.
var quick = Timing{Join: 90 * time.Second, Call: 90 * time.Second, Heartbeat: 50 * time.Millisecond, LostAfter: 2 * time.Second}

var testSecret = []byte("a secret of 32 bytes for testing")

// joinWorld joins n sessions of one job in this process; rank 0 coordinates.
func joinWorld(t *testing.T, n int, change func(rank int, c *JoinConfig)) []*Session {
	t.Helper()
	addr := freeAddr(t)
	out := make([]*Session, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			c := &JoinConfig{Job: t.Name(), Size: n, Rank: new(r), Addr: addr, Serve: r == 0,
				Secret: testSecret, Host: "h", Timing: quick, Notify: func(string) {}}
			if change != nil {
				change(r, c)
			}
			out[r], errs[r] = Join(t.Context(), c)
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		for _, s := range out[1:] {
			s.Close()
		}
		out[0].Close()
	})
	return out
}

// freeAddr returns an address that nobody listens on; the port stays reserved
// until the test ends.
func freeAddr(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", testhost.Reserve(t))
}

// every runs f once per session at the same time.
func every(ss []*Session, f func(s *Session) error) error {
	errs := make([]error, len(ss))
	var wg sync.WaitGroup
	for i, s := range ss {
		wg.Go(func() { errs[i] = f(s) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func TestSessionPlace(t *testing.T) {
	ss := joinWorld(t, 3, nil)
	for r, s := range ss {
		require.Equal(t, r, s.Rank())
		require.Equal(t, 3, s.Size())
		require.Equal(t, r, s.LocalRank())
		require.Equal(t, 3, s.LocalSize())
		require.Equal(t, 0, s.Node())
		require.Equal(t, "h", s.Host())
		require.Equal(t, t.Name(), s.Job())
		require.Len(t, s.Members(), 3)
	}
}

func TestSessionStore(t *testing.T) {
	ss := joinWorld(t, 3, nil)
	ctx := t.Context()

	got := make(chan string, 1)
	go func() {
		b, err := ss[2].Get(ctx, "late")
		got <- fmt.Sprint(string(b), err)
	}()
	require.NoError(t, ss[1].Set(ctx, "late", []byte("value")))
	require.Equal(t, "value<nil>", <-got)

	require.NoError(t, every(ss, func(s *Session) error {
		for range 50 {
			if _, err := s.Add(ctx, "sum", 2); err != nil {
				return err
			}
		}
		return nil
	}))
	n, err := ss[0].Add(ctx, "sum", 0)
	require.NoError(t, err)
	require.EqualValues(t, 300, n)
	b, err := ss[1].Get(ctx, "sum")
	require.NoError(t, err)
	require.Equal(t, "300", string(b))

	require.NoError(t, every(ss, func(s *Session) error {
		mine := s.Prefix(fmt.Sprint(s.Rank()))
		if _, err := s.Append(ctx, "log", []byte("x")); err != nil {
			return err
		}
		return mine.SetAll(ctx, map[string][]byte{"a": {1}, "b": {2, byte(s.Rank())}})
	}))
	all, err := ss[1].GetAll(ctx, "2/b", "log", "0/b")
	require.NoError(t, err)
	require.Equal(t, [][]byte{{2, 2}, []byte("xxx"), {2, 0}}, all)
	has, err := ss[2].Has(ctx, "1/a", "1/c")
	require.NoError(t, err)
	require.False(t, has)
	keys, err := ss[0].NumKeys(ctx)
	require.NoError(t, err)
	require.Equal(t, 9, keys)

	var mu sync.Mutex
	winners := 0
	require.NoError(t, every(ss, func(s *Session) error {
		ok, err := s.CompareAndSwap(ctx, "lock", nil, []byte{byte(s.Rank())})
		mu.Lock()
		defer mu.Unlock()
		if ok {
			winners++
		}
		return err
	}))
	require.Equal(t, 1, winners)

	require.NoError(t, ss[0].Set(ctx, "empty", nil))
	b, err = ss[2].Get(ctx, "empty")
	require.NoError(t, err)
	require.Empty(t, b)
	ok, err := ss[1].Delete(ctx, "empty")
	require.NoError(t, err)
	require.True(t, ok)
	ok, err = ss[1].Delete(ctx, "empty")
	require.NoError(t, err)
	require.False(t, ok)

	waited := make(chan error, 1)
	go func() { waited <- ss[0].Wait(ctx, "a", "b") }()
	require.NoError(t, ss[1].Set(ctx, "a", nil))
	require.NoError(t, ss[2].Set(ctx, "b", nil))
	require.NoError(t, <-waited)
}

func TestSessionBarrier(t *testing.T) {
	ss := joinWorld(t, 3, nil)
	for range 3 { // a name may be used again
		require.NoError(t, every(ss, func(s *Session) error { return s.Barrier(t.Context(), "b") }))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := every(ss[:1], func(s *Session) error { return s.Barrier(ctx, "b") })
	var be *BarrierError
	require.ErrorAs(t, err, &be)
	require.Equal(t, []int{1, 2}, be.Missing)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Contains(t, err.Error(), `barrier "b" on rank 0: ranks 1, 2 missing`)
}

func TestSessionShutdown(t *testing.T) {
	ss := joinWorld(t, 3, nil)
	require.NoError(t, every(ss, func(s *Session) error { return s.Shutdown(t.Context()) }))
	for _, s := range ss {
		require.ErrorIs(t, context.Cause(s.Context()), ErrClosed)
		require.NoError(t, s.Close())
		require.NoError(t, s.Shutdown(t.Context()))
	}
}

// A job of one process has no coordinator, and its calls fail like those of other jobs when
// the session is closed.
func TestCloseOfAJobOfOneProcess(t *testing.T) {
	s, err := Join(t.Context(), nil)
	require.NoError(t, err)
	waits := make(chan error)
	go func() {
		_, err := s.Get(t.Context(), "never set")
		waits <- err
	}()
	require.NoError(t, s.Set(t.Context(), "key", nil))
	require.NoError(t, s.Close())
	require.ErrorIs(t, <-waits, ErrClosed)
	require.ErrorIs(t, s.Set(t.Context(), "key", nil), ErrClosed)
	require.ErrorIs(t, s.Barrier(t.Context(), "barrier"), ErrClosed)
	require.NoError(t, s.Shutdown(t.Context()))
}

// If the context of a call ends, the error has the cause of that, and still matches context.Canceled.
func TestCallsHaveTheCauseOfTheirContext(t *testing.T) {
	cause := errors.New("the program ends because of a signal")
	for _, n := range []int{1, 2} {
		for _, s := range joinWorld(t, n, nil) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(10*time.Millisecond, func() { cancel(cause) })
			_, err := s.Get(ctx, "a key that nobody sets")
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, cause)
			require.ErrorContains(t, err, "context canceled: the program ends because of a signal")

			ctx, late := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer late()
			_, err = s.Get(ctx, "a key that nobody sets")
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotContains(t, err.Error(), "exceeded: context")
		}
	}
}
