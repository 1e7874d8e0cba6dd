package testhost

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Goroutines of a bubble run its timers at the same time. Without Bubble, that crashes the race detector within a second.
func TestManyTimersInABubble(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	Bubble(t, func(t *testing.T) {
		var all sync.WaitGroup
		for range 16 {
			all.Go(func() {
				for range 4000 {
					timer := time.NewTimer(0)
					<-timer.C
					timer.Reset(0)
					<-timer.C
				}
			})
		}
		all.Wait()
	})
	require.Equal(t, before, runtime.GOMAXPROCS(0))
}
