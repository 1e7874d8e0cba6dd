package virtual

import (
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/stretchr/testify/require"
)

func TestContextIsConsumed(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.ok(r.drv.CtxSetCurrent(r.ctxs[0]))
	_, _, res := r.drv.MemGetInfo()
	r.ok(res)
	_, _, res = r.drv.MemGetInfo()
	require.Equal(t, cudadrv.ErrorInvalidContext, res)
}

func TestNotInitialized(t *testing.T) {
	m, err := New(&Config{Devices: 1})
	require.NoError(t, err)
	_, res := m.Driver().DeviceGetCount()
	require.Equal(t, cudadrv.ErrorNotInitialized, res)
}

func TestUseAfterFree(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, 64)
	r.do(0, func() cudadrv.Result { return r.drv.MemFreeAsync(p, s) })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(0, func() cudadrv.Result { return r.drv.MemFreeAsync(p, s) }))
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p+8, 0, 8, s) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	for _, part := range []string{"virtual device 0", "cuMemsetD8Async", "used 8 bytes", "the block of 64 bytes", "was freed by cuMemFreeAsync", "seed"} {
		require.Contains(t, r.m.Explain(0), part)
	}
	// The error stays, but what gives something up works.
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { _, res := r.drv.MemAlloc(1); return res }))
	r.do(0, func() cudadrv.Result { return r.drv.StreamDestroy(s) })
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.on(0, func() cudadrv.Result { return r.drv.StreamDestroy(s) }))
}

func TestNewMemoryIsPoisoned(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, 4*poisonPage)
	for _, at := range []cudadrv.DevicePtr{0, 2*poisonPage - 8, 4*poisonPage - 8} {
		for _, x := range download[float32](r, 0, s, p+at, 2) {
			require.NotEqual(t, x, x, "not a NaN")
		}
		for _, x := range download[float64](r, 0, s, p+at, 1) {
			require.NotEqual(t, x, x, "not a NaN")
		}
	}
}

func TestMemoryIsCounted(t *testing.T) {
	r := newRig(t, Config{Devices: 2, Memory: 1000})
	p := r.alloc(0, 600)
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.on(0, func() cudadrv.Result { _, res := r.drv.MemAlloc(401); return res }))
	r.alloc(1, 1000)
	r.do(0, func() cudadrv.Result {
		free, total, res := r.drv.MemGetInfo()
		require.Equal(t, [2]uintptr{400, 1000}, [2]uintptr{free, total})
		return res
	})
	r.do(0, func() cudadrv.Result { return r.drv.MemFree(p) })
	r.alloc(0, 1000)
}

// Rows go to other devices only where the context has access to them.
func TestRowsWantPeerAccess(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	s, x, y := r.stream(0), r.alloc(0, 4), r.alloc(1, 4)
	upload(r, 0, s, x, []float32{3})
	r.do(0, func() cudadrv.Result {
		return r.drv.Memcpy2DAsync(cudadrv.Memcpy2D{Dst: y, Src: x, DstPitch: 4, SrcPitch: 4, WidthInBytes: 4, Height: 1}, s)
	})
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "device 0 was not given access to it")
}

func TestPeerAccess(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	s := r.stream(0)
	x, y := r.alloc(0, 4), r.alloc(1, 4)
	f := r.function(0, axpy)
	upload(r, 0, s, x, []float32{3})
	upload(r, 0, s, y, []float32{4})
	r.sync(0, s)
	r.do(0, func() cudadrv.Result { return r.drv.CtxEnablePeerAccess(r.ctxs[1], 0) })
	r.axpy(0, f, s, 2, x, y, 1)
	require.Equal(t, []float32{10}, download[float32](r, 0, s, y, 1))

	// Memory of a pool wants the pool's permission instead.
	var z cudadrv.DevicePtr
	other := r.stream(1)
	r.do(1, func() (res cudadrv.Result) { z, res = r.drv.MemAllocAsync(4, other); return res })
	r.sync(1, other)
	r.axpy(0, f, s, 2, x, z, 1)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "device 0 was not given access to it")
	require.Empty(t, r.m.Explain(1))
}

