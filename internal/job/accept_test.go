package job

import (
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A fullListener accepts nothing at first.
type fullListener struct {
	net.Listener
	failures int
}

func (f *fullListener) Accept() (net.Conn, error) {
	if f.failures--; f.failures >= 0 {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	if f.failures == -1 {
		return &net.TCPConn{}, nil
	}
	return nil, net.ErrClosed
}

// freshAcceptLines lets a test, whose time is not the time of other tests, begin without earlier lines.
func freshAcceptLines(t *testing.T) {
	t.Helper()
	reset := func() {
		acceptLines.mu.Lock()
		defer acceptLines.mu.Unlock()
		acceptLines.last = time.Time{}
	}
	reset()
	t.Cleanup(reset)
}

// TestTooManyOpenFilesAtTwoPorts checks that a process says so once, and not once for each port.
func TestTooManyOpenFilesAtTwoPorts(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		freshAcceptLines(t)
		var lines atomic.Int32
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				acceptAll(&fullListener{failures: int(transientTime/acceptRetry) + 2}, func(string) { lines.Add(1) }, func(net.Conn) {})
			})
		}
		wg.Wait()
		require.EqualValues(t, 1, lines.Load())
	})
}

// The user learns after a second, and then every few seconds, that a process has too many open files. Connections are
// accepted when it has fewer.
func TestTooManyOpenFiles(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		freshAcceptLines(t)
		var lines []string
		taken := 0
		failures := int((transientTime+2*WaitLine)/acceptRetry) + 1
		begun := time.Now()
		acceptAll(&fullListener{failures: failures}, func(reason string) { lines = append(lines, reason) }, func(net.Conn) { taken++ })
		require.Equal(t, transientTime+2*WaitLine+acceptRetry, time.Since(begun))
		const want = "this process cannot accept connections: accept: too many open files; raise the limit on open files (ulimit -n)"
		require.Equal(t, []string{want, want, want}, lines)
		require.Equal(t, 1, taken)
	})
}

// TestFloodsGather counts how long a port leaves connections to gather: only in a flood, and only if none was left.
func TestFloodsGather(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		var f floodMeter
		accept := func(n int, blocked time.Duration) time.Duration { // n in a window
			begin := time.Now()
			for range n {
				f.gather(time.Now().Add(-blocked))
			}
			took := time.Since(begin)
			time.Sleep(floodWindow)
			return took
		}
		for range 3 {
			require.Zero(t, accept(floodSize-1, time.Millisecond), "few connections")
		}
		require.Zero(t, accept(floodSize, time.Millisecond), "the first window")
		require.Equal(t, 10*floodPause, accept(10, time.Millisecond), "a flood")
		require.Zero(t, accept(floodSize, time.Millisecond), "after it")
		require.Zero(t, accept(floodSize, 0), "a flood whose connections wait")
	})
}
