package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// alone is a world of one, whose store is the same engine.
func alone(t *testing.T, timing Timing) *Session {
	t.Helper()
	s, err := Join(t.Context(), &JoinConfig{Timing: timing})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func TestWorldOfOne(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	require.Equal(t, []int{0, 1, 0, 1, 0}, []int{s.Rank(), s.Size(), s.LocalRank(), s.LocalSize(), s.Node()})
	require.NoError(t, s.Set(ctx, "k", []byte("v")))
	b, err := s.Get(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, "v", string(b))
	require.NoError(t, s.Barrier(ctx, "b"))
	require.NoError(t, s.Shutdown(ctx))
	require.ErrorIs(t, context.Cause(s.Context()), ErrClosed)
	var none *Session
	require.NoError(t, none.Close())
}

func TestStoreLimits(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	big := make([]byte, MaxValueBytes)
	require.NoError(t, s.Set(ctx, strings.Repeat("k", MaxKeyBytes), big))
	var se *StoreError
	err := s.Set(ctx, strings.Repeat("k", MaxKeyBytes+1), nil)
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorAs(t, err, &se)
	require.ErrorIs(t, s.Set(ctx, "k", append(big, 0)), ErrTooLarge)
	_, err = s.CompareAndSwap(ctx, "k", nil, append(big, 0))
	require.ErrorIs(t, err, ErrTooLarge)

	var full error
	n := 0
	for ; full == nil && n < 100; n++ {
		full = s.Set(ctx, fmt.Sprint(n), big)
	}
	require.ErrorIs(t, full, ErrStoreFull)
	require.Equal(t, MaxStoreBytes/MaxValueBytes-1, n-0, "values that fit beside the first")
	require.NoError(t, s.Set(ctx, "0", nil)) // smaller
	require.NoError(t, s.Set(ctx, "again", big[1000:]))
	for i := range n {
		_, err := s.Delete(ctx, fmt.Sprint(i))
		require.NoError(t, err)
	}
	require.NoError(t, s.Set(ctx, "room", big))
}

func TestStoreNumbers(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	require.NoError(t, s.Set(ctx, "text", []byte("x")))
	_, err := s.Add(ctx, "text", 1)
	require.ErrorIs(t, err, errNotNumber)
	n, err := s.Add(ctx, "n", -3)
	require.NoError(t, err)
	require.EqualValues(t, -3, n)
	_, err = s.Add(ctx, "n", -1<<63)
	require.ErrorIs(t, err, errNotNumber)
	require.NoError(t, s.Set(ctx, "m", []byte("40")))
	n, err = s.Add(ctx, "m", 2)
	require.NoError(t, err)
	require.EqualValues(t, 42, n)
}

func TestStoreCompareAndSwap(t *testing.T) {
	s := alone(t, Timing{})
	for _, tc := range []struct {
		old, next []byte
		ok        bool
	}{
		{[]byte{}, []byte("a"), false}, // absent is not empty
		{nil, []byte{}, true},
		{nil, []byte("a"), false},
		{[]byte{}, []byte("a"), true},
		{[]byte("b"), []byte("c"), false},
		{[]byte("a"), nil, true}, // deletes
		{nil, nil, true},
		{nil, []byte("z"), true},
	} {
		ok, err := s.CompareAndSwap(t.Context(), "k", tc.old, tc.next)
		require.NoError(t, err)
		require.Equal(t, tc.ok, ok, "%q to %q", tc.old, tc.next)
	}
}

// TestStoreDeadlines runs in virtual time: the default deadline is long.
func TestStoreDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := alone(t, Timing{Call: 2 * time.Minute})
		begin := time.Now()
		_, err := s.Get(t.Context(), "never")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 2*time.Minute, time.Since(begin))
		require.EqualError(t, err, `cluster: get "never" on rank 0: no process has set it: context deadline exceeded`)

		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		begin = time.Now()
		require.ErrorIs(t, s.Wait(ctx, "a", "b"), context.DeadlineExceeded)
		require.Equal(t, 5*time.Minute, time.Since(begin), "a caller's deadline may be longer")

		ctx, cancel = context.WithCancel(t.Context())
		go func() { time.Sleep(time.Second); cancel() }()
		_, err = s.Get(ctx, "never")
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestEngineForgets(t *testing.T) {
	e := newEngine(2)
	nothing := func(call) {}
	e.do(ticket{0, 1}, call{op: opGet, fields: [][]byte{[]byte("k")}}, nothing)
	e.do(ticket{1, 1}, call{op: opWait, fields: [][]byte{[]byte("k"), []byte("l")}}, nothing)
	e.cancel(ticket{0, 1})
	e.leave(1)
	require.Empty(t, e.waiting)
	require.Empty(t, e.byKey)

	// Bad shapes are refused, not guessed at.
	for _, c := range []call{{op: 0}, {op: 99}, {op: opSet}, {op: opGet, fields: [][]byte{nil}}, {op: opSet, fields: [][]byte{[]byte("k"), nil}}} {
		var got call
		e.do(ticket{0, 2}, c, func(r call) { got = r })
		require.Equal(t, statusBad, got.op)
	}
}

func TestEngineBarrier(t *testing.T) {
	e := newEngine(3)
	got := map[int]call{}
	come := func(rank int, op byte) {
		c := call{op: op}
		if op == opBarrier {
			c.fields = [][]byte{[]byte("b")}
		}
		e.do(ticket{rank, 1}, c, func(r call) { got[rank] = r })
	}
	come(0, opBarrier)
	e.do(ticket{0, 2}, call{op: opBarrier, fields: [][]byte{[]byte("b")}}, func(r call) { got[100] = r })
	require.Equal(t, statusBusy, got[100].op)
	e.cancel(ticket{0, 1})
	require.Equal(t, statusAbsent, got[0].op)
	require.Equal(t, []int{1, 2}, fieldRanks(got[0].fields))

	come(0, opBarrier) // it had not counted as come
	come(1, opBarrier)
	e.leave(2)
	require.Equal(t, statusLeft, got[1].op)
	require.Equal(t, []int{2}, fieldRanks(got[0].fields))
	come(0, opFinish)
	require.Equal(t, statusLeft, got[0].op, "waits still")
	come(1, opFinish)
	require.Equal(t, statusOK, got[0].op, "who has left has come to the last barrier")
	require.Empty(t, e.barriers)
	require.Empty(t, e.waiting)
}
