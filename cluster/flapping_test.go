package cluster

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// A worker of one host fails each time soon after it has joined. Its host is excluded, with the
// worker beside it, and comes back after a time. The others go on.
func TestFlappingHostIsExcluded(t *testing.T) {
	t.Parallel()
	cfgs := elasticHosts(t, 1, 2, 100)
	lines := make(chan string, 1000)
	for _, c := range cfgs {
		c.Timing.Backoff = 400 * time.Millisecond
	}
	cfgs[0].Notify = func(line string) { lines <- line }
	cfgs[1].LocalSize = 2
	as, rs := elasticJob(t, RunConfig{}, cfgs...)
	bad, beside := rs[1], rs[2]
	epoch := 1
	fail := func() {
		bad.kill(t, bad.last(t))
		epoch++
	}
	for range job.FlapLimit - 1 {
		fail()
		o := orderOf(t, as[1])
		require.True(t, o.Start)
		require.Less(t, o.After, job.Exclusion*cfgs[1].Timing.Backoff/2)
		bad = runWorker(t, as[1], 0, RunConfig{})
		bad.awaitSize(t, 3)
	}
	rs[0].awaitSize(t, 3)
	fail()
	var kill, again job.Order
	for kill.PID == 0 || again.After == 0 {
		switch o := orderOf(t, as[1]); {
		case o.Kill:
			kill = o
		case o.Start:
			again = o
		}
	}
	require.Equal(t, 1, kill.Local)
	require.Greater(t, again.After, job.Exclusion*cfgs[1].Timing.Backoff/2, "the host is excluded")
	rs[0].awaitSize(t, 1)
	require.Error(t, beside.returned(t))
	require.NoError(t, as[1].Report(1, job.Exit{PID: os.Getpid(), Code: 137, Reason: "killed by SIGKILL"}))
	second := orderOf(t, as[1])
	require.True(t, second.Start)
	require.Zero(t, second.Count, "this is not a restart of the worker beside")
	requireLine(t, lines, `^job \S+: host n10 is excluded for 12s: its processes failed 4 times in a row within 4s of their start; the last: local rank 0 killed by SIGKILL$`)
	bad, beside = newRan(as[1], 0), newRan(as[1], 1)
	time.AfterFunc(again.After, func() {
		bad.start(t, RunConfig{})
		beside.start(t, RunConfig{})
	})
	rs[0].awaitSize(t, 3)
	finishAll(t, as, rs[0], bad, beside)
}
