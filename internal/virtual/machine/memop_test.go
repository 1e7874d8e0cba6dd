package machine

import (
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// memOps enqueues operations on words.
func (r *rig) memOps(dev int, s cudadrv.Stream, ops ...cudadrv.StreamMemOp) cudadrv.Result {
	return r.On(dev, func() cudadrv.Result { return r.Drv.StreamBatchMemOp(s, ops) })
}

// word returns what a word of device memory has, after all work on the stream.
func (r *rig) word(s cudadrv.Stream, p cudadrv.DevicePtr) (x uint32) {
	r.Do(0, func() cudadrv.Result { return r.Drv.MemcpyDtoHAsync(unsafe.Pointer(&x), p, 4, s) })
	return x
}

// A stream waits until another one, of any device, has written a bit that it waits for.
func TestStreamsWaitForWords(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	a, b, p := r.Stream(0), r.Stream(1), r.Alloc(0, 8)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 8, a) })
	r.Sync(0, a)
	r.Do(1, func() cudadrv.Result { return r.Drv.CtxEnablePeerAccess(r.Contexts[0], 0) })
	r.OK(r.memOps(0, a, cudadrv.StreamMemOp{At: p, Value: 6, Waits: true}, cudadrv.StreamMemOp{At: p + 4, Value: 9}))
	for _, bit := range []uint32{1, 8} {
		r.OK(r.memOps(1, b, cudadrv.StreamMemOp{At: p, Value: bit}))
		r.Sync(1, b)
		require.Equal(t, cudadrv.ErrorNotReady, r.On(0, func() cudadrv.Result { return r.Drv.StreamQuery(a) }))
	}
	r.OK(r.memOps(1, b, cudadrv.StreamMemOp{At: p, Value: 4}))
	r.Sync(0, a)
	require.EqualValues(t, 9, r.word(a, p+4))

	require.Equal(t, cudadrv.ErrorInvalidValue, r.memOps(0, a), "no operation")
	require.Equal(t, cudadrv.ErrorInvalidValue, r.memOps(0, a, cudadrv.StreamMemOp{At: p + 2}))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.memOps(0, a, make([]cudadrv.StreamMemOp, 1)...), "no address")
	require.Empty(t, r.m.Reports())
	r.OK(r.memOps(0, a, cudadrv.StreamMemOp{At: p + 8}))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(a) }), "past the end of the block")
}

// A graph waits and writes at each launch.
func TestGraphsWaitForWords(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, by, p := r.Stream(0), r.Stream(0), r.Alloc(0, 8)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 8, s) })
	r.Sync(0, s)
	e := r.captured(s, func() {
		r.OK(r.memOps(0, s, cudadrv.StreamMemOp{At: p, Value: 1, Waits: true}, cudadrv.StreamMemOp{At: p}))
	})
	for range 3 {
		r.OK(r.replay(e, s))
		require.Equal(t, cudadrv.ErrorNotReady, r.On(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) }))
		r.OK(r.memOps(0, by, cudadrv.StreamMemOp{At: p, Value: 1}))
		r.Sync(0, s)
		require.Zero(t, r.word(s, p))
	}
	require.Empty(t, r.m.Reports())
}

// As many waits as there are hardware queues hold up everything else of the device, also the stream that would end them.
func TestWaitsForWordsHoldQueues(t *testing.T) {
	for _, waits := range []int{1, 2} {
		cfg := Config{Devices: 1, Queues: 2}
		if waits == 2 {
			cfg.Hang = soon
		}
		r := newRig(t, cfg)
		p, last := r.Alloc(0, 4), r.Stream(0)
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 4, last) })
		r.Sync(0, last)
		for range waits {
			r.OK(r.memOps(0, r.Stream(0), cudadrv.StreamMemOp{At: p, Value: 1, Waits: true}))
		}
		require.Eventually(t, func() bool {
			r.m.Lock()
			defer r.m.Unlock()
			return r.m.devices[0].valueWaits == waits
		}, time.Minute, time.Millisecond)
		r.OK(r.memOps(0, last, cudadrv.StreamMemOp{At: p, Value: 1}))
		res := r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(last) })
		if waits == 2 {
			require.Equal(t, cudadrv.ErrorLaunchTimeout, res)
			require.Contains(t, r.m.Explain(0), "CUDA_DEVICE_MAX_CONNECTIONS")
			continue
		}
		r.OK(res)
		r.OK(r.On(0, r.Drv.CtxSynchronize))
		require.Empty(t, r.m.Reports())
	}
}

// Accesses of memory that an allocator shares need no order, until it is freed.
func TestSharedMemoryNeedsNoOrder(t *testing.T) {
	for _, shared := range []bool{true, false} {
		r := newRig(t, Config{Devices: 1})
		audit := r.Drv.(cudadrv.Auditor)
		a, b, p := r.Stream(0), r.Stream(0), r.Alloc(0, 4096)
		fill := func(s cudadrv.Stream) { r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 64, s) }) }
		r.OK(audit.MemAllocated(p, 64, a))
		r.OK(audit.MemShare(p, 64, a))
		r.Sync(0, a)
		fill(a)
		fill(b)
		r.OK(r.On(0, r.Drv.CtxSynchronize))
		require.Empty(t, r.m.Reports())
		if !shared {
			r.OK(audit.MemFreed(p, 64, a))
			r.OK(audit.MemAllocated(p, 64, a))
			r.Sync(0, a)
			fill(a)
			r.On(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 64, b) })
			require.Equal(t, cudadrv.ErrorLaunchFailed, r.On(0, r.Drv.CtxSynchronize))
		}
	}
}
