package nccl_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

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
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
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
			require.Equal(t, err, nccl.Group(func(b *nccl.Batch) error {
				return nccl.AllReduce(b.On(r.c), r.s, xs[i], xs[i], nccl.Sum)
			}))
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
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
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
}

// A rank that issues more than its stream takes, while another one does not come, waits in
// the driver, which then answers nobody who asks about the device.
func TestDeadlineOfAFullStream(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
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
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
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
	go func() {
		_ = nccl.Group(func(b *nccl.Batch) error { return nccl.AllReduce(b.On(ranks[0].c), ranks[0].s, xs[0], xs[0], nccl.Sum) })
	}()
	until(t, func() bool { return ranks[0].c.Err() != nil })
	require.ErrorContains(t, ranks[0].c.Err(), "ncclAllReduce(4 x int64, sum) as collective 1")
	require.ErrorContains(t, ranks[0].c.Err(), "none is known to have completed")
	until(t, ranks[0].c.Closed) // not by this test, which NCCL tells of the group that is still open
}

// What is done is known to be done a moment later, though the stream goes on.
func TestProgress(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
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
	r := connectWith(t, devs, &nccl.Config{Timeout: ample})[0]
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
			one := func(on nccl.Issuer) error { return nccl.Send(on, ranks[0].s, xs[0], 1) }
			send := func() error { return one(ranks[0].c) }
			if call == "ncclGroupEnd#1" {
				send = func() error { return nccl.Group(func(b *nccl.Batch) error { return one(b.On(ranks[0].c)) }) }
			}
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
		one := func(on nccl.Issuer) error { return nccl.Send(on, ranks[0].s, xs[0], 1) }
		if call == "ncclGroupEnd#1" {
			require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error { return one(b.On(ranks[0].c)) }), nccl.ErrorSystem)
		} else {
			require.ErrorIs(t, one(ranks[0].c), nccl.ErrorSystem)
		}
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
		for i, r := range ranks {
			got := make([]int64, 32)
			require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
			require.NoError(t, xs[i].CopyTo(r.s, got))
			require.Equal(t, sum(in), got)
		}
	})
}

// A call that NCCL refuses takes no number: the ranks still fit.
func TestARefusedOperationCountsForNothing(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAllReduce#1=ncclInvalidUsage, ncclReduce#2=ncclInvalidUsage"})
	ranks := connect(t, devs)
	xs, in := buffers(t, ranks, 4)
	a, b := ranks[0], ranks[1]
	require.ErrorIs(t, nccl.AllReduce(a.c, a.s, xs[0], xs[0], nccl.Sum), nccl.ErrorInvalidUsage)
	require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error {
		for i, r := range ranks {
			err := errors.Join(nccl.Broadcast(b.On(r.c), r.s, xs[i], xs[i], 0), nccl.Reduce(b.On(r.c), r.s, xs[i], xs[i], nccl.Sum, 0))
			if err != nil {
				return err
			}
		}
		return nil
	}), nccl.ErrorInvalidUsage)
	require.Empty(t, a.c.Trace())
	require.Empty(t, b.c.Trace())
	each(t, devs, func(i int) error {
		return nccl.AllGather(ranks[i].c, ranks[i].s, xs[i], xs[i].Slice(2*i, 2*i+2))
	})
	for i, r := range ranks {
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		got := make([]int64, 4)
		require.NoError(t, xs[i].CopyTo(r.s, got))
		require.Equal(t, append(in[0][:2:2], in[1][2:]...), got)
		require.EqualValues(t, 1, r.c.Progress().Issued.Collective)
	}
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
