package job

import (
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// silence lets a clock of the default time limits tick until a stream is too silent, and returns how
// long that takes. At the given times since the last byte, the process is starved.
func silence(limit time.Duration, starved map[time.Duration]time.Duration) time.Duration {
	w := Welcome{Heartbeat: 500 * time.Millisecond, LostAfter: limit}
	clock := NewRunClock(w.step())
	s := NewStream(nil, clock, limit)
	for begun := time.Now(); ; {
		pause := w.step()
		for at, d := range starved {
			if time.Since(begun) >= at {
				pause = d
				delete(starved, at)
			}
		}
		time.Sleep(pause)
		clock.tick()
		if s.isTooSilent(limit) {
			return time.Since(begun)
		}
	}
}

// Silence ends a stream soon after the limit if this process runs on schedule. Otherwise this process
// waits longer, by more than the time in which it was starved.
func TestSilence(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		const limit = 3 * time.Second
		exact := silence(limit, nil)
		require.Greater(t, exact, limit+limit/32)
		require.LessOrEqual(t, exact, limit+limit/15)

		const pause = 200 * time.Millisecond
		once := silence(limit, map[time.Duration]time.Duration{time.Second: pause})
		require.Greater(t, once, exact+pause+pause/4, "the clock stands still, and the limit grows as much again")
		require.LessOrEqual(t, once, exact+2*pause)

		long := silence(limit, map[time.Duration]time.Duration{time.Second: time.Minute})
		require.Greater(t, long, time.Minute+limit-time.Second/10)
		require.LessOrEqual(t, long, time.Minute+limit+ExtraSilence(limit)+time.Second/10, "the extra time is limited")
	})
}
