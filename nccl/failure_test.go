package nccl_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/metrics"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
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
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			err := r.c.Wait(ctx, r.s)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorContains(t, err, "rank 0 of 2")
			during := make(chan error, 1)
			go func() { during <- r.c.Wait(testgpu.Context(t), r.s) }()
			require.NoError(t, end(r.c))
			require.NoError(t, r.s.Sync(testgpu.Context(t)))
			for _, err := range []error{<-during, r.c.Wait(testgpu.Context(t), r.s)} {
				require.ErrorIs(t, err, device.ErrClosed)
				require.ErrorContains(t, err, "wait on rank 0 of 2 ("+devs[0].String()+"): the operations may not have completed and their output is undefined: this process "+how+" the communicator")
			}
			err = nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum)
			require.ErrorIs(t, err, device.ErrClosed)
			require.ErrorContains(t, err, "ncclAllReduce on rank 0 of 2 ("+devs[0].String()+"): this process "+how+" the communicator ")
			require.NoError(t, errors.Join(r.c.Close(), (*nccl.Communicator)(nil).Close()))
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
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
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
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		ranks, xs := afterOnce(t, devs, 16, time.Minute)
		r := ranks[0]
		issue := func() {
			require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
			time.Sleep(5 * time.Millisecond) // in virtual time: more than marks are apart
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
	})
}

// The operations of a single rank are copies, which nothing orders between streams.
func TestSingleRankOnTwoStreams(t *testing.T) {
	streamtest.EachInVirtualTime(t, 1, func(t *testing.T, devs []*device.Device) {
		r := connectWith(t, devs, &nccl.Config{Timeout: ample})[0]
		xs, _ := buffers(t, []rank{r}, 64)
		other, free := streamtest.NewStream(t, devs[0]), streamtest.NewStream(t, devs[0])
		open := streamtest.Hold(t, r.s)
		defer open()
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0].Slice(0, 32), xs[0].Slice(0, 32), nccl.Sum))
		require.NoError(t, r.c.SetTimeout(time.Minute))
		require.NoError(t, other.WaitStream(r.s)) // for the memory
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
	open := streamtest.Hold(t, r.s)
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

const (
	// soon is a timeout of operations that hang. A test must not require that another operation completes,
	// or that another call returns, within it: a busy machine may stop for seconds.
	soon = 500 * time.Millisecond
	// ample is a timeout of operations that complete, also on a busy machine.
	ample = 5 * time.Second
)

// limit is a timeout of operations that hang, with time for the call that issues one.
func limit(devs []*device.Device) time.Duration {
	if devs[0].System().Backend() == "cuda" {
		return 4 * time.Second // NCCL loads its kernels within the first call
	}
	return 2 * time.Second
}

// once issues an all-reduce on all ranks, each from a goroutine of its own.
func once(t *testing.T, devs []*device.Device, ranks []rank, xs []memory.Slice[int64]) {
	t.Helper()
	each(t, devs, func(i int) error {
		if err := nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Max); err != nil {
			return err
		}
		return ranks[i].c.Wait(testgpu.Context(t), ranks[i].s)
	})
}

// afterOnce connects ranks and completes an all-reduce on them, with enough time for both. The timeout d
// holds for later operations.
func afterOnce(t *testing.T, devs []*device.Device, elements int, d time.Duration) ([]rank, []memory.Slice[int64]) {
	t.Helper()
	ranks := connectWith(t, devs, &nccl.Config{Timeout: time.Minute})
	xs, _ := buffers(t, ranks, elements)
	once(t, devs, ranks, xs)
	setTimeout(t, ranks, d)
	return ranks, xs
}

// setTimeout sets the timeout of later operations.
func setTimeout(t *testing.T, ranks []rank, d time.Duration) {
	t.Helper()
	for _, r := range ranks {
		require.NoError(t, r.c.SetTimeout(d))
	}
}

// until waits for what a watch will notice.
func until(t *testing.T, ready func() bool) {
	t.Helper()
	require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) { return ready(), nil }))
}

