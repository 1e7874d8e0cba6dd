package nccl

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
	t.Cleanup(setClock)
	for nanotime()-originNanos < soonest {
	}
	agree := func(within time.Duration) {
		for range 1000 {
			before, at, after := time.Since(origin), time.Duration(now()), time.Since(origin)
			require.GreaterOrEqual(t, at, before-within)
			require.LessOrEqual(t, at, after+within)
		}
	}
	tick.Store(0)
	agree(time.Microsecond)
	if setClock(); steady {
		require.NotZero(t, tick.Load())
	}
	agree(time.Since(origin)/1000 + 100*time.Microsecond)
	require.WithinDuration(t, time.Now(), moment(now()), time.Second)
	require.True(t, moment(0).IsZero())
}

// No goroutine reads what is before another one's time, on whatever processors they run, but
// for what the clock is set by meanwhile.
func TestClockOfManyGoroutines(t *testing.T) {
	setClock()
	var mu sync.Mutex
	var last int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 2000 {
				mu.Lock()
				at := now()
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
