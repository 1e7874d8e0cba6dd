// Package osthread tells goroutines apart, has sets of OS threads, and runs the parts of a
// short job concurrently on threads that poll for work. Handing a part to a goroutine that
// sleeps on a dedicated thread takes tens of microseconds, more than many driver calls;
// handing it to a polling thread takes a fifth of a microsecond.
package osthread

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// ID returns a number for the calling goroutine that no other goroutine has while it
// lives. The number of its thread belongs to the goroutine only while that is locked to the thread.
func ID() uintptr

// Threads is a set of OS threads. The goroutines that enter it are locked to their threads.
type Threads struct {
	count atomic.Int32 // their number, readable without a lock
	ids   sync.Map
}

// Enter adds the calling OS thread to the set, until leave.
func (t *Threads) Enter() (leave func()) {
	tid := Thread()
	t.ids.Store(tid, true)
	t.count.Add(1)
	return func() {
		t.count.Add(-1)
		t.ids.Delete(tid)
	}
}

// Has reports whether the set has the calling OS thread. It costs almost nothing while the set
// is empty.
func (t *Threads) Has() bool {
	if t.count.Load() == 0 {
		return false
	}
	_, ok := t.ids.Load(Thread())
	return ok
}

// A Job is work with several parts.
type Job interface {
	// Do runs part i, on any thread, concurrently with the other parts.
	Do(i int)
}

// Launchers is the pool that enqueues the operations of several ranks concurrently: a single
// thread would take eight times as long for eight ranks as for one. Package nccl configures
// it. Tests replace it.
var Launchers = new(Pool)

// A Pool has threads that poll for a while after each job, and then sleep. The
// zero value is ready to use. Methods are safe for concurrent use.
type Pool struct {
	// PollTime is the time that a thread polls for more work. With 0, Try does nothing.
	PollTime time.Duration

	closed  atomic.Bool
	mu      sync.Mutex // held during a job
	workers []*worker
	job     Job
	pending atomic.Int32   // unfinished parts
	done    sync.WaitGroup // the same, for a wait that sleeps
}

// The states of a worker.
const (
	asleep int32 = iota
	polling
	claimed // by a job that starts or runs
)

type worker struct {
	pool  *Pool
	part  int // index of its part in every job
	state atomic.Int32
	given atomic.Bool // the pool's job is ready
	wake  chan struct{}
}

// Try runs the n parts of a job concurrently, the first on the caller's
// goroutine, and returns when all are done. It does nothing and returns false if
// that would be slow: if another job is running, if the program may use fewer
// than twice as many processors as there are parts, or if a thread sleeps. It
// wakes sleeping threads for the next call.
func (p *Pool) Try(n int, job Job) bool {
	if p.PollTime <= 0 || n < 2 || runtime.GOMAXPROCS(0) < 2*n || !p.mu.TryLock() {
		return false
	}
	defer p.mu.Unlock()
	if p.closed.Load() || !p.claim(n-1) {
		return false
	}
	p.job = job
	p.pending.Store(int32(n - 1))
	p.done.Add(n - 1)
	for _, w := range p.workers[:n-1] {
		w.given.Store(true)
	}
	defer p.await() // also when the first part panics
	job.Do(0)
	return true
}

// await waits until all parts are done.
func (p *Pool) await() {
	for range spins {
		if p.pending.Load() == 0 {
			break
		}
	}
	p.done.Wait()
	p.job = nil
}

// Close ends the threads. The pool cannot be used again.
func (p *Pool) Close() {
	p.closed.Store(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.workers {
		close(w.wake)
	}
}

// spins is the number of polls of the caller before it sleeps, which take tens of
// microseconds.
const spins = 1 << 15

// claim reserves n polling workers. It wakes sleeping workers and then returns false.
func (p *Pool) claim(n int) bool {
	for len(p.workers) < n {
		w := &worker{pool: p, part: len(p.workers) + 1, wake: make(chan struct{}, 1)}
		p.workers = append(p.workers, w)
		go w.work()
	}
	all := true
	for _, w := range p.workers[:n] {
		if w.state.CompareAndSwap(asleep, polling) {
			w.wake <- struct{}{}
			all = false
		}
	}
	if !all {
		return false
	}
	for i, w := range p.workers[:n] {
		if !w.state.CompareAndSwap(polling, claimed) { // it just went to sleep
			for _, w := range p.workers[:i] {
				w.state.Store(polling)
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
		w.poll()
	}
}

// poll runs jobs until none has arrived for a while.
func (w *worker) poll() {
	since := time.Now()
	for i := 0; ; i++ {
		if w.given.Load() {
			w.given.Store(false)
			w.pool.job.Do(w.part)
			w.state.Store(polling)
			w.pool.pending.Add(-1)
			w.pool.done.Done()
			since = time.Now()
		}
		if i%64 == 0 && (w.pool.closed.Load() || time.Since(since) > w.pool.PollTime) && w.state.CompareAndSwap(polling, asleep) {
			return
		}
	}
}