func TestFreeRacesWithUse(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.stream(0), r.stream(0)
	p := r.alloc(0, 64)
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 0, 64, a) })
	r.do(0, func() cudadrv.Result { return r.drv.MemFreeAsync(p, b) })
	res := r.on(0, r.drv.CtxSynchronize)
	require.Contains(t, []cudadrv.Result{cudadrv.ErrorLaunchFailed, cudadrv.ErrorIllegalAddress}, res)
	require.NotEmpty(t, r.m.Explain(0))
}

// TestOrderedUseIsNoRace has the orders that must not be taken for races: the
// host's waits, disjoint bytes, reads, and a chain of events.
func TestOrderedUseIsNoRace(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, c := r.stream(0), r.stream(0), r.stream(0)
	p, e := r.alloc(0, 4096), r.event(0)
	set := func(s cudadrv.Stream, at, n uintptr) {
		r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p+cudadrv.DevicePtr(at), 1, n, s) })
	}
	follow := func(after, s cudadrv.Stream) {
		r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, s) })
		r.do(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(after, e, 0) })
	}
	for range 50 {
		set(a, 0, 1024)
		set(b, 1024, 1024)
		follow(b, a)
		follow(c, b)
		set(c, 512, 1024)
		follow(a, c)
		follow(b, c)
		download[byte](r, 0, a, p, 2048)
		download[byte](r, 0, b, p, 2048)
		r.sync(0, b)
	}
	r.do(0, r.drv.CtxSynchronize)
	set(c, 0, 4096)
	r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, c) })
	for r.on(0, func() cudadrv.Result { return r.drv.EventQuery(e) }) == cudadrv.ErrorNotReady {
		runtime.Gosched()
	}
	set(a, 0, 4096)
	for r.on(0, func() cudadrv.Result { return r.drv.StreamQuery(a) }) == cudadrv.ErrorNotReady {
		runtime.Gosched()
	}
	set(b, 0, 4096)
	r.do(0, r.drv.CtxSynchronize)
	require.Empty(t, r.m.Reports())
}

func TestEventOfAnotherDevice(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	var s [2]cudadrv.Stream
	var e [2]cudadrv.Event
	for i := range s {
		s[i], e[i] = r.stream(i), r.event(i)
		r.do(i, func() cudadrv.Result { return r.drv.EventRecord(e[i], s[i]) })
		r.do(i, func() cudadrv.Result { return r.drv.EventSynchronize(e[i]) })
	}
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.on(0, func() cudadrv.Result { return r.drv.EventRecord(e[1], s[0]) }))
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.on(0, func() cudadrv.Result {
		_, res := r.drv.EventElapsedTime(e[0], e[1])
		return res
	}))
	r.do(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(s[0], e[1], 0) })
	r.sync(0, s[0])
}

func TestPinnedCopyIsAsynchronous(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "hang@cuMemsetD8Async#1"})
	s, p := r.stream(0), r.alloc(0, 8)
	var host unsafe.Pointer
	r.do(0, func() (res cudadrv.Result) { host, res = r.drv.MemHostAlloc(8, 0); return res })
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 0, 8, s) })
	r.do(0, func() cudadrv.Result { return r.drv.MemcpyHtoDAsync(p, host, 8, s) })
	r.do(0, func() cudadrv.Result { return r.drv.MemcpyDtoHAsync(host, p, 8, s) })
	require.Equal(t, cudadrv.ErrorNotReady, r.on(0, func() cudadrv.Result { return r.drv.StreamQuery(s) }))
}

func TestFreedPinnedMemoryInUse(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, e := r.stream(0), r.stream(0), r.event(0)
	p := r.alloc(0, 8)
	var host unsafe.Pointer
	r.do(0, func() (res cudadrv.Result) { host, res = r.drv.MemHostAlloc(8, 0); return res })
	gate := make(chan struct{})
	f := r.function(0, Kernel{Name: "gate", Func: func(*KernelCall) { <-gate }})
	r.do(0, func() cudadrv.Result {
		return r.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, a, nil)
	})
	r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, a) })
	r.do(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(b, e, 0) })
	r.do(0, func() cudadrv.Result { return r.drv.MemcpyHtoDAsync(p, host, 8, b) })
	r.do(0, func() cudadrv.Result { return r.drv.MemFreeHost(host) })
	close(gate)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(b) }))
	require.Contains(t, r.m.Explain(0), "before the copy ran")
}

