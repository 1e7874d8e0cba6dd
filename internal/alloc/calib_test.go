package alloc

import (
	"sync"
	"testing"
)

func BenchmarkCalib(b *testing.B) {
	var mu sync.Mutex
	for range b.N {
		mu.Lock()
		mu.Unlock()
	}
}
