package spin

import (
	"sync"
	"testing"

	"github.com/gochorus/chorus/stream"
)

// Hold blocks a stream after the operations enqueued so far, until open is called
// or the test ends.
func Hold(t testing.TB, s *stream.Stream) (open func()) {
	t.Helper()
	gate := make(chan struct{})
	if err := s.Callback(func() { <-gate }); err != nil {
		t.Fatal(err)
	}
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	return open
}
