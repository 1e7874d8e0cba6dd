package osthread

import (
	"sync"
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
