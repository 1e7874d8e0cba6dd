package spin

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/stream"
)

// Hold keeps a stream busy from what was enqueued so far until open is called, or
// the test ends.
func Hold(t testing.TB, s *stream.Stream) (open func()) {
	t.Helper()
	gate := make(chan struct{})
	require.NoError(t, s.Callback(func() { <-gate }))
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	return open
}