func TestDeadlineNamesTheRankBehind(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks, xs := afterOnce(t, devs, 1024, limit(devs))
		r := ranks[0]
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		begun := time.Now()
		err := r.c.Wait(testgpu.Context(t), r.s)
		var late *nccl.TimeoutError
		require.ErrorAs(t, err, &late)
		require.ErrorIs(t, err, nccl.ErrorTimeout)
		require.True(t, late.Timeout())
		require.Less(t, time.Since(begun), 10*limit(devs))
		require.Greater(t, late.Age, limit(devs))
		require.Equal(t, limit(devs), late.Limit)
		require.Equal(t, []any{0, 2, devs[0].String(), []int{1}}, []any{late.Rank, late.Size, late.Device, late.Behind})
		require.Equal(t, "ncclAllReduce(1024 x int64, sum) as collective 2", late.Operation.String())
		require.Equal(t, "ncclAllReduce(1024 x int64, max) as collective 1", late.Completed.String())
		require.ErrorContains(t, err, "on rank 0 of 2")
		require.ErrorContains(t, err, "rank 1 ("+ranks[1].c.Device().String()+") is behind: it has issued 1 collectives, the last operation is ncclAllReduce(1024 x int64, max)")
		// From now on every call of every rank says so, at once.
		for i, r := range ranks {
			until(t, func() bool { return r.c.Err() != nil })
			require.Equal(t, err, r.c.Err(), "rank %d", i)
			require.Equal(t, err, nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum))
			require.ErrorIs(t, reduceAll([]rank{r}, xs[i:], nccl.Sum), err)
			require.Equal(t, err, r.c.Wait(testgpu.Context(t), r.s))
			require.NoError(t, r.c.Close())
			require.NoError(t, r.s.Sync(testgpu.Context(t)))
		}
		// The process goes on.
		again := connect(t, devs)
		once(t, devs, again, xs)
	})
}

// Of operations that come at once nobody knows which are done, but what comes behind the
// first one that a rank has not issued is not to blame.
func TestDeadlineInABurst(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 3}, func(t *testing.T, devs []*device.Device) {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: ample})
		xs, _ := buffers(t, ranks, 16)
		each(t, devs, func(i int) (err error) {
			for n := range []int{5, 4, 6}[i] {
				err = errors.Join(err, nccl.Broadcast(ranks[i].c, ranks[i].s, xs[i], xs[i], n%3))
			}
			return err
		})
		var late *nccl.TimeoutError
		require.ErrorAs(t, ranks[0].c.Wait(testgpu.Context(t), ranks[0].s), &late)
		require.EqualValues(t, 5, late.Last.Collective)
		require.LessOrEqual(t, late.Operation.Collective, uint64(5))
		require.Equal(t, []int{1}, late.Behind)
	})
}

// A rank that issues more than its stream takes, while another one does not come, waits in
// the driver, which then answers nobody who asks about the device.
func TestDeadlineOfAFullStream(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		nccl.SetAbortTimeout(t, time.Minute)
		ranks, xs := afterOnce(t, devs, 8, limit(devs))
		r := ranks[0]
		require.NoError(t, flood(r, xs[0], func(err error) bool { return err != nil }))
		var late *nccl.TimeoutError
		require.ErrorAs(t, r.c.Err(), &late)
		require.Equal(t, []int{1}, late.Behind)
		require.NoError(t, r.s.Sync(testgpu.Context(t)))
	})
}

// flood issues operations without end until one is refused.
func flood(r rank, x memory.Slice[int64], over func(err error) bool) error {
	for range 1 << 20 {
		if err := nccl.AllReduce(r.on(), r.s, x, x, nccl.Sum); over(err) {
			return nil
		}
	}
	return errors.New("the stream takes what it gets without end")
}

func TestDeadlineOfATransfer(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks, xs := afterOnce(t, devs, 8, limit(devs))
		r := ranks[1]
		issued := make(chan error, 1)
		go func() { issued <- nccl.Recv(r.on(), r.s, xs[1], 0) }() // NCCL may wait for the peer in here
		err := r.c.Wait(testgpu.Context(t), r.s)
		if err == nil {
			until(t, func() bool { return r.c.Err() != nil })
			err = r.c.Err()
		}
		<-issued
		require.ErrorContains(t, err, "ncclRecv(8 x int64, from rank 0) as transfer 1 on rank 1 of 2")
		require.ErrorContains(t, err, "the last that rank 0 ("+devs[0].String()+") has issued is ncclAllReduce(8 x int64, max) as collective 1")
	})
}

