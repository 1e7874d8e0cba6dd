package collective

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The recorder's clock is compared with the system's, by the counter and without.
func TestClock(t *testing.T) {
	t.Cleanup(SetClock)
	for nanotime()-originNanos < minElapsed {
	}
	agree := func(within int64) {
		for range 1000 {
			before, at, after := nanotime()-originNanos, Now(), nanotime()-originNanos
			require.GreaterOrEqual(t, at, before-within)
			require.LessOrEqual(t, at, after+within)
		}
	}
	tick.Store(0)
	agree(0)
	for !unsteady.Load() && tick.Load() == 0 {
		SetClock()
	}
	agree(int64(time.Millisecond))
	require.WithinDuration(t, time.Now(), Moment(Now()), time.Second)
	require.True(t, Moment(0).IsZero())
}

// A counter that has become another one than it was is not gone by any more.
func TestClockAfterTheMachineHasSlept(t *testing.T) {
	if unsteady.Load() {
		t.Skip("the system does not keep time by the processor's counter")
	}
	t.Cleanup(func() { unsteady.Store(false); tick.Store(0); SetClock() })
	tick.Store(0)
	for tick.Load() == 0 {
		SetClock()
	}
	tick.Store(tick.Load() * 3)
	for i := 0; i < 1000 && !unsteady.Load(); i++ {
		SetClock()
	}
	require.True(t, unsteady.Load())
	require.Zero(t, tick.Load())
	require.LessOrEqual(t, Now(), nanotime()-originNanos)
}

func TestLasted(t *testing.T) {
	require.EqualValues(t, 1<<40, nanosOf(1<<41, 1<<31), "half a nanosecond each")
	const year, third = 365 * 24 * 3600 * 3_000_000_000, (1 << 32) / 3
	require.InEpsilon(t, 365*24*3600e9, float64(nanosOf(year, third)), 1e-8)
	require.InEpsilon(t, 365*24*3600e9, float64(nanosOf(365*24*3600*24_000_000, (1<<32)*125/3)), 1e-8, "a counter of 24 MHz")
}

// No goroutine reads what is before another one's time, on whatever processors they run, but
// for what the clock is set by meanwhile.
func TestClockOfManyGoroutines(t *testing.T) {
	SetClock()
	var mu sync.Mutex
	var last int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 2000 {
				mu.Lock()
				at := Now()
				if at < last-int64(50*time.Microsecond) {
					t.Errorf("%d ns come after %d", at, last)
				}
				last = at
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func TestKeepsTime(t *testing.T) {
	file := filepath.Join(t.TempDir(), "source")
	require.False(t, keepsTime(file))
	for source, want := range map[string]bool{"tsc\n": true, "arch_sys_counter\n": true, "kvm-clock\n": false, "": false} {
		require.NoError(t, os.WriteFile(file, []byte(source), 0o600))
		require.Equal(t, want, keepsTime(file), source)
	}
}
