package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/testhost"
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
	big := make([]byte, job.MaxValueBytes)
	require.NoError(t, s.Set(ctx, strings.Repeat("k", job.MaxKeyBytes), big))
	var se *StoreError
	err := s.Set(ctx, strings.Repeat("k", job.MaxKeyBytes+1), nil)
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
	require.Equal(t, job.MaxStoreBytes/job.MaxValueBytes-1, n-0, "values that fit beside the first")
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
	testhost.Bubble(t, func(t *testing.T) {
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
	_, err = deep.Append(ctx, strings.Repeat("k", job.MaxKeyBytes-10), nil)
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

// The values of one call have a limit, which keeps its message small enough to send.
func TestLimitOfSeveralKeys(t *testing.T) {
	s := alone(t, Timing{})
	ctx := t.Context()
	big := make([]byte, job.MaxValueBytes)
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
	require.Len(t, v, job.MaxValueBytes)
	for _, c := range []job.Call{{Op: job.OpSetAll, Fields: [][]byte{[]byte("k")}}, {Op: job.OpHas, Fields: [][]byte{nil}}, {Op: 99}} {
		require.NotEqual(t, job.StatusOK, job.CheckCall(c))
	}
	require.Less(t, job.MaxCallBytes+64, job.MaxFrameBytes)
}
