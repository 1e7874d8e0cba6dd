package nccl

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
)

// A stuckNCCL has all-reduces that run until the test ends.
type stuckNCCL struct {
	ncclapi.API
	run func() error
}

func (l stuckNCCL) Collective(ncclapi.Call) ncclapi.Result {
	if l.run() != nil {
		return ncclapi.InternalError
	}
	return ncclapi.Success
}

// A collective that runs on all ranks and does not complete is one whose streams have reached it.
func TestStartedCollective(t *testing.T) {
	r := newIdlePair(t)
	other := r.c.others()[0].comm.Value()
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	o := makeIdle(t, other)
	for _, x := range []*idleRank{r, o} {
		x.c.marks.SetRequested(-int64(time.Hour))
		x.c.api = stuckNCCL{x.c.api, func() error { return x.s.Callback(func() { <-gate }) }}
		x.c.rec.Unwatched(time.Hour)
	}
	for range 2 {
		require.NoError(t, errors.Join(AllReduce(r.c, r.s, r.y, r.x, Sum), AllReduce(o.c, o.s, o.y, o.x, Sum)))
	}
	for _, x := range []*idleRank{r, o} {
		require.Eventually(t, func() bool {
			_, _, err := x.c.watch.Observe()
			return err == nil && x.c.Trace()[0].State == "started"
		}, time.Minute, time.Millisecond)
	}
	for _, x := range []*idleRank{r, o} { // each also asks about the other's stream
		trace := x.c.Trace()
		require.Equal(t, "queued", trace[1].State, "it is behind the first")
		require.True(t, trace[1].Started.IsZero())
		require.False(t, trace[0].Started.Before(trace[0].Created))
		x.c.rec.Age(1, 2*time.Hour)
		err := x.c.watch.Inspect()
		require.ErrorContains(t, err, "as collective 1 on rank")
		require.ErrorContains(t, err, "has started and is not known to have completed after 2h")
		require.NotContains(t, err.Error(), "has not reached it")
	}
	dir := t.TempDir()
	for _, x := range []*idleRank{r, o} {
		var b bytes.Buffer
		require.NoError(t, x.c.DumpTrace(&b))
		require.Contains(t, b.String(), `"last_started_collective":"1","last_completed_collective":"-1"`)
		require.NoError(t, os.WriteFile(filepath.Join(dir, x.c.dev.String()), b.Bytes(), 0o600))
	}
	job, err := analyze.Load([]string{dir}, nil)
	require.NoError(t, err)
	report := job.Analyze()
	require.Equal(t, analyze.KindStuck, report.Kind, report.Verdict)
	require.Contains(t, report.Verdict, "The streams of all ranks have reached it.")
	open()
}

// A rank of the same process whose stream has not reached the operation is named, and that rank says so too.
func TestTimeoutNamesTheStreamThatHasNotReachedTheOperation(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		cs, err := NewCommunicators(ctx, devs, nil)
		require.NoError(t, err)
		list := []*idleRank{bufferedRank(t, cs[0]), bufferedRank(t, cs[1])}
		both := func() error {
			return Group(func(b *Batch) (err error) {
				for _, r := range list {
					err = errors.Join(err, AllReduce(b.On(r.c), r.s, r.y, r.x, Sum))
				}
				return err
			})
		}
		require.NoError(t, errors.Join(both(), cs[0].Wait(ctx, list[0].s), cs[1].Wait(ctx, list[1].s)))
		for _, r := range list {
			r.c.rec.Unwatched(time.Hour)
			r.c.marks.SetRequested(-int64(time.Hour))
		}
		open := streamtest.Hold(t, list[1].s)
		defer open()
		require.NoError(t, both())
		require.Eventually(t, func() bool {
			_, _, err := cs[0].watch.Observe()
			return err == nil && cs[0].Trace()[1].State == "started"
		}, time.Minute, time.Millisecond)
		cs[0].rec.Age(2, 2*time.Hour)
		err = cs[0].watch.Inspect()
		require.ErrorContains(t, err, "as collective 2 on rank 0 of 2")
		require.ErrorContains(t, err, "has started and is not known to have completed after 2h")
		require.ErrorContains(t, err, "; rank 1 ("+devs[1].String()+") has issued it, but its stream has not reached it")
		cs[1].rec.Age(2, 2*time.Hour)
		err = cs[1].watch.Inspect()
		require.ErrorContains(t, err, "has not completed after 2h")
		require.ErrorContains(t, err, ": its stream has not reached it, because work that was enqueued on the stream before it still runs or waits")
		open()
		require.NoError(t, errors.Join(cs[0].Wait(ctx, list[0].s), cs[1].Wait(ctx, list[1].s)))
	})
}

// bufferedRank returns a rank with a stream and buffers.
func bufferedRank(t *testing.T, c *Communicator) *idleRank {
	r := makeIdle(t, c)
	c.api = c.api.(*idleNCCL).API
	return r
}
