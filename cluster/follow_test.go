package cluster

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A launcher whose answers are late does not look as if it had registered later than it has: its workers would take that for a return to
// a coordinator that it had lost, and would join again after the coordinator has ended them.
func TestSlowAnswerOfALauncher(t *testing.T) {
	t.Parallel()
	as, rs := elasticJob(t, RunConfig{}, elasticHosts(t, 2, 2, 0)...)
	cfg, err := detect(environ(strings.Join(as[1].WorkerEnv(0), " ")))
	require.NoError(t, err)
	key, err := cfg.key()
	require.NoError(t, err)
	late := newRelayWith(t, cfg.agentAt, func(to, from net.Conn) {
		defer to.Close()
		_, _ = io.Copy(lateWriter{to}, from)
	})
	cfg.agentAt = late.addr()
	at, since, over := cfg.whereabouts(t.Context(), key)
	require.Empty(t, over)
	require.Equal(t, as[0].Addr, at)
	require.False(t, since.After(as[1].Client().Since), "%v after %v", since, as[1].Client().Since)
	finishAll(t, as, rs...)
}

type lateWriter struct{ net.Conn }

func (w lateWriter) Write(p []byte) (int, error) {
	time.Sleep(200 * time.Millisecond)
	return w.Conn.Write(p)
}
