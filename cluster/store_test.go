package cluster

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
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
	e := newEngine(2, new(atomic.Int64))
	nothing := func(call) {}
	e.do(ticket{0, 1}, call{op: opGet, fields: [][]byte{[]byte("k")}}, nothing)
	e.do(ticket{1, 1}, call{op: opWait, fields: [][]byte{[]byte("k"), []byte("l")}}, nothing)
	e.cancel(ticket{0, 1})
	e.dropRank(1)
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
	e := newEngine(3, new(atomic.Int64))
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
	e.dropRank(2)
	require.Equal(t, statusLeft, got[1].op)
	require.Equal(t, []int{2}, fieldRanks(got[0].fields))
	come(0, opFinish)
	require.Equal(t, statusLeft, got[0].op, "waits still")
	come(1, opFinish)
	require.Equal(t, statusOK, got[0].op, "who has left has come to the last barrier")
	require.Empty(t, e.barriers)
	require.Empty(t, e.waiting)
}

func TestStoreOfSeveralKeys(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	require.NoError(t, s.SetAll(ctx, map[string][]byte{"a": []byte("1"), "b": nil}))
	got, err := s.GetAll(ctx, "b", "a", "b")
	require.NoError(t, err)
	require.Equal(t, [][]byte{{}, []byte("1"), {}}, got)
	got[0] = append(got[0], 'x')
	require.Empty(t, got[2], "each result has its own memory")
	got, err = s.GetAll(ctx)
	require.NoError(t, err)
	require.Empty(t, got)
	n, err := s.Append(ctx, "a", []byte("23"))
	require.NoError(t, err)
	require.Equal(t, 3, n)
	n, err = s.Append(ctx, "new", nil)
	require.NoError(t, err)
	require.Zero(t, n)
	for want, keys := range map[bool][]string{true: {"a", "b", "new"}, false: {"a", "c"}} {
		has, err := s.Has(ctx, keys...)
		require.NoError(t, err)
		require.Equal(t, want, has, keys)
	}
	n, err = s.NumKeys(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	ends, cancel := context.WithCancel(ctx)
	cancel()
	_, err = s.GetAll(ends, "a", "c")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, `a and 1 more`)
}

func TestStorePrefix(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	deep := s.Prefix("model").Prefix("layer")
	require.NoError(t, deep.Set(ctx, "k", []byte("v")))
	v, err := s.Prefix("").Get(ctx, "model/layer/k")
	require.NoError(t, err)
	require.Equal(t, "v", string(v))
	require.NoError(t, s.Set(ctx, "k", []byte("other")))
	got, err := deep.GetAll(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, "v", string(got[0]))
	_, err = deep.Add(ctx, "k", 1)
	require.ErrorContains(t, err, "model/layer/k")
	_, err = deep.Append(ctx, strings.Repeat("k", MaxKeyBytes-10), nil)
	require.ErrorIs(t, err, ErrTooLarge)
}

// TestStoreRefusesEmptyKeys checks all calls, because torch's store loses the value of an empty key.
func TestStoreRefusesEmptyKeys(t *testing.T) {
	session := alone(t, Timing{})
	ctx := t.Context()
	for _, s := range []*Store{&session.view, session.Prefix("p")} {
		for name, fn := range map[string]func() error{
			"set":     func() error { return s.Set(ctx, "", nil) },
			"set all": func() error { return s.SetAll(ctx, map[string][]byte{"a": nil, "": nil}) },
			"append":  func() error { _, err := s.Append(ctx, "", nil); return err },
			"get":     func() error { _, err := s.Get(ctx, ""); return err },
			"get all": func() error { _, err := s.GetAll(ctx, "a", ""); return err },
			"wait":    func() error { return s.Wait(ctx, "") },
			"has":     func() error { _, err := s.Has(ctx, ""); return err },
			"add":     func() error { _, err := s.Add(ctx, "", 1); return err },
			"swap":    func() error { _, err := s.CompareAndSwap(ctx, "", nil, nil); return err },
			"delete":  func() error { _, err := s.Delete(ctx, ""); return err },
		} {
			require.ErrorIs(t, fn(), errNoKey, name)
		}
	}
	n, err := session.NumKeys(ctx)
	require.NoError(t, err)
	require.Zero(t, n)
	require.NoError(t, session.Barrier(ctx, ""))
}

// A waiting GetAll sees all values of a SetAll, or none.
func TestSetAllIsAtomic(t *testing.T) {
	e := newEngine(1, new(atomic.Int64))
	fields := func(s ...string) (f [][]byte) {
		for _, x := range s {
			f = append(f, []byte(x))
		}
		return f
	}
	for i := range 100 { // maps have a random order
		old, added := fmt.Sprint("old", i), fmt.Sprint("new", i)
		e.set(old, []byte("0"))
		var got call
		e.do(ticket{0, uint64(i)}, call{op: opGetAll, fields: fields(old, added)}, func(r call) { got = r })
		e.do(ticket{0, 1000}, call{op: opSetAll, fields: fields(old, "1", added, "1")}, func(r call) { require.Equal(t, statusOK, r.op) })
		require.Equal(t, fields("1", "1"), got.fields)
	}
	full := string(make([]byte, MaxValueBytes))
	for i := range MaxStoreBytes/MaxValueBytes - 1 {
		e.set(fmt.Sprint("full", i), []byte(full))
	}
	before := e.total()
	e.do(ticket{0, 1000}, call{op: opSetAll, fields: fields("x", full, "old0", "2")}, func(r call) { require.Equal(t, statusFull, r.op) })
	require.Equal(t, before, e.total())
	require.Equal(t, "1", string(e.values["old0"].b))
}

// The values of one call have a limit, which keeps its message small enough to send.
func TestLimitOfSeveralKeys(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	big := make([]byte, MaxValueBytes)
	require.NoError(t, s.SetAll(ctx, map[string][]byte{"a": big, "b": big}))
	require.ErrorIs(t, s.SetAll(ctx, map[string][]byte{"a": big, "b": big, "c": big}), ErrTooLarge)
	require.NoError(t, s.Set(ctx, "c", big))
	_, err := s.GetAll(ctx, "a", "b")
	require.NoError(t, err)
	_, err = s.GetAll(ctx, "a", "b", "c")
	require.ErrorIs(t, err, ErrTooLarge)
	_, err = s.Append(ctx, "a", []byte("x"))
	require.ErrorIs(t, err, ErrTooLarge)
	v, err := s.Get(ctx, "a")
	require.NoError(t, err)
	require.Len(t, v, MaxValueBytes)
	for _, c := range []call{{op: opSetAll, fields: [][]byte{[]byte("k")}}, {op: opHas, fields: [][]byte{nil}}, {op: 99}} {
		require.NotEqual(t, statusOK, checkCall(c))
	}
	require.Less(t, maxCallBytes+64, maxFrameBytes)
}
