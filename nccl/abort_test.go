package nccl_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Abort ends operations also where the stream is full of them, and the call that waits for
// room does not find the communicator freed. The process goes on.
func TestAbortOfAFullStream(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		nccl.SetAbortTimeout(t, time.Minute)
		ranks := connect(t, devs)
		xs, _ := buffers(t, ranks, 8)
		once(t, devs, ranks, xs)
		r, aborted := ranks[0], make(chan error, 1)
		require.NoError(t, flood(r, xs[0], func(err error) bool {
			if r.c.Progress().Issued.Collective == 500 { // and soon full
				go func() { aborted <- r.c.Abort() }()
			}
			return err != nil
		}))
		require.NoError(t, <-aborted)
		require.NoError(t, ranks[1].c.Abort())
		require.NoError(t, r.s.Sync(testgpu.Context(t)))
		once(t, devs, connect(t, devs), xs)
	})
}

// abortLimit is how long an abort may take. Virtual devices are as slow as the machine
// is busy.
func abortLimit(devs []*device.Device) time.Duration {
	if devs[0].System().Backend() == "cuda" {
		return 2 * time.Second
	}
	return 10 * time.Second
}

// The first operation waits in NCCL until the other ranks issue theirs, and an abort ends the wait.
func TestAbortOfAFirstOperation(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for name, first := range map[string]func(r rank, x memory.Slice[int64]) error{
			"all-reduce": func(r rank, x memory.Slice[int64]) error { return nccl.AllReduce(r.c, r.s, x, x, nccl.Sum) },
			"send":       func(r rank, x memory.Slice[int64]) error { return nccl.Send(r.c, r.s, x, 1) },
		} {
			ranks := connectWith(t, devs, &nccl.Config{Timeout: -1})
			xs, _ := buffers(t, ranks, 8)
			issued := make(chan error, 1)
			go func() { issued <- first(ranks[0], xs[0]) }()
			until(t, func() bool { return ranks[0].c.Progress().Issued.Record > 0 })
			require.NoError(t, ranks[0].c.Abort(), name)
			require.Error(t, <-issued, name)
			require.NoError(t, ranks[1].c.Abort())
		}
	})
}

// An abort while an operation hangs ends, and the devices are good for another
// communicator, many times.
func TestAbortManyTimes(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		times := 100
		if devs[0].System().Backend() == "cuda" {
			times = 5 // a communicator takes seconds to make
		}
		for range times {
			ranks := connect(t, devs)
			xs, _ := buffers(t, ranks, 1<<14)
			once(t, devs, ranks, xs)
			require.NoError(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum))
			begun := time.Now()
			each(t, devs, func(i int) error { return ranks[i].c.Abort() })
			require.NoError(t, ranks[0].s.Sync(testgpu.Context(t)))
			require.Less(t, time.Since(begun), abortLimit(devs))
		}
	})
}

// An abort ends an operation that runs, and not when it is done.
func TestAbortWhileALargeOperationRuns(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		n := 1 << 23 // 32 MiB
		if devs[0].System().Backend() == "cuda" {
			n = 1 << 28 // 1 GiB
		}
		for range 5 {
			ranks := connect(t, devs)
			total(t, ranks)
			xs := make([]memory.Slice[float32], 2)
			each(t, devs, func(i int) (err error) {
				if xs[i], err = memory.Make[float32](ranks[i].s, n); err != nil {
					return err
				}
				return xs[i].Zero(ranks[i].s)
			})
			require.NoError(t, grouped(ranks, func(i int, r rank) (err error) {
				for k := range 4 {
					x := xs[i].Slice(k*n/4, (k+1)*n/4)
					err = errors.Join(err, nccl.AllReduce(r.on(), r.s, x, x, nccl.Sum))
				}
				return err
			}))
			begun := time.Now()
			each(t, devs, func(i int) error { return ranks[i].c.Abort() })
			each(t, devs, func(i int) error { return ranks[i].s.Sync(testgpu.Context(t)) })
			require.Less(t, time.Since(begun), abortLimit(devs))
			for i := range ranks {
				require.NoError(t, xs[i].Close())
			}
		}
	})
}

// NCCL's own abort may hang; Chorus's does not.
func TestAbortEndsWithoutNCCL(t *testing.T) {
	nccl.SetAbortTimeout(t, 50*time.Millisecond)
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "hang@ncclCommAbort#1"}).Devices()
	cs, err := nccl.NewCommunicators(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	r := rank{c: cs[0]}
	begun := time.Now()
	require.ErrorContains(t, r.c.Abort(), "ncclCommAbort on rank 0 of 1 (virtual:0): it has not returned after 50ms")
	require.Less(t, time.Since(begun), 10*time.Second)
	require.ErrorContains(t, r.c.Abort(), "end the process", "so does whoever comes later")
	require.ErrorContains(t, r.c.Close(), "end the process")
	require.NoError(t, r.c.Err())
	require.ErrorIs(t, reduceAll([]rank{r}, make([]memory.Slice[float32], 1), nccl.Sum), device.ErrClosed)
}

// TestAbortEndsOtherBackends checks that every end of a communicator calls the abort of its
// other backends: Abort, Close, a failure, and a failure that the communicator survives.
func TestAbortEndsOtherBackends(t *testing.T) {
	for name, c := range map[string]struct {
		faults      string
		recoverable bool
		end         func(rank) error
	}{
		"abort":                 {"", false, func(r rank) error { return r.c.Abort() }},
		"close":                 {"", false, func(r rank) error { return r.c.Close() }},
		"a failure":             {"ncclAllReduce#1=ncclInternalError", false, nil},
		"a recoverable failure": {"ncclAllReduce#1=ncclInternalError", true, nil},
	} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: c.faults})
		r := connectWith(t, devs, &nccl.Config{Recoverable: c.recoverable})[0]
		var aborts atomic.Int32
		collective.Of(r.c).AddBackend(func() { aborts.Add(1) })
		if c.end != nil {
			require.NoError(t, c.end(r), name)
		} else {
			xs, _ := buffers(t, []rank{r}, 8)
			require.ErrorIs(t, nccl.AllReduce(r.c, r.s, xs[0], xs[0], nccl.Sum), nccl.ErrorInternal, name)
		}
		until(t, func() bool { return aborts.Load() == 1 })
		require.NoError(t, r.c.Close())
	}
}
