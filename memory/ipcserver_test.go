package memory

import (
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A signal, of which Go's scheduler sends many, does not pass for the end of the
// other process: its memory would be given to somebody else.
func TestSignalIsNoHangUp(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		ends[i] = c.(*net.UnixConn)
		defer c.Close()
	}
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() {
			_ = unix.Kill(os.Getpid(), unix.SIGURG)
		}
	})
	alive := true
	for range 50_000 {
		alive = alive && !hungUp(ends[0])
	}
	done.Store(true)
	wg.Wait()
	require.True(t, alive)
	require.NoError(t, ends[1].Close())
	require.True(t, hungUp(ends[0]))
}
