package job

import (
	"context"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOutOfTime knows what dialling and waiting for an answer return when time is up.
func TestOutOfTime(t *testing.T) {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	_, err := (&net.Dialer{}).DialContext(ctx, "tcp", freeAddr(t))
	require.True(t, OutOfTime(err), "%v", err)
	p, q := net.Pipe()
	defer q.Close()
	defer p.Close()
	require.NoError(t, p.SetDeadline(time.Now()))
	_, err = p.Read(make([]byte, 1))
	require.True(t, OutOfTime(err), "%v", err)
	_, err = net.Dial("tcp", freeAddr(t))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.False(t, OutOfTime(err))
}
