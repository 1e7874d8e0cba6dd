// Package crew lets threads that wait for work by looking for it do the parts of a short
// job at the same time. To hand a part to a goroutine that sleeps on a thread of its own
// takes tens of microseconds, which is more than many calls of the driver; to one that
// looks, a fifth of one.
package crew

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A Job is work of several parts.
type Job interface {
	// Do does part i, on any thread, at the same time as the others.
	Do(i int)
}

// A Crew has threads that look for work for a while after they had some, and then sleep.
// The zero value has none yet. Its methods may be called at any time.
type Crew struct {
	// Patience is how long a thread looks for more work. 0 is never: Try does nothing.
	Patience time.Duration

	over    atomic.Bool
	mu      sync.Mutex // held by a job
	workers []*worker
	job     Job
	left    atomic.Int32   // parts that are not done
	done    sync.WaitGroup // the same, to sleep for
}

// The states of a worker.
const (
	asleep int32 = iota
	looking
	claimed // by a job, which is about to come or is being done
)

type worker struct {
	crew  *Crew
	part  int // of every job
	state atomic.Int32
	given atomic.Bool // the crew's job is there
	wake  chan struct{}
}

// Try does the n parts of a job at once, the first on the caller's goroutine, and returns
// when all are done. It does nothing and returns false where that would not be fast: while
// another job is under way, where the program may not use twice as many processors as
// there are parts, or when a thread sleeps; it wakes that for the next time.
func (c *Crew) Try(n int, job Job) bool {
	if c.Patience <= 0 || n < 2 || runtime.GOMAXPROCS(0) < 2*n || !c.mu.TryLock() {
		return false
	}
	defer c.mu.Unlock()
	if c.over.Load() || !c.claim(n-1) {
		return false
	}
	c.job = job
	c.left.Store(int32(n - 1))
	c.done.Add(n - 1)
	for _, w := range c.workers[:n-1] {
		w.given.Store(true)
	}
	defer c.await() // also when the first part panics
	job.Do(0)
	return true
}

// await waits until all parts are done.
func (c *Crew) await() {
	for range spins {
		if c.left.Load() == 0 {
			break
		}
	}
	c.done.Wait()
	c.job = nil
}

// Sleep sends the threads to sleep; the crew is of no more use.
func (c *Crew) Sleep() {
	c.over.Store(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.workers {
		close(w.wake)
	}
}

// spins is how often the caller looks whether the others are done before it sleeps: tens
// of microseconds.
const spins = 1 << 15

// claim keeps n workers from going to sleep, or wakes those that have.
func (c *Crew) claim(n int) bool {
	for len(c.workers) < n {
		w := &worker{crew: c, part: len(c.workers) + 1, wake: make(chan struct{}, 1)}
		c.workers = append(c.workers, w)
		go w.work()
	}
	all := true
	for _, w := range c.workers[:n] {
		if w.state.CompareAndSwap(asleep, looking) {
			w.wake <- struct{}{}
			all = false
		}
	}
	if !all {
		return false
	}
	for i, w := range c.workers[:n] {
		if !w.state.CompareAndSwap(looking, claimed) { // it has gone to sleep just now
			for _, w := range c.workers[:i] {
				w.state.Store(looking)
			}
			return false
		}
	}
	return true
}

// work is the worker's goroutine.
func (w *worker) work() {
	runtime.LockOSThread()
	for range w.wake {
		w.look()
	}
}

// look does what comes until nothing has for a while.
func (w *worker) look() {
	since := time.Now()
	for i := 0; ; i++ {
		if w.given.Load() {
			w.given.Store(false)
			w.crew.job.Do(w.part)
			w.state.Store(looking)
			w.crew.left.Add(-1)
			w.crew.done.Done()
			since = time.Now()
		}
		if i%64 == 0 && (w.crew.over.Load() || time.Since(since) > w.crew.Patience) && w.state.CompareAndSwap(looking, asleep) {
			return
		}
	}
}
