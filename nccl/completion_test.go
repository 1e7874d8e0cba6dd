package nccl_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/spin"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// states are those of the operations in a trace.
func states(c *nccl.Communicator) (list []string) {
	for _, o := range c.Trace() {
		list = append(list, o.State)
	}
	return list
}

// An operation that an abort ends leaves its stream and has not completed: a wait that goes
// on meanwhile and one that begins later say so, and so does the trace.
func TestWaitOfAnAbortedOperation(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ends := map[string]func(c *nccl.Communicator) error{
			"aborted": (*nccl.Communicator).Abort, "closed": (*nccl.Communicator).Close,
		}
		for how, end := range ends {
			ranks := connect(t, devs)
			xs, _ := buffers(t, ranks, 64)
			once(t, devs, ranks, xs)
			r := ranks[0]
			require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
			during := make(chan error, 1)
			go func() { during <- r.c.Wait(testgpu.Context(t), r.s) }()
			require.NoError(t, end(r.c))
			require.NoError(t, r.s.Sync(testgpu.Context(t)))
			for _, err := range []error{<-during, r.c.Wait(testgpu.Context(t), r.s)} {
				require.ErrorIs(t, err, device.ErrClosed)
				require.ErrorContains(t, err, "wait on rank 0 of 2 ("+devs[0].String()+"): the operations may not have completed and their output is undefined: this process "+how+" the communicator")
			}
			require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum), "ncclAllReduce on rank 0 of 2 ("+devs[0].String()+"): this process "+how+" the communicator ")
			require.Equal(t, []string{"completed", "aborted"}, states(r.c))
			require.EqualValues(t, 1, r.c.Progress().Completed.Record)
		}
	})
}

// What has completed before the end is known to have.
func TestWaitAfterTheEnd(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for name, end := range map[string]func(c *nccl.Communicator) error{
			"abort": (*nccl.Communicator).Abort, "close": (*nccl.Communicator).Close,
			"shutdown": func(c *nccl.Communicator) error { return c.Shutdown(testgpu.Context(t)) },
		} {
			ranks := connect(t, devs)
			xs, _ := buffers(t, ranks, 64)
			each(t, devs, func(i int) error {
				if err := nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum); err != nil {
					return err
				}
				return ranks[i].s.Sync(testgpu.Context(t)) // which tells the communicator nothing
			})
			known := ranks
			if name != "shutdown" { // the other rank may learn of this end before it looks
				require.NoError(t, end(ranks[0].c))
				known = ranks[:1]
			}
			each(t, devs, func(i int) error { return end(ranks[i].c) })
			for _, r := range known {
				require.NoError(t, r.c.Wait(testgpu.Context(t), r.s), name)
				require.Equal(t, []string{"completed"}, states(r.c), name)
			}
		}
	})
}

// After a timeout the operation that hangs stays one that has not completed, whoever has
// waited, and although its stream goes on.
func TestTimeoutIsNotCompleted(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks, xs := afterOnce(t, devs, 64, limit(devs))
		r := ranks[0]
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		require.ErrorIs(t, r.c.Wait(testgpu.Context(t), r.s), nccl.ErrorTimeout)
		require.NoError(t, r.c.Abort())
		require.NoError(t, r.s.Sync(testgpu.Context(t)))
		require.ErrorIs(t, r.c.Wait(testgpu.Context(t), r.s), nccl.ErrorTimeout)
		require.Equal(t, []string{"completed", "timed out"}, states(r.c))
		require.EqualValues(t, 1, r.c.Progress().Completed.Record)
		require.Equal(t, "timed out", r.c.Progress().Issued.State)
		var b bytes.Buffer
		require.NoError(t, r.c.DumpTrace(&b))
		require.Contains(t, b.String(), `"last_completed_collective":"1"`)
		require.Contains(t, b.String(), `"batch_id":2,"end":"timed out"`)
	})
}

// A timeout names the operation that hangs, or operations of which it is one.
func TestTimeoutNamesTheOperationThatHangs(t *testing.T) {
	for _, burst := range []bool{false, true} {
		devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "hang@ncclAllReduce#9"}).Devices()
		ranks := connectWith(t, devs, &nccl.Config{Timeout: ample})
		xs, _ := buffers(t, ranks, 16)
		var late *nccl.TimeoutError
		for n := 1; n <= 8; n++ { // the ninth call is the fifth of rank 0
			if !burst && n == 5 {
				setTimeout(t, ranks, soon)
			}
			if n == 1 { // the first calls block until both have come
				each(t, devs, func(i int) error { return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Max) })
			}
			for i, r := range ranks {
				if n > 1 {
					_ = nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Max)
				}
			}
			if err := ranks[0].c.Err(); !burst && err == nil {
				err = errors.Join(ranks[0].c.Wait(testgpu.Context(t), ranks[0].s), ranks[1].c.Wait(testgpu.Context(t), ranks[1].s))
				require.Equal(t, n >= 5, err != nil, "%d: %v", n, err)
			}
		}
		until(t, func() bool { return ranks[0].c.Err() != nil })
		require.ErrorAs(t, ranks[0].c.Err(), &late)
		first, last := late.Operation.Collective, late.Last.Collective
		if !burst {
			require.Equal(t, []uint64{5, 5}, []uint64{first, last}, "every operation was waited for: %v", late)
			require.ErrorContains(t, late, "nccl: ncclAllReduce(16 x int64, max) as collective 5 on rank")
			continue
		}
		require.LessOrEqual(t, first, uint64(5), late)
		require.GreaterOrEqual(t, last, uint64(5), late)
		if first < last {
			require.ErrorContains(t, late, "nccl: one of collectives ")
		}
	}
}

