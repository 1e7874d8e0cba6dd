package cluster

import (
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A silent is a connection that reports its end.
type silent struct {
	net.Conn
	open *atomic.Int64
}

func (s *silent) Close() error { s.open.Add(-1); return nil }

// TestLimitOfStrangers admits more connections than the limiter permits. The oldest one is
// closed, but not before it had time for its handshake.
func TestLimitOfStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newConnLimiter(maxStrangers)
		var open atomic.Int64
		enter := func() *silent {
			open.Add(1)
			s := &silent{open: &open}
			g.enter(s)
			return s
		}
		begin := time.Now()
		first := enter()
		for range maxStrangers - 1 {
			enter()
		}
		require.Zero(t, time.Since(begin), "there is room")
		require.EqualValues(t, maxStrangers, open.Load())
		for range 3 * maxStrangers {
			enter()
			require.EqualValues(t, maxStrangers, open.Load())
		}
		require.Equal(t, 3*minConnectionTime, time.Since(begin), "each had its minimum time")
		g.leave(first) // it was closed before
		require.Len(t, g.inside, maxStrangers)

		last, done := enter(), make(chan time.Time)
		begin = time.Now()
		time.Sleep(minConnectionTime / 2)
		go func() { enter(); done <- time.Now() }()
		synctest.Wait()
		g.leave(g.inside[0].c) // a handshake ends, and its place is free at once
		require.Equal(t, minConnectionTime/2, (<-done).Sub(begin))
		require.Contains(t, g.inside, stranger{last, begin})
		g.clear()
		require.Empty(t, g.inside)
	})
}

// A connection that has left while there was room does not cut the time of a later one.
func TestLimiterForgetsWhoHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newConnLimiter(2)
		var open atomic.Int64
		enter := func() *silent {
			open.Add(1)
			s := &silent{open: &open}
			g.enter(s)
			return s
		}
		g.leave(enter())
		begin := time.Now()
		enter()
		enter()
		enter()
		require.Equal(t, minConnectionTime, time.Since(begin))
	})
}
