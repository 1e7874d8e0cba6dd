package cluster

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/testhost"
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

// A process that two coordinators give worlds reports both.
func TestWorkerReportsTwoCoordinators(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		one, other := job.Leader{Term: 2, Agent: "a", Name: "host a (pid 1)"}, job.Leader{Term: 2, Agent: "b", Name: "host b (pid 2)"}
		r := &runner{cfg: &JoinConfig{Job: "twice", Timing: quick}, parent: t.Context(), end: make(chan error, 1), worlds: make(chan *World, 2)}
		r.k = &job.Client{Clock: job.NewRunClock(time.Second), Ctx: t.Context()}
		begin := func(epoch uint64, by job.Leader) {
			m := job.Note(job.KindWorld, job.World{By: by, Members: []Member{{}}})
			m.Epoch = epoch
			r.begin(m)
		}
		begin(5, one)
		require.Empty(t, r.end)
		begin(5, job.Leader{Term: 3, Agent: "b", Name: "host b (pid 2)"})
		require.ErrorContains(t, <-r.end, "host a (pid 1) in term 2 has begun epoch 5, and host b (pid 2) in term 3 comes with epoch 5")
		require.Error(t, r.now.ctx.Err())
		begin(6, other)
		require.ErrorContains(t, <-r.end, "two coordinators lead the job in one term")
		require.Len(t, r.worlds, 1)
	})
}
