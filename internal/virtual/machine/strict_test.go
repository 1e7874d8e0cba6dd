package machine

import (
	"bytes"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

func TestContextIsConsumed(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.OK(r.Drv.CtxSetCurrent(r.Contexts[0]))
	_, _, res := r.Drv.MemGetInfo()
	r.OK(res)
	_, _, res = r.Drv.MemGetInfo()
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
	s, p := r.Stream(0), r.Alloc(0, 64)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(p, s) })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(p, s) }))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p+8, 0, 8, s) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	for _, part := range []string{"virtual device 0", "cuMemsetD8Async", "used 8 bytes", "the block of 64 bytes", "was freed by cuMemFreeAsync", "seed"} {
		require.Contains(t, r.m.Explain(0), part)
	}
	// The error stays, but what gives something up works.
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { _, res := r.Drv.MemAlloc(1); return res }))
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamDestroy(s) })
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.On(0, func() cudadrv.Result { return r.Drv.StreamDestroy(s) }))
}

func TestFreeTwiceOnALostDevice(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	p := r.Alloc(0, 64)
	r.m.devices[0].lose(cudadrv.ErrorIllegalAddress, "the test loses it")
	for range 2 {
		require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.MemFree(p) }))
	}
}

func TestNewMemoryIsPoisoned(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 4*poisonPage)
	for _, at := range []cudadrv.DevicePtr{0, 2*poisonPage - 8, 4*poisonPage - 8} {
		for _, x := range virtualtest.Download[float32](r.Rig, 0, s, p+at, 2) {
			require.NotEqual(t, x, x, "not a NaN")
		}
		for _, x := range virtualtest.Download[float64](r.Rig, 0, s, p+at, 1) {
			require.NotEqual(t, x, x, "not a NaN")
		}
	}
}

func TestMemoryIsCounted(t *testing.T) {
	r := newRig(t, Config{Devices: 2, Memory: 1000})
	p := r.Alloc(0, 600)
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.On(0, func() cudadrv.Result { _, res := r.Drv.MemAlloc(401); return res }))
	r.Alloc(1, 1000)
	r.Do(0, func() cudadrv.Result {
		free, total, res := r.Drv.MemGetInfo()
		require.Equal(t, [2]uintptr{400, 1000}, [2]uintptr{free, total})
		return res
	})
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
	r.Alloc(0, 1000)
}

// Rows go to other devices only where the context has access to them.
func TestRowsWantPeerAccess(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	s, x, y := r.Stream(0), r.Alloc(0, 4), r.Alloc(1, 4)
	virtualtest.Upload(r.Rig, 0, s, x, []float32{3})
	r.Do(0, func() cudadrv.Result {
		return r.Drv.Memcpy2DAsync(cudadrv.Memcpy2D{Dst: y, Src: x, DstPitch: 4, SrcPitch: 4, WidthInBytes: 4, Height: 1}, s)
	})
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "device 0 was not given access to it")
}

func TestPeerAccess(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	s := r.Stream(0)
	x, y := r.Alloc(0, 4), r.Alloc(1, 4)
	f := r.function(0, axpy)
	virtualtest.Upload(r.Rig, 0, s, x, []float32{3})
	virtualtest.Upload(r.Rig, 0, s, y, []float32{4})
	r.Sync(0, s)
	r.Do(0, func() cudadrv.Result { return r.Drv.CtxEnablePeerAccess(r.Contexts[1], 0) })
	r.axpy(0, f, s, 2, x, y, 1)
	require.Equal(t, []float32{10}, virtualtest.Download[float32](r.Rig, 0, s, y, 1))

	// Memory of a pool wants the pool's permission instead.
	var z cudadrv.DevicePtr
	other := r.Stream(1)
	r.Do(1, func() (res cudadrv.Result) { z, res = r.Drv.MemAllocAsync(4, other); return res })
	r.Sync(1, other)
	r.axpy(0, f, s, 2, x, z, 1)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "device 0 was not given access to it")
	require.Empty(t, r.m.Explain(1))
}

func TestFreeRacesWithUse(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.Stream(0), r.Stream(0)
	p := r.Alloc(0, 64)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 64, a) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(p, b) })
	res := r.On(0, r.Drv.CtxSynchronize)
	require.Contains(t, []cudadrv.Result{cudadrv.ErrorLaunchFailed, cudadrv.ErrorIllegalAddress}, res)
	require.NotEmpty(t, r.m.Explain(0))
}