// NCCL may hang in a call, where nothing has been enqueued yet.
func TestDeadlineOfACallThatHangs(t *testing.T) {
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "hang@ncclGroupEnd#1"}).Devices()
	nccl.SetAbortTimeout(t, 4*time.Second)
	ranks := connectWith(t, devs, &nccl.Config{Timeout: soon})
	xs, _ := buffers(t, ranks, 4)
	go func() { _ = reduceAll(ranks[:1], xs, nccl.Sum) }()
	until(t, func() bool { return ranks[0].c.Err() != nil })
	require.ErrorContains(t, ranks[0].c.Err(), "ncclAllReduce(4 x int64, sum) as collective 1")
	require.ErrorContains(t, ranks[0].c.Err(), "none is known to have completed")
	until(t, ranks[0].c.Closed) // not by this test, which NCCL tells of the group that is still open
}

// What is done is known to be done a moment later, though the stream goes on.
func TestProgress(t *testing.T) {
	streamtest.EachInVirtualTime(t, 1, func(t *testing.T, devs []*device.Device) {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: ample})
		xs, _ := buffers(t, ranks, 8)
		r := ranks[0]
		require.Equal(t, "none", r.c.Progress().Issued.String())
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		require.NoError(t, nccl.Broadcast(r.on(), r.s, xs[0], xs[0], 0))
		until(t, func() bool { return r.c.Progress().Completed.Record == 2 })
		p := r.c.Progress()
		require.Equal(t, []any{0, "ncclBroadcast(8 x int64, root 0) as collective 2"}, []any{p.Rank, p.Completed.String()})
		require.False(t, p.Completed.Completed.Before(p.Completed.Created))
		for _, o := range r.c.Trace() {
			require.Equal(t, "completed", o.State)
		}
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		require.EqualValues(t, 3, r.c.Progress().Completed.Record, "known from the wait")
		// Nothing is older than the deadline, and later operations are looked after too.
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		until(t, func() bool { return r.c.Progress().Completed.Record == 4 })
		require.NoError(t, r.c.Err())
	})
}

// The place behind an operation is passed although the stream is never idle.
func TestProgressOfABusyStream(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	r := connectWith(t, devs, &nccl.Config{Timeout: time.Minute})[0]
	xs, _ := buffers(t, []rank{r}, 8)
	wait := func() chan struct{} {
		gate := make(chan struct{})
		require.NoError(t, r.s.Callback(func() { <-gate }))
		return gate
	}
	gate := wait()
	require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
	until(t, func() bool {
		next := wait() // the stream is never idle
		close(gate)
		gate = next
		return r.c.Progress().Completed.Record == 1
	})
	close(gate)
	require.NoError(t, r.c.Err())
}

// Operations of a capture are recorded as such, and a capture is not disturbed.
func TestCapturedOperationsAreNotTimed(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: ample})
		xs, _ := buffers(t, ranks, 8)
		r := ranks[0]
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum)) // somebody looks from now on
		require.NoError(t, r.s.Sync(testgpu.Context(t)))
		x, err := graph.Capture([]*stream.Stream{r.s}, func() error {
			if err := nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum); err != nil {
				return err
			}
			until(t, func() bool { return r.c.Progress().Issued.Created.Before(time.Now().Add(-ample * 5 / 4)) })
			return nil
		}, nil)
		require.NoError(t, err)
		// What was done before the capture is found out behind it, while the stream is busy.
		gate := make(chan struct{})
		require.NoError(t, r.s.Callback(func() { <-gate }))
		captured := time.Now()
		until(t, func() bool { return time.Since(captured) > ample/4 }) // two intervals of the watch
		close(gate)
		require.NoError(t, x.Launch(r.s))
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		require.True(t, r.c.Progress().Issued.Captured)
		require.NoError(t, x.Close())
	})
}

