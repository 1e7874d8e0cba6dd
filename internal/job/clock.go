package job

import (
	"sync"
	"time"
)

// A runClock measures the time during which this process runs on schedule. It stands
// still while the process is suspended or starved, so that silence of other
// processes counts only while this process could have heard them.
type runClock struct {
	step time.Duration // interval between ticks
	sys  *System

	mu    sync.Mutex
	begin time.Time
	last  time.Duration // since begin, at the last tick
	ran   time.Duration // time on this clock at the last tick
}

// NewRunClock returns a clock whose owner calls tick every step.
func NewRunClock(step time.Duration) *runClock { return &runClock{step: step, begin: time.Now()} }

// tick advances the clock to the present, but only by one step if the tick is
// late by more than half a step.
func (c *runClock) tick() {
	c.sys.await()
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Since(c.begin)
	c.ran += c.sinceTick(now)
	c.last = now
}

// now returns the time on this clock.
func (c *runClock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ran + c.sinceTick(time.Since(c.begin))
}

// starved returns how much less time has passed on this clock than in the world.
func (c *runClock) starved() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Since(c.begin)
	return now - c.ran - c.sinceTick(now)
}

func (c *runClock) sinceTick(now time.Duration) time.Duration {
	if gap := now - c.last; gap <= c.step+c.step/2 {
		return gap
	}
	return c.step
}
