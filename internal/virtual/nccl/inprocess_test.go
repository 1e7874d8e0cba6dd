package nccl

import (
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A connection in memory keeps what is written until it is read, blocks a writer that is far ahead, and ends as a
// socket does.
func TestConnectionsInProcess(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		d := newDoor()
		accepted := make(chan net.Conn, 1)
		go func() {
			conn, err := d.Accept()
			if err == nil {
				accepted <- conn
			}
		}()
		a, err := enter(d.Addr().String())
		require.NoError(t, err)
		b := <-accepted

		data := make([]byte, socketBuffer+10)
		data[0], data[socketBuffer+9] = 1, 2
		wrote := make(chan error, 1)
		go func() { _, err := a.Write(data); wrote <- err }()
		synctest.Wait()
		require.Empty(t, wrote, "the last bytes have no room")
		got := make([]byte, len(data))
		_, err = io.ReadFull(b, got)
		require.NoError(t, err)
		require.NoError(t, <-wrote)
		require.Equal(t, data, got)

		begin := time.Now()
		require.NoError(t, b.SetDeadline(begin.Add(time.Second)))
		_, err = b.Read(got)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, time.Second, time.Since(begin))
		synctest.Wait()
		_, err = b.Write(got[:1])
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		_, err = a.Write(data[:1])
		require.NoError(t, err, "the other end has no deadline")
		require.NoError(t, b.SetDeadline(time.Now().Add(time.Second)))
		require.NoError(t, b.SetDeadline(time.Time{}))
		time.Sleep(time.Minute)

		require.NoError(t, a.Close())
		n, err := b.Read(got)
		require.NoError(t, err)
		require.Equal(t, 1, n, "what was written before Close arrives")
		_, err = b.Read(got)
		require.ErrorIs(t, err, io.EOF)
		_, err = b.Write(got)
		require.ErrorIs(t, err, syscall.EPIPE)

		require.NoError(t, d.Close())
		_, err = d.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		_, err = enter(d.Addr().String())
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
	})
}
