package goroutine

import (
	"sync"
	"sync/atomic"
	"syscall"
)

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