func TestOnFailureKnowsBetter(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	better := errors.New("rank 1 has no power")
	var mu sync.Mutex
	var told []int
	ranks := connectWith(t, devs, &nccl.Config{Timeout: soon, OnFailure: func(c *nccl.Communicator, err error) error {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, c.Rank())
		if c.Rank() == 0 {
			return better
		}
		return nil
	}})
	xs, _ := buffers(t, ranks, 4)
	require.Equal(t, better, issueAlone(t, ranks[0], xs[0]))
	until(t, func() bool { return ranks[1].c.Err() != nil })
	require.Equal(t, better, ranks[1].c.Err())
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []int{0, 1}, told)
}

// Without a deadline an operation may hang for ever, and a rank that aborts ends it.
func TestNoDeadline(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	t.Setenv("CHORUS_NCCL_TIMEOUT", soon.String())
	ranks := connectWith(t, devs, &nccl.Config{Timeout: -1})
	timed := connect(t, devs)
	xs, _ := buffers(t, ranks, 4)
	total(t, ranks)
	require.NoError(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum))
	ys, _ := buffers(t, timed, 4)
	require.ErrorIs(t, issueAlone(t, timed[0], ys[0]), nccl.ErrorTimeout)
	require.NoError(t, ranks[0].c.Err())
}

// What NCCL fails with when it connects ranks, as because another one has given up, is the
// communicator's end, and that of the other ranks here: by itself, and in a group.
func TestNCCLFailsWithinAnOperation(t *testing.T) {
	for result, fails := range map[nccl.Result]bool{
		nccl.ErrorInternal: true, nccl.ErrorSystem: true, nccl.ErrorRemote: true, nccl.ErrorInvalidUsage: false, nccl.ErrorUnhandledCUDA: false,
	} {
		for _, call := range []string{"ncclSend#1", "ncclGroupEnd#1"} {
			devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: call + "=" + result.Error()}).Devices()
			ranks := connect(t, devs)
			xs, _ := buffers(t, ranks, 8)
			send := func() error { return sendTo1(ranks[0], xs[0], call == "ncclGroupEnd#1") }
			require.ErrorIs(t, send(), result)
			if !fails {
				require.NoError(t, ranks[0].c.Err(), result)
				continue
			}
			for _, r := range ranks {
				until(t, func() bool { return r.c.Err() != nil })
				require.ErrorIs(t, r.c.Err(), result)
				require.ErrorContains(t, r.c.Err(), "on rank 0 of 2")
			}
			require.ErrorIs(t, send(), result)
		}
	}
}

// sendTo1 sends to rank 1, by itself or in a group.
func sendTo1(r rank, x memory.Slice[int64], inGroup bool) error {
	send := func(_ int, r rank) error { return nccl.Send(r.on(), r.s, x, 1) }
	if inGroup {
		return grouped([]rank{r}, send)
	}
	return send(0, r)
}

// What OnFailure does may use the communicator, also when an operation has failed in it.
func TestOnFailureMayEnter(t *testing.T) {
	for _, call := range []string{"ncclSend#1", "ncclGroupEnd#1"} {
		devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: call + "=ncclSystemError"}).Devices()
		factors := make([]*nccl.PreMulSum, 2)
		closed := make(chan error, 2)
		ranks := connectWith(t, devs, &nccl.Config{OnFailure: func(c *nccl.Communicator, _ error) error {
			closed <- factors[c.Rank()].Close()
			return nil
		}})
		for i, r := range ranks {
			var err error
			factors[i], err = nccl.NewPreMulSum(r.c, float32(2))
			require.NoError(t, err)
		}
		xs, _ := buffers(t, ranks, 8)
		require.ErrorIs(t, sendTo1(ranks[0], xs[0], call == "ncclGroupEnd#1"), nccl.ErrorSystem)
		require.NoError(t, <-closed)
		<-closed
	}
}