// TestOrderedUseIsNoRace has the orders that must not be taken for races: the
// host's waits, disjoint bytes, reads, and a chain of events.
func TestOrderedUseIsNoRace(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, c := r.Stream(0), r.Stream(0), r.Stream(0)
	p, e := r.Alloc(0, 4096), r.Event(0)
	set := func(s cudadrv.Stream, at, n uintptr) {
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p+cudadrv.DevicePtr(at), 1, n, s) })
	}
	follow := func(after, s cudadrv.Stream) {
		r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, s) })
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(after, e, 0) })
	}
	for range 50 {
		set(a, 0, 1024)
		set(b, 1024, 1024)
		follow(b, a)
		follow(c, b)
		set(c, 512, 1024)
		follow(a, c)
		follow(b, c)
		virtualtest.Download[byte](r.Rig, 0, a, p, 2048)
		virtualtest.Download[byte](r.Rig, 0, b, p, 2048)
		r.Sync(0, b)
	}
	r.Do(0, r.Drv.CtxSynchronize)
	set(c, 0, 4096)
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, c) })
	for r.On(0, func() cudadrv.Result { return r.Drv.EventQuery(e) }) == cudadrv.ErrorNotReady {
		runtime.Gosched()
	}
	set(a, 0, 4096)
	for r.On(0, func() cudadrv.Result { return r.Drv.StreamQuery(a) }) == cudadrv.ErrorNotReady {
		runtime.Gosched()
	}
	set(b, 0, 4096)
	r.Do(0, r.Drv.CtxSynchronize)
	require.Empty(t, r.m.Reports())
}

func TestEventOfAnotherDevice(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	var s [2]cudadrv.Stream
	var e [2]cudadrv.Event
	for i := range s {
		s[i], e[i] = r.Stream(i), r.Event(i)
		r.Do(i, func() cudadrv.Result { return r.Drv.EventRecord(e[i], s[i]) })
		r.Do(i, func() cudadrv.Result { return r.Drv.EventSynchronize(e[i]) })
	}
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.On(0, func() cudadrv.Result { return r.Drv.EventRecord(e[1], s[0]) }))
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.On(0, func() cudadrv.Result {
		_, res := r.Drv.EventElapsedTime(e[0], e[1])
		return res
	}))
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(s[0], e[1], 0) })
	r.Sync(0, s[0])
}

func TestPinnedCopyIsAsynchronous(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "hang@cuMemsetD8Async#1"})
	s, p := r.Stream(0), r.Alloc(0, 8)
	var host unsafe.Pointer
	r.Do(0, func() (res cudadrv.Result) { host, res = r.Drv.MemHostAlloc(8, 0); return res })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 0, 8, s) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemcpyHtoDAsync(p, host, 8, s) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemcpyDtoHAsync(host, p, 8, s) })
	require.Equal(t, cudadrv.ErrorNotReady, r.On(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) }))
}

func TestFreedPinnedMemoryInUse(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, e := r.Stream(0), r.Stream(0), r.Event(0)
	p := r.Alloc(0, 8)
	var host unsafe.Pointer
	r.Do(0, func() (res cudadrv.Result) { host, res = r.Drv.MemHostAlloc(8, 0); return res })
	gate := make(chan struct{})
	f := r.function(0, Kernel{Name: "gate", Func: func(*KernelCall) { <-gate }})
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, a, nil)
	})
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, a) })
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(b, e, 0) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemcpyHtoDAsync(p, host, 8, b) })
	freed := make(chan cudadrv.Result, 1)
	go func() { freed <- r.On(0, func() cudadrv.Result { return r.Drv.MemFreeHost(host) }) }()
	select {
	case res := <-freed:
		t.Fatalf("returned %v while a copy used the memory", res)
	case <-time.After(20 * time.Millisecond):
	}
	close(gate)
	r.OK(<-freed)
	r.Sync(0, b)
	require.Empty(t, r.m.Reports())
}

