package testhost

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

// bubbles counts the bubbles that run with the race detector, and keeps how many processors the program had before them.
var bubbles struct {
	sync.Mutex
	running, processors int
}

// Bubble is [synctest.Test], which runs f in a bubble with virtual time. With the race detector, the program has one
// processor meanwhile: two goroutines that run timers of one bubble at the same time crash the detector
// (golang/go#78156). Races are found as before, because the detector compares what happens before what, not times.
func Bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	if On {
		bubbles.Lock()
		if bubbles.running++; bubbles.running == 1 {
			bubbles.processors = runtime.GOMAXPROCS(1)
		}
		bubbles.Unlock()
		defer func() {
			bubbles.Lock()
			if bubbles.running--; bubbles.running == 0 {
				runtime.GOMAXPROCS(bubbles.processors)
			}
			bubbles.Unlock()
		}()
	}
	synctest.Test(t, f)
}