// The ranks of a process are compared when they issue, not when they hang.
func TestRanksThatDiffer(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 32)
		a, b := ranks[0], ranks[1]
		wrong := map[string]func(on onto) error{
			"operation": func(on onto) error { return nccl.Broadcast(on(b.c), b.s, xs[1], xs[1], 0) },
			"count": func(on onto) error {
				return nccl.AllReduce(on(b.c), b.s, xs[1].Slice(0, 5), xs[1].Slice(0, 5), nccl.Sum)
			},
			"reduction": func(on onto) error { return nccl.AllReduce(on(b.c), b.s, xs[1], xs[1], nccl.Min) },
			"type": func(on onto) error {
				y, err := memory.View[float64](xs[1].Buffer(), 0, 32)
				if err != nil {
					return err
				}
				return nccl.AllReduce(on(b.c), b.s, y, y, nccl.Sum)
			},
		}
		check := func(name string, err error) {
			var m *nccl.MismatchError
			require.ErrorAs(t, err, &m, name)
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
			require.Equal(t, []int{1, 0}, []int{m.Rank, m.Other})
			require.ErrorContains(t, err, "rank 0 issued ncclAllReduce(32 x int64, sum) as collective ")
		}
		for name, issue := range wrong { // in one group: on no rank
			check(name, nccl.Group(func(batch *nccl.Batch) error {
				return errors.Join(nccl.AllReduce(batch.On(a.c), a.s, xs[0], xs[0], nccl.Sum), issue(batch.On))
			}))
		}
		first := make(chan error, 1)
		go func() { first <- nccl.AllReduce(a.c, a.s, xs[0], xs[0], nccl.Sum) }()
		until(t, func() bool { return a.c.Progress().Issued.Record > uint64(len(wrong)) })
		for name, issue := range wrong { // later: on this rank
			check(name, issue(direct))
		}
		require.NoError(t, nccl.AllReduce(b.c, b.s, xs[1], xs[1], nccl.Sum), "the right one is still welcome")
		require.NoError(t, <-first)
		requireAll(t, ranks, xs, sum(in))
	})
}

// A call that NCCL refuses takes no number: the ranks still fit.
func TestARefusedOperationCountsForNothing(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAllReduce#1=ncclInvalidUsage, ncclReduce#2=ncclInvalidUsage"})
	ranks := connect(t, devs)
	xs, in := buffers(t, ranks, 4)
	a, b := ranks[0], ranks[1]
	require.ErrorIs(t, nccl.AllReduce(a.c, a.s, xs[0], xs[0], nccl.Sum), nccl.ErrorInvalidUsage)
	require.ErrorIs(t, grouped(ranks, func(i int, r rank) error {
		return errors.Join(nccl.Broadcast(r.on(), r.s, xs[i], xs[i], 0), nccl.Reduce(r.on(), r.s, xs[i], xs[i], nccl.Sum, 0))
	}), nccl.ErrorInvalidUsage)
	require.Empty(t, a.c.Trace())
	require.Empty(t, b.c.Trace())
	each(t, devs, func(i int) error {
		return nccl.AllGather(ranks[i].c, ranks[i].s, xs[i], xs[i].Slice(2*i, 2*i+2))
	})
	requireAll(t, ranks, xs, append(in[0][:2:2], in[1][2:]...))
	require.EqualValues(t, 1, a.c.Progress().Issued.Collective)
	require.EqualValues(t, 1, b.c.Progress().Issued.Collective)
}

// What NCCL reports after the call has returned is found without a wait, on all ranks.
func TestLateErrors(t *testing.T) {
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "async@ncclAllGather#2=ncclSystemError"}).Devices()
	ranks := connectWith(t, devs, &nccl.Config{Timeout: 8 * time.Second})
	xs, _ := buffers(t, ranks, 4)
	each(t, devs, func(i int) error { // connects the ranks, so that the gathers do not wait in their calls
		return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum)
	})
	each(t, devs, func(i int) error {
		return nccl.AllGather(ranks[i].c, ranks[i].s, xs[i], xs[i].Slice(2*i, 2*i+2))
	})
	for _, r := range ranks {
		var e *nccl.Error
		var err error
		until(t, func() bool { // nobody but the watch asks NCCL
			err = nccl.Group(func(b *nccl.Batch) error {
				return nccl.AllReduce(b.On(r.c), r.s, xs[0], xs[0].Slice(0, 1), nccl.Sum) // which does not fit
			})
			return errors.As(err, &e)
		})
		require.True(t, e.Async)
		require.Regexp(t, "the fault plan failed ncclAllGather of rank [01] when it ran", e.Error())
	}
}