func TestFaultPlan(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "cuMemAlloc#2=CUDA_ERROR_OUT_OF_MEMORY, cuEventCreate#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
	r.Alloc(0, 1)
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.On(0, func() cudadrv.Result { _, res := r.Drv.MemAlloc(1); return res }))
	r.Alloc(0, 1)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { _, res := r.Drv.EventCreate(0); return res }))
	require.Contains(t, r.m.Explain(0), "fault plan")
	for _, bad := range []string{"cuMemAlloc", "cuMemAlloc#0=CUDA_ERROR_UNKNOWN", "cuNothing#1=CUDA_ERROR_UNKNOWN", "cuMemAlloc#1=no",
		"stop@cuMemAlloc#1", "async@cuMemAlloc#1=CUDA_ERROR_UNKNOWN", "async@ncclAllReduce#1", "hang@cuMemAlloc#1=CUDA_ERROR_UNKNOWN", "ncclAllReduce#1=CUDA_ERROR_UNKNOWN"} {
		_, err := New(&Config{Devices: 1, Faults: bad})
		require.ErrorContains(t, err, "want call#n=status", bad)
	}
}

func TestContextReset(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 100)
	r.OK(r.Drv.DevicePrimaryCtxRelease(0))
	require.Equal(t, cudadrv.ErrorContextIsDestroyed, r.Drv.CtxSetCurrent(r.Contexts[0]))
	require.Equal(t, cudadrv.ErrorInvalidContext, r.Drv.DevicePrimaryCtxRelease(0))
	_, res := r.Drv.DevicePrimaryCtxRetain(0)
	r.OK(res)
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemFree(p) }))
}

func TestSameUUIDInEveryMachine(t *testing.T) {
	a, b := newRig(t, Config{Devices: 2}), newRig(t, Config{Devices: 3})
	for d := range cudadrv.Device(2) {
		x, _ := a.Drv.DeviceGetUUID(d)
		y, _ := b.Drv.DeviceGetUUID(d)
		require.Equal(t, x, y)
	}
}

// Who has waited for a stream finds it idle, however late its goroutine ends.
func TestQueryAfterWait(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	p := r.Alloc(0, 64)
	stop := make(chan struct{})
	defer close(stop)
	for range 4 { // who want the machine's lock as well
		go func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = r.Drv.DeviceGetCount()
				}
			}
		}()
	}
	for range 200 {
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 64, s) })
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) })
	}
}

// A stream that is destroyed goes on with its work, and memory is not freed before.
func TestFreeWaitsForDestroyedStreams(t *testing.T) {
	for name, wait := range map[string]func(r *rig, p cudadrv.DevicePtr) cudadrv.Result{
		"free": func(r *rig, p cudadrv.DevicePtr) cudadrv.Result { return r.Drv.MemFree(p) },
		"sync": func(r *rig, p cudadrv.DevicePtr) cudadrv.Result { return r.Drv.CtxSynchronize() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 1})
			s, p := r.Stream(0), r.Alloc(0, 64)
			gate := make(chan struct{})
			r.Do(0, func() cudadrv.Result { return r.Drv.LaunchHostFunc(s, dl.OnceClosure(func() { <-gate })) })
			r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 64, s) })
			r.Do(0, func() cudadrv.Result { return r.Drv.StreamDestroy(s) })
			done := make(chan cudadrv.Result, 1)
			go func() { done <- r.On(0, func() cudadrv.Result { return wait(r, p) }) }()
			select {
			case res := <-done:
				t.Fatalf("returned %v while the stream was at work", res)
			case <-time.After(20 * time.Millisecond):
			}
			close(gate)
			r.OK(<-done)
			if name == "sync" {
				r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
			}
			require.Empty(t, r.m.Reports())
		})
	}
}

// Page-locked memory has the pattern of Poison before its first write and after its end, whatever
// other memory was written.
func TestPinnedMemoryIsPoisoned(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	for _, n := range []uintptr{7, outsideGo - 1, outsideGo, 2*poisonBytes + 4099} {
		want := make([]byte, n)
		Poison(want)
		for range 2 { // the second time after the writes of the first
			var host unsafe.Pointer
			r.Do(0, func() (res cudadrv.Result) { host, res = r.Drv.MemHostAlloc(n, 0); return res })
			data := unsafe.Slice((*byte)(host), n)
			require.True(t, bytes.Equal(want, data), "%d bytes", n)
			clear(data)
			r.m.mu.Lock()
			b, _ := r.m.Find(cudadrv.DevicePtr(uintptr(host)))
			kept := b.region // mapped until it is collected
			r.m.mu.Unlock()
			r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeHost(host) })
			require.True(t, bytes.Equal(want, data), "%d bytes, freed", n)
			runtime.KeepAlive(kept)
		}
	}
}