// The marks that a stream has not come to are kept, so that what hangs lies between two of
// them, however much is issued behind it.
func TestTimeoutOfManyOperations(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks, xs := afterOnce(t, devs, 16, time.Minute)
	r := ranks[0]
	issue := func() {
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		until(t, func() bool { return time.Since(r.c.Progress().Issued.Created) > 2*time.Millisecond })
	}
	issue() // the only one that completes, after all others were issued
	require.NoError(t, r.c.SetTimeout(limit(devs)))
	for range 79 {
		issue()
	}
	require.NoError(t, nccl.AllReduce(ranks[1].c, ranks[1].s, xs[1], xs[1], nccl.Sum))
	var late *nccl.TimeoutError
	require.ErrorAs(t, r.c.Wait(testgpu.Context(t), r.s), &late)
	require.Equal(t, []uint64{3, 3}, []uint64{late.Operation.Collective, late.Last.Collective}, "each was issued some time after the one before, and has a mark")
	require.Equal(t, limit(devs), late.Limit, "the first operation, which had more time, is known to have completed")
}

// The operations of a single rank are copies, which nothing orders between streams.
func TestSingleRankOnTwoStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := connectWith(t, devs, &nccl.Config{Timeout: ample})[0]
		xs, _ := buffers(t, []rank{r}, 64)
		other, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer other.Close()
		open := spin.Hold(t, r.s)
		defer open()
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0].Slice(0, 32), xs[0].Slice(0, 32), nccl.Sum))
		require.NoError(t, r.c.SetTimeout(time.Minute))
		require.NoError(t, other.WaitStream(r.s)) // for the memory
		free, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer free.Close()
		ys, _ := buffers(t, []rank{{c: r.c, s: free}}, 64)
		require.NoError(t, nccl.AllReduce(r.on(), free, ys[0], ys[0], nccl.Sum))
		require.NoError(t, r.c.Wait(testgpu.Context(t), free))
		require.Equal(t, []string{"scheduled", "completed"}, states(r.c))
		until(t, func() bool { return r.c.Err() != nil })
		var late *nccl.TimeoutError
		require.ErrorAs(t, r.c.Err(), &late)
		require.Equal(t, []uint64{1, 1}, []uint64{late.Operation.Collective, late.Last.Collective})
		open()
		require.NoError(t, r.s.Sync(testgpu.Context(t)))
		require.Equal(t, []string{"timed out", "completed"}, states(r.c))
	})
}

// NCCL ends the operations of all communicators that share resources when one is aborted.
func TestAbortOfSharedResources(t *testing.T) {
	yes := true
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connectWith(t, devs, &nccl.Config{SplitShare: &yes})
	children := make([]*nccl.Communicator, 2)
	each(t, devs, func(i int) (err error) {
		children[i], err = ranks[i].c.Split(testgpu.Context(t), 0, 0, nil)
		return err
	})
	xs, _ := buffers(t, ranks, 8)
	each(t, devs, func(i int) error { return nccl.AllReduce(children[i], ranks[i].s, xs[i], xs[i], nccl.Sum) })
	require.NoError(t, children[0].Wait(testgpu.Context(t), ranks[0].s))
	require.NoError(t, nccl.AllReduce(children[0], ranks[0].s, xs[0], xs[0], nccl.Sum))
	require.NoError(t, ranks[0].c.Abort())
	err := children[0].Wait(testgpu.Context(t), ranks[0].s)
	require.ErrorIs(t, err, device.ErrClosed)
	require.ErrorContains(t, err, "this process aborted the communicator, of a communicator that shares its resources")
	for _, c := range children {
		require.NoError(t, c.Close())
	}
}

// A context that ends says nothing about the operation, and a wait of nobody is an error.
func TestWaitGivesUp(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	r := connect(t, devs)[0]
	xs, _ := buffers(t, []rank{r}, 8)
	open := spin.Hold(t, r.s)
	require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, r.c.Wait(ctx, r.s), context.Canceled)
	require.Equal(t, []string{"scheduled"}, states(r.c))
	open()
	require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
	var none *nccl.Communicator
	require.Error(t, none.Wait(ctx, r.s))
	require.Error(t, r.c.Wait(ctx, nil))
}