// Before a failure is recorded, the streams are asked for the files of the flight recorders which operations have completed. That
// finds the same failure, and must not record it in the same way again.
func TestFailureWithTraces(t *testing.T) {
	t.Setenv(env.NCCLTraceFile.Name, filepath.Join(t.TempDir(), "trace-"))
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "async@ncclAllGather#2=ncclSystemError"}).Devices()
	ranks := connectWith(t, devs, nil)
	xs, _ := buffers(t, ranks, 4)
	for begun := time.Now(); time.Since(begun) < 10*time.Millisecond; { // streams have marks every 2 ms
		each(t, devs, func(i int) error {
			return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum)
		})
	}
	before := goroutinesCreated()
	each(t, devs, func(i int) error {
		return nccl.AllGather(ranks[i].c, ranks[i].s, xs[i], xs[i].Slice(2*i, 2*i+2))
	})
	for _, r := range ranks {
		require.NoError(t, r.s.Sync(testgpu.Context(t)), "the stream has passed all operations")
	}
	for _, r := range ranks {
		until(t, func() bool { return r.c.Err() != nil })
	}
	t.Log(before, goroutinesCreated())
	require.Less(t, goroutinesCreated()-before, uint64(100))
}

func goroutinesCreated() uint64 {
	x := []metrics.Sample{{Name: "/sched/goroutines-created:goroutines"}}
	metrics.Read(x)
	return x[0].Value.Uint64()
}

// A communicator fails by itself when NCCL reports an error, without anybody who
// waits.
func TestAsyncErrorIsNoticed(t *testing.T) {
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2}).Devices()
	ranks := connectWith(t, devs, &nccl.Config{Timeout: 10 * time.Second})
	xs, _ := buffers(t, ranks, 4)
	failed := make(chan error, 1)
	go func() { failed <- issueAlone(t, ranks[0], xs[0]) }()
	require.NoError(t, ranks[1].c.Abort())
	err := <-failed
	require.ErrorIs(t, err, nccl.ErrorRemote)
	// Rank 0 sees the closed connection first if the notice of rank 1 comes late.
	require.Regexp(t, "rank 1 (aborted|was lost: its connection )", err)
	require.Equal(t, ranks[0].c.Err(), nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum))
}

func TestTrace(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connectWith(t, devs, &nccl.Config{TraceSize: 4, Name: "ring", TraceFrames: true, Timeout: time.Minute})
	xs, _ := buffers(t, ranks, 8)
	require.Empty(t, ranks[0].c.Trace())
	begun := time.Now()
	all := func(issue func(i int, r rank) error) { run(t, ranks, xs, issue) }
	for range 3 {
		all(func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Avg) })
	}
	all(func(i int, r rank) error {
		if i == 0 {
			return nccl.Send(r.on(), r.s, xs[0].Slice(0, 3), 1)
		}
		return nccl.Recv(r.on(), r.s, xs[1].Slice(0, 3), 0)
	})
	all(func(i int, r rank) error { return nccl.AllGather(r.on(), r.s, xs[i], xs[i].Slice(4*i, 4*i+4)) })

	list := ranks[1].c.Trace()
	require.Len(t, list, 4, "the ring is full")
	var texts []string
	for i, o := range list {
		texts = append(texts, o.String())
		require.EqualValues(t, i+2, o.Record)
		require.WithinRange(t, o.Created, begun.Round(0).Add(-time.Millisecond), time.Now())
		require.Equal(t, ranks[1].s.Handle(), o.Stream)
		require.NotEmpty(t, o.Frames)
		require.Contains(t, o.Frames[0].Name, "nccl_test.")
		require.Contains(t, o.Frames[0].Filename, "_test.go")
	}
	require.Equal(t, []string{
		"ncclAllReduce(8 x int64, avg) as collective 2", "ncclAllReduce(8 x int64, avg) as collective 3",
		"ncclRecv(3 x int64, from rank 0) as transfer 1", "ncclAllGather(4 x int64) as collective 4",
	}, texts)
	require.Equal(t, []int{4, 8, -1}, []int{list[3].In, list[3].Out, list[3].Root})
	require.Equal(t, memory.Int64, list[0].DType)

	checkDump(t, ranks)
	checkDumpedSource(t, ranks[1])
}

