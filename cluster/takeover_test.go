package cluster

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A process loses the coordinator and its launcher does not. It ends soon, because no other coordinator follows.
func TestOnlyTheWorkerLosesTheCoordinator(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, elasticHosts(t, 1, 2, 0)[0])
	require.NoError(t, errors.Join(errs...))
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(0), " ")))
	require.NoError(t, err)
	j.Notify = func(string) {}
	r := newRelay(t, j.Addr)
	j.Addr = r.addr()
	err = Run(t.Context(), &RunConfig{Join: j}, func(ctx context.Context, w *World) error {
		r.freeze()
		<-ctx.Done()
		return context.Cause(ctx)
	})
	require.ErrorContains(t, err, "and the launcher of this host has not: the job goes on without this process")
}
