package poll

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

func TestUntilReady(t *testing.T) {
	n := 0
	require.NoError(t, Until(context.Background(), func() (bool, error) { n++; return n == 3, nil }))
	require.Equal(t, 3, n)
	boom := errors.New("boom")
	require.ErrorIs(t, Until(context.Background(), func() (bool, error) { return false, boom }), boom)
}

func TestUntilContextEnds(t *testing.T) {
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(why)
	asked := 0
	require.ErrorIs(t, Until(ctx, func() (bool, error) { asked++; return false, nil }), why)
	require.Equal(t, 1, asked, "what is ready already counts, even then")
	require.NoError(t, Until(ctx, func() (bool, error) { return true, nil }))
}

// A long wait asks rarely: about once a millisecond.
func TestUntilAsksEverMoreRarely(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		asked := 0
		start := time.Now()
		err := Until(ctx, func() (bool, error) {
			asked++
			// Time stands still in the bubble while this goroutine runs.
			time.Sleep(time.Microsecond)
			return false, nil
		})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))
		require.Less(t, asked, 1200)
	})
}

func TestUntilNoLaterThan(t *testing.T) {
	require.True(t, UntilNoLaterThan(time.Minute, func() bool { return true }))
	require.False(t, UntilNoLaterThan(time.Millisecond, func() bool { return false }))
}

// In virtual time no wait polls without a pause until what it waits for has slept.
func TestWaitsInVirtualTime(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var done atomic.Bool
		go func() {
			time.Sleep(spin / 2)
			done.Store(true)
		}()
		require.NoError(t, Until(ctx, func() (bool, error) { return done.Load(), nil }))
		require.NoError(t, Guard(ctx, func() error {
			time.Sleep(spin / 2)
			return nil
		}))
	})
}