// checkDumpedSource checks the object that tells where a dump comes from.
func checkDumpedSource(t *testing.T, r rank) {
	var b bytes.Buffer
	require.NoError(t, r.c.DumpTrace(&b))
	type clock struct {
		Wall      int64 `json:"wall_ns"`
		Monotonic int64 `json:"monotonic_ns"`
	}
	var d struct {
		Chorus struct {
			Format int              `json:"format"`
			Host   string           `json:"host"`
			PID    int              `json:"pid"`
			Clock  clock            `json:"clock"`
			Origin clock            `json:"clock_origin"`
			Groups []map[string]any `json:"groups"`
		} `json:"chorus"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &d))
	host, err := os.Hostname()
	require.NoError(t, err)
	c := d.Chorus
	require.Equal(t, []any{1, host, os.Getpid()}, []any{c.Format, c.Host, c.PID})
	require.WithinRange(t, time.Unix(0, c.Clock.Wall), time.Now().Add(-time.Minute), time.Now())
	require.InDelta(t, c.Clock.Wall-c.Origin.Wall, c.Clock.Monotonic-c.Origin.Monotonic, float64(time.Second))
	require.Len(t, c.Groups, 1)
	for field, want := range map[string]any{
		"rank": 1.0, "world_rank": nil, "world_ranks": nil, "world_size": 0.0, "device": "virtual:1", "capacity": 4.0, "issued": 5.0, "accepted": 5.0,
	} {
		require.Equal(t, want, c.Groups[0][field], field)
	}
	require.Contains(t, c.Groups[0]["uuid"], "GPU-")
}

// checkDump reads what TestTrace has left as a tool of PyTorch would.
func checkDump(t *testing.T, ranks []rank) {
	until(t, func() bool { return ranks[0].c.Progress().Completed.Record == 5 })
	var b bytes.Buffer
	require.NoError(t, ranks[0].c.DumpTrace(&b))
	var d struct {
		Version string                       `json:"version"`
		Library string                       `json:"comm_lib_version"`
		Config  map[string]map[string]any    `json:"pg_config"`
		Status  map[string]map[string]string `json:"pg_status"`
		Entries []map[string]any             `json:"entries"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &d))
	require.Equal(t, []string{"2.10", "2.28.3"}, []string{d.Version, d.Library})
	require.Len(t, d.Config, 1)
	for id, g := range d.Config {
		require.Equal(t, []any{"ring", "[0, 1]"}, []any{g["desc"], g["ranks"]})
		require.Equal(t, map[string]string{"last_enqueued_collective": "4", "last_started_collective": "4", "last_completed_collective": "4"}, d.Status[id])
	}
	require.Len(t, d.Entries, 4)
	e := d.Entries[2]
	require.Equal(t, "nccl:send 0->1", e["profiling_name"])
	require.Equal(t, true, e["is_p2p"])
	require.Equal(t, []any{3.0, 1.0, 3.0}, []any{e["collective_seq_id"], e["p2p_seq_id"], e["input_sizes"].([]any)[0].([]any)[0]})
	e = d.Entries[3]
	for field, want := range map[string]any{
		"record_id": 5.0, "collective_seq_id": 4.0, "op_id": 5.0, "profiling_name": "nccl:_all_gather_base", "state": "completed",
		"retired": true, "timeout_ms": 60000.0, "is_p2p": false, "input_dtypes": []any{"Long"}, "output_dtypes": []any{"Long"},
		"input_sizes": []any{[]any{4.0}}, "output_sizes": []any{[]any{8.0}},
	} {
		require.Equal(t, want, e[field], field)
	}
	require.NotZero(t, e["time_created_ns"])
	require.GreaterOrEqual(t, e["time_discovered_completed_ns"], e["time_created_ns"])
	require.Equal(t, "ring", e["process_group"].([]any)[1])
	require.Contains(t, e["frames"].([]any)[0].(map[string]any)["name"], "nccl_test.")

	b.Reset()
	require.NoError(t, nccl.DumpTrace(&b))
	require.NoError(t, json.Unmarshal(b.Bytes(), &d))
	require.Len(t, d.Entries, 8, "of both ranks")
	groups := map[any]bool{}
	for _, e := range d.Entries {
		groups[e["process_group"].([]any)[0]] = true
	}
	require.Len(t, groups, 1, "which tools must see to be of one group")
}

