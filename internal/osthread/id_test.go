package osthread

import (
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Goroutines that live at the same time have different numbers, and keep them.
func TestID(t *testing.T) {
	const n = 100
	var ids sync.Map
	var ready, done sync.WaitGroup
	ready.Add(n)
	for range n {
		done.Go(func() {
			id := ID()
			_, taken := ids.LoadOrStore(id, true)
			ready.Done()
			ready.Wait()
			if taken || id == 0 || id != ID() {
				t.Errorf("goroutine %#x: taken %v, now %#x", id, taken, ID())
			}
		})
	}
	done.Wait()
	require.Equal(t, ID(), ID())
}

// Threads that live at the same time have different numbers, and each keeps its number, whatever goroutine runs on it.
func TestThread(t *testing.T) {
	const n = 50
	var numbers sync.Map // by the system's number of the thread
	var taken sync.Map
	var ready, done sync.WaitGroup
	ready.Add(n)
	for range n {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			numbers.Store(syscall.Gettid(), Thread())
			_, other := taken.LoadOrStore(Thread(), true)
			ready.Done()
			ready.Wait()
			if other || Thread() == 0 {
				t.Errorf("thread %#x: taken %v", Thread(), other)
			}
		})
	}
	done.Wait()
	again := 0
	for range 10 * n {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if is, known := numbers.Load(syscall.Gettid()); known {
				again++
				if is != Thread() {
					t.Errorf("a thread was %#x and is %#x", is, Thread())
				}
			}
		})
		done.Wait()
	}
	require.Positive(t, again)
}