func TestFaultPlan(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "cuMemAlloc#2=CUDA_ERROR_OUT_OF_MEMORY, cuEventCreate#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
	r.alloc(0, 1)
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.on(0, func() cudadrv.Result { _, res := r.drv.MemAlloc(1); return res }))
	r.alloc(0, 1)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { _, res := r.drv.EventCreate(0); return res }))
	require.Contains(t, r.m.Explain(0), "fault plan")
	for _, bad := range []string{"cuMemAlloc", "cuMemAlloc#0=CUDA_ERROR_UNKNOWN", "cuNothing#1=CUDA_ERROR_UNKNOWN", "cuMemAlloc#1=no",
		"stop@cuMemAlloc#1", "async@cuMemAlloc#1=CUDA_ERROR_UNKNOWN", "async@ncclAllReduce#1", "hang@cuMemAlloc#1=CUDA_ERROR_UNKNOWN", "ncclAllReduce#1=CUDA_ERROR_UNKNOWN"} {
		_, err := New(&Config{Devices: 1, Faults: bad})
		require.ErrorContains(t, err, "want call#n=status", bad)
	}
}

func TestContextReset(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, 100)
	r.ok(r.drv.DevicePrimaryCtxRelease(0))
	require.Equal(t, cudadrv.ErrorContextIsDestroyed, r.drv.CtxSetCurrent(r.ctxs[0]))
	require.Equal(t, cudadrv.ErrorInvalidContext, r.drv.DevicePrimaryCtxRelease(0))
	_, res := r.drv.DevicePrimaryCtxRetain(0)
	r.ok(res)
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(0, func() cudadrv.Result { return r.drv.MemFree(p) }))
}

func TestSameUUIDInEveryMachine(t *testing.T) {
	a, b := newRig(t, Config{Devices: 2}), newRig(t, Config{Devices: 3})
	for d := range cudadrv.Device(2) {
		x, _ := a.drv.DeviceGetUUID(d)
		y, _ := b.drv.DeviceGetUUID(d)
		require.Equal(t, x, y)
	}
}

// Who has waited for a stream finds it idle, however late its goroutine ends.
func TestQueryAfterWait(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	p := r.alloc(0, 64)
	stop := make(chan struct{})
	defer close(stop)
	for range 4 { // who want the machine's lock as well
		go func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = r.drv.DeviceGetCount()
				}
			}
		}()
	}
	for range 200 {
		r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 64, s) })
		r.do(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) })
		r.do(0, func() cudadrv.Result { return r.drv.StreamQuery(s) })
	}
}

// A stream that is destroyed goes on with its work, and memory is not freed before.
func TestFreeWaitsForDestroyedStreams(t *testing.T) {
	for name, wait := range map[string]func(r *rig, p cudadrv.DevicePtr) cudadrv.Result{
		"free": func(r *rig, p cudadrv.DevicePtr) cudadrv.Result { return r.drv.MemFree(p) },
		"sync": func(r *rig, p cudadrv.DevicePtr) cudadrv.Result { return r.drv.CtxSynchronize() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 1})
			s, p := r.stream(0), r.alloc(0, 64)
			gate := make(chan struct{})
			r.do(0, func() cudadrv.Result { return r.drv.LaunchHostFunc(s, dl.OnceClosure(func() { <-gate })) })
			r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 64, s) })
			r.do(0, func() cudadrv.Result { return r.drv.StreamDestroy(s) })
			done := make(chan cudadrv.Result, 1)
			go func() { done <- r.on(0, func() cudadrv.Result { return wait(r, p) }) }()
			select {
			case res := <-done:
				t.Fatalf("returned %v while the stream was at work", res)
			case <-time.After(20 * time.Millisecond):
			}
			close(gate)
			r.ok(<-done)
			if name == "sync" {
				r.do(0, func() cudadrv.Result { return r.drv.MemFree(p) })
			}
			require.Empty(t, r.m.Reports())
		})
	}
}