func TestTraceIsLeftByAFailure(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "trace-")
	ranks := failWithTrace(t, prefix)
	text, err := os.ReadFile(prefix + "0")
	require.NoError(t, err)
	require.Contains(t, string(text), `"state":"started"`)
	require.Contains(t, string(text), `"time_discovered_completed_ns":null`)
	require.Len(t, ranks[0].c.Trace(), 1, "it is there after the end")
	var b bytes.Buffer
	require.NoError(t, nccl.DumpTrace(&b))
	require.Contains(t, b.String(), "nccl:all_reduce")
	require.NoError(t, ranks[0].c.Close())
	until(t, func() bool { return ranks[1].c.Err() != nil })
	require.NoError(t, ranks[1].c.Close())
	b.Reset()
	require.NoError(t, nccl.DumpTrace(&b))
	require.NotContains(t, b.String(), "nccl:all_reduce", "closed ones are forgotten")
}

// Communicators that have a rank in common leave their traces in files of their names.
// The ranks have the folder of the test to themselves: its removal fails if a rank writes after its Close.
func TestTraceOfANamedCommunicator(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "trace-")
	t.Setenv("CHORUS_NCCL_TRACE_FILE", prefix)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 8})
	for _, name := range []string{"a/b", "c"} {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: soon, Name: name})
		xs, _ := buffers(t, ranks, 8)
		require.ErrorIs(t, issueAlone(t, ranks[0], xs[0]), nccl.ErrorTimeout)
	}
	for file, name := range map[string]string{"0-a_b": `"a/b"`, "0-c": `"c"`} {
		text, err := os.ReadFile(prefix + file)
		require.NoError(t, err)
		require.Contains(t, string(text), name)
	}
}

func TestTraceSettings(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	off := connectWith(t, devs, &nccl.Config{TraceSize: -1})[0]
	xs, _ := buffers(t, []rank{off}, 8)
	require.NoError(t, nccl.AllReduce(off.c, off.s, xs[0], xs[0], nccl.Sum))
	require.Empty(t, off.c.Trace())
	require.EqualValues(t, 1, off.c.Progress().Issued.Record)
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	_, err = nccl.NewCommunicator(t.Context(), devs[0], id, 0, 1, &nccl.Config{TraceSize: 1<<20 + 1})
	require.ErrorContains(t, err, "a flight recorder of 1048577 operations: want at most 1048576 in Config.TraceSize")
	for _, value := range []string{"1048577", "", "all"} {
		t.Setenv(env.NCCLTraceSize.Name, value)
		_, err = nccl.NewCommunicator(t.Context(), devs[0], id, 0, 1, nil)
		require.EqualError(t, err, fmt.Sprintf("nccl: env: CHORUS_NCCL_TRACE_SIZE=%q: want a whole number of operations of at most 1048576, or 0 or less for no flight recorder", value))
	}
	require.ErrorContains(t, nccl.DumpTrace(nil), "nothing to write to given")
	_, err = nccl.NewUniqueID(nil)
	require.ErrorContains(t, err, "no device given")
	_, err = off.c.Register(nil)
	require.ErrorContains(t, err, "no buffer given")
	t.Setenv("CHORUS_NCCL_TRACE_SIZE", "0")
	t.Setenv("CHORUS_NCCL_TRACE_FRAMES", "maybe")
	id, err = nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	_, err = nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, nil)
	require.ErrorContains(t, err, "CHORUS_NCCL_TRACE_FRAMES")
	t.Setenv("CHORUS_NCCL_TRACE_FRAMES", "no")
	t.Setenv("CHORUS_NCCL_TIMEOUT", "soon")
	_, err = nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, nil)
	require.ErrorContains(t, err, "CHORUS_NCCL_TIMEOUT")
}
