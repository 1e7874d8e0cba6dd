package cluster

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// noiseText returns a text that does not compress well.
func noiseText(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return base64.StdEncoding.EncodeToString(b)[:n]
}

// Errors of any length end an epoch like short ones, also those of a worker that does not clip them itself.
func TestLongErrorsOfWorkers(t *testing.T) {
	t.Parallel()
	cfg := oneHost(4, 0)
	lines := make(chan string, 100)
	cfg.Notify = func(line string) { lines <- line }
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	rs := []*ran{newRan(as[0], 0), newRan(as[0], 1), newRan(as[0], 2)}
	// The next epoch begins without the two that fail only when both have failed, because their functions do not return.
	failing := make(chan struct{})
	rs[1].deaf, rs[1].from, rs[2].deaf, rs[2].from = failing, 2, failing, 2
	for _, r := range rs {
		r.start(t, RunConfig{})
	}
	boom := errors.New(noiseText(1_900_000))
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(3), " ")))
	require.NoError(t, err)
	failed := make(chan error, 1)
	go func() {
		failed <- Run(t.Context(), &RunConfig{Join: j}, func(context.Context, *World) error { return boom })
	}()
	rs[0].world(t, 1)
	ws := []*World{rs[1].world(t, 1), rs[2].world(t, 1)}
	w := rs[0].world(t, 2)
	require.Len(t, w.Left(), 1)
	require.Regexp(t, `^its function failed: [A-Za-z0-9+/]+\.\.\. \(\d+ more bytes\)$`, w.Left()[0].Reason)
	require.InDelta(t, job.MaxText-20, len(w.Left()[0].Reason), 20)
	require.ErrorIs(t, <-failed, boom)

	ws[0], ws[1] = rs[1].world(t, 2), rs[2].world(t, 2)
	var bodies [2][]byte // made before the first is sent: a message of an epoch that has ended has no effect
	for i := range bodies {
		record, err := json.Marshal(job.Fault{Reason: noiseText(1_900_000)})
		require.NoError(t, err)
		bodies[i] = job.Pack(record)
	}
	for i, w := range ws { // two at once, as in one change
		require.NoError(t, w.calls.(job.Remote).Client.Send(job.Message{Kind: job.KindFailed, Epoch: 2, Body: bodies[i]}))
	}
	w = rs[0].awaitSize(t, 1)
	close(failing)
	for _, d := range w.Left() {
		require.LessOrEqual(t, len(d.Reason), job.MaxText)
	}
	require.Error(t, rs[1].returned(t))
	require.Error(t, rs[2].returned(t))
	finishAll(t, as, rs[0])
	for len(lines) > 0 {
		require.Less(t, len(<-lines), 2*job.MaxText)
	}
}

// A world that waits for its least size ends after the limit, although a process comes and goes meanwhile.
func TestNewcomersDoNotExtendTheWait(t *testing.T) {
	t.Parallel()
	cfg := oneHost(3, 100)
	cfg.Timing.Join = 5 * time.Second // also for the processes to meet at first
	as, errs := startAll(t, cfg)
	require.NoError(t, errors.Join(errs...))
	rc := RunConfig{MinSize: 3}
	rs := []*ran{runWorker(t, as[0], 0, rc), runWorker(t, as[0], 1, rc), runWorker(t, as[0], 2, rc)}
	rs[0].world(t, 1)
	w1, w2 := rs[1].world(t, 1), rs[2].world(t, 1)
	rs[1].kill(t, w1)
	rs[2].kill(t, w2)
	j, err := detect(environ(strings.Join(as[0].WorkerEnv(1), " ")))
	require.NoError(t, err)
	j.Notify = func(string) {}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	flapped := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			once, stop := context.WithTimeout(ctx, 300*time.Millisecond)
			_ = Run(once, &RunConfig{Join: j, MinSize: 3}, func(context.Context, *World) error { return nil })
			stop()
		}
		flapped <- n
	}()
	select {
	case err := <-rs[0].result:
		require.ErrorContains(t, err, "not enough processes for")
	case <-ctx.Done():
		t.Error("the process waits for ever")
	}
	cancel()
	require.Positive(t, <-flapped)
}

// A size that is too large for any job is a mistake. In the largest world, a process that waits alone obeys its time limit, and its error
// is the one of a small world.
func TestSizesOfWorlds(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]*JoinConfig{
		"Size is 1048577: want 1 to 1048576, or 0 for 1":                 {Size: job.MaxSize + 1, Rank: new(0), Addr: "127.0.0.1:0", Serve: true},
		"Size is -2: want 1 to 1048576":                                  {Size: -2},
		"LocalSize is 1048577: want at most the size of the world, or 0": {Size: 2, LocalSize: job.MaxSize + 1, Rank: new(0), Addr: "127.0.0.1:0", Serve: true},
		"LocalSize is -1": {Size: 2, LocalSize: -1, Rank: new(0), Addr: "127.0.0.1:0", Serve: true},
	} {
		_, err := Join(t.Context(), cfg)
		require.ErrorAs(t, err, new(*ConfigError))
		require.ErrorContains(t, err, want)
	}
	_, err := Join(t.Context(), &JoinConfig{Job: t.Name(), Size: job.MaxSize, Rank: new(0), Addr: "127.0.0.1:0", Serve: true, Secret: []byte(noiseText(32)),
		Timing: Timing{Join: time.Second}})
	timeout, ok := errors.AsType[*JoinTimeoutError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, job.MaxSize, timeout.Want)
	require.Len(t, timeout.Missing, 1<<16)
	require.Contains(t, timeout.Error(), "1 of 1048576 processes have joined: rank 0 (")
	require.Contains(t, timeout.Error(), "; missing ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and at least 65520 more")
}
