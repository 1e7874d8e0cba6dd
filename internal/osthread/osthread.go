// Package osthread tells goroutines apart, has sets of OS threads, and runs the parts of a
// short job concurrently on threads that poll for work. Handing a part to a goroutine that
// sleeps on a dedicated thread takes tens of microseconds, more than many driver calls;
// handing it to a polling thread takes a fifth of a microsecond.
package osthread

import (
	"sync"
	"sync/atomic"
	"syscall"
)

// ID returns a number for the calling goroutine that no other goroutine has while it
// lives. The system's number of the thread would take a call of the system, and belongs
// to the goroutine only while that is locked to its thread.
func ID() uintptr

// Threads is a set of OS threads. The goroutines that enter it are locked to their threads.
type Threads struct {
	count atomic.Int32 // their number, readable without a lock
	ids   sync.Map
}

// Enter adds the calling OS thread to the set, until leave.
func (t *Threads) Enter() (leave func()) {
	tid := syscall.Gettid()
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
	_, ok := t.ids.Load(syscall.Gettid())
	return ok
}
