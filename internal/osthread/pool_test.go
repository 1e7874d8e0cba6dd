package osthread

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// parts counts how often each part was done, and how many were at the same time.
type parts struct {
	times  []atomic.Int32
	within sync.WaitGroup
}

// Do returns when all parts have begun.
func (p *parts) Do(i int) {
	p.times[i].Add(1)
	p.within.Done()
	p.within.Wait()
}

func processors(t *testing.T, n int) {
	before := runtime.GOMAXPROCS(n)
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
}

// newPool returns a pool whose threads poll for work until the test is over.
func newPool(t *testing.T) *Pool {
	c := &Pool{PollTime: time.Hour}
	t.Cleanup(func() {
		if !c.closed.Load() {
			c.Close()
		}
	})
	return c
}

// TestTry checks that every part of a job is done once, at the same time as the others,
// and that Try has waited for them.
func TestTry(t *testing.T) {
	processors(t, 16)
	c := newPool(t)
	for n := 2; n <= 4; n++ {
		for done := 0; done < 20; {
			p := &parts{times: make([]atomic.Int32, n)}
			p.within.Add(n)
			if !c.Try(n, p) {
				for i := range n {
					require.Zero(t, p.times[i].Load())
				}
				continue // the threads are being woken
			}
			done++
			for i := range n {
				require.EqualValues(t, 1, p.times[i].Load(), "part %d of %d", i, n)
			}
		}
	}
}

// slow has a part that takes longer than the caller looks for it.
type slow struct{ over bool }

func (s *slow) Do(i int) {
	if i == 1 {
		for range 1 << 15 {
			runtime.Gosched()
		}
		s.over = true
	}
}

// TestTryWaits checks that Try also waits for a part that takes long.
func TestTryWaits(t *testing.T) {
	processors(t, 4)
	c := newPool(t)
	s := &slow{}
	for !c.Try(2, s) {
	}
	require.True(t, s.over)
}

// TestOver checks that Sleep ends the threads, newPool as they may be.
func TestOver(t *testing.T) {
	processors(t, 8)
	before := runtime.NumGoroutine()
	c := newPool(t)
	for !c.Try(3, nothing{}) {
	}
	c.Close()
	for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; runtime.Gosched() {
		require.True(t, time.Now().Before(end), "threads are left")
	}
	require.False(t, c.Try(3, nothing{}))
}

// TestTryDeclines checks when nothing is done.
func TestTryDeclines(t *testing.T) {
	processors(t, 7)
	job := &parts{times: make([]atomic.Int32, 4)}
	require.False(t, (&Pool{}).Try(2, job), "without a time to poll")
	c := newPool(t)
	require.False(t, c.Try(1, job), "one part")
	require.False(t, c.Try(4, job), "four parts on seven processors")
	require.False(t, c.Try(3, job), "the threads sleep")
	c.mu.Lock()
	require.False(t, c.Try(3, job), "another job is under way")
	c.mu.Unlock()
	for i := range job.times {
		require.Zero(t, job.times[i].Load())
	}
}

// TestSleep checks that threads go to sleep, and that the next job but one finds them
// awake again.
func TestSleep(t *testing.T) {
	processors(t, 8)
	c := Pool{PollTime: time.Microsecond}
	count := func() bool {
		p := &parts{times: make([]atomic.Int32, 2)}
		p.within.Add(2)
		return c.Try(2, p)
	}
	count()
	require.Eventually(t, func() bool { return c.workers[0].state.Load() == asleep }, time.Minute, time.Microsecond)
	require.False(t, count())
	require.Eventually(t, count, time.Minute, time.Microsecond)
}

// TestManyCallers checks jobs of several goroutines at once: each is done as a whole or
// not at all.
func TestManyCallers(t *testing.T) {
	processors(t, 16)
	c := Pool{PollTime: 50 * time.Microsecond}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 100 {
				p := &parts{times: make([]atomic.Int32, 3)}
				p.within.Add(3)
				want := int32(0)
				if c.Try(3, p) {
					want = 1
				}
				for i := range p.times {
					if got := p.times[i].Load(); got != want {
						t.Errorf("part %d was done %d times: want %d", i, got, want)
					}
				}
			}
		})
	}
	all.Wait()
}

// TestAllocations checks that a job costs no memory. testing.AllocsPerRun would leave
// the program one processor, with which a pool does nothing.
func TestAllocations(t *testing.T) {
	processors(t, 4)
	c := newPool(t)
	var job Job = nothing{}
	for !c.Try(2, job) {
	}
	const jobs = 50
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range jobs {
		if !c.Try(2, job) {
			t.Fatal("the threads are awake, and it was not done")
		}
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.Mallocs-before.Mallocs, uint64(jobs), "the runtime may have some of its own")
}

type nothing struct{}

func (nothing) Do(int) {}

func BenchmarkTry(b *testing.B) {
	c := Pool{PollTime: time.Second}
	for !c.Try(2, nothing{}) {
		if runtime.GOMAXPROCS(0) < 4 {
			b.Skip("needs four processors")
		}
	}
	for b.Loop() {
		c.Try(2, nothing{})
	}
}
