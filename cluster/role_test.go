package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestTokenIsForWorkers takes what a worker has in its environment, as any program does that
// it starts, and tries to be a launcher.
func TestTokenIsForWorkers(t *testing.T) {
	as, errs := startAll(t, onLoopback(t, 2, 2)...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	var token string
	for _, v := range as[0].WorkerEnv(0) {
		if rest, ok := strings.CutPrefix(v, "CHORUS_TOKEN="); ok {
			token = rest
		}
	}
	worker, err := decodeToken(token)
	require.NoError(t, err)
	require.NotEqual(t, as[0].keys.control.key, worker.key)

	// As if it were the launchers' key, it is none.
	require.Eventually(t, func() bool {
		_, _, err := (*system)(nil).dialCoordinator(t.Context(), as[0].Job(), as[0].addr, credential{key: worker.key})
		_, auth := errors.AsType[*AuthError](err)
		return auth
	}, time.Minute, time.Millisecond)

	l, _ := target{job: as[0].Job(), addr: as[0].addr, key: *worker}.persist(t)
	defer l.close()
	m := note(kindRegister, host{Host: "worker", UUID: "u", Nodes: 2, LocalSize: 1, NodeRank: -1})
	m.id = registerAgent
	require.NoError(t, l.write(frame{body: m.encode()}, time.Minute))
	for err == nil { // the coordinator hangs up, and refuses nothing in words
		var f frame
		if f, err = l.read(); err == nil {
			answer, bad := decodeMessage(f.body)
			require.NoError(t, bad)
			require.NotContains(t, []kind{kindPlan, kindPrepare, kindRefuse}, answer.kind)
		}
	}
	require.NoError(t, as[0].Context().Err())
	require.NoError(t, as[1].Context().Err())

	again, err := worker.forWorkers()
	require.NoError(t, err)
	require.Equal(t, *worker, again, "a worker's children are workers")
}
