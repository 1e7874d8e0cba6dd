package machine

import (
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// A pool holds back what its threshold allows, until the device needs it.
func TestPoolHoldsMemoryBack(t *testing.T) {
	r := newRig(t, Config{Devices: 2, Memory: 1000})
	s := r.Stream(0)
	pool, res := r.Drv.DeviceGetDefaultMemPool(0)
	r.OK(res)
	r.OK(r.Drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, 500))
	alloc := func(n uintptr) (p cudadrv.DevicePtr, res cudadrv.Result) {
		res = r.On(0, func() (res cudadrv.Result) { p, res = r.Drv.MemAllocAsync(n, s); return res })
		return p, res
	}
	state := func() (v [4]uint64) {
		for i := range v {
			v[i], res = r.Drv.MemPoolGetAttribute(pool, cudadrv.MemPoolAttrReservedCurrent+int32(i))
			r.OK(res)
		}
		return v
	}
	p, res := alloc(800)
	r.OK(res)
	require.Equal(t, [4]uint64{800, 800, 800, 800}, state())
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(p, s) })
	require.Equal(t, [4]uint64{500, 800, 0, 800}, state())
	require.Equal(t, uintptr(500), r.freeBytes(0))
	require.Equal(t, uintptr(1000), r.freeBytes(1))
	p, res = alloc(300)
	r.OK(res)
	require.Equal(t, uintptr(500), r.freeBytes(0), "of what it holds")
	require.Equal(t, [4]uint64{500, 800, 300, 800}, state())
	r.OK(r.Drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrUsedHigh, 0))
	r.OK(r.Drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReservedHigh, 0))
	require.Equal(t, [4]uint64{500, 500, 300, 300}, state())
	r.Alloc(0, 600)
	require.Equal(t, [4]uint64{300, 500, 300, 300}, state(), "the device needed the rest")
	_, res = alloc(101)
	require.Equal(t, cudadrv.ErrorOutOfMemory, res)
	require.Equal(t, [4]uint64{300, 500, 300, 300}, state(), "a failure reserves nothing")

	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 300, s) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(p, s) })
	r.Sync(0, s)
	require.Equal(t, uintptr(100), r.freeBytes(0))
}

// Asking a pool may wait for the device, which spoils a capture.
func TestPoolCallsSpoilCaptures(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	pool, res := r.Drv.DeviceGetDefaultMemPool(0)
	r.OK(res)
	mem := make([]byte, 64)
	for name, call := range map[string]func() cudadrv.Result{
		"attribute": func() cudadrv.Result {
			_, res := r.Drv.MemPoolGetAttribute(pool, cudadrv.MemPoolAttrUsedCurrent)
			return res
		},
		"threshold": func() cudadrv.Result {
			return r.Drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, 1)
		},
		"access":   func() cudadrv.Result { return r.Drv.MemPoolSetAccess(pool, 0) },
		"trim":     func() cudadrv.Result { return r.Drv.MemPoolTrimTo(pool, 0) },
		"register": func() cudadrv.Result { return r.Drv.MemHostRegister(unsafe.Pointer(&mem[0]), 64, 0) },
	} {
		s := r.Stream(0)
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureGlobal) })
		require.Equal(t, cudadrv.ErrorStreamCaptureUnsupported, r.On(0, call), name)
	}
}

func TestRegisteredMemory(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 4096)
	mem := make([]byte, 4096)
	host := func(at int) unsafe.Pointer { return unsafe.Pointer(&mem[at]) }
	register := func(at int, n uintptr) cudadrv.Result {
		return r.On(0, func() cudadrv.Result { return r.Drv.MemHostRegister(host(at), n, cudadrv.MemHostRegisterPortable) })
	}
	unregister := func(at int) cudadrv.Result {
		return r.On(0, func() cudadrv.Result { return r.Drv.MemHostUnregister(host(at)) })
	}
	r.OK(register(1024, 2048))
	for _, at := range []int{0, 1024, 2048} {
		require.Equal(t, cudadrv.ErrorHostMemoryAlreadyRegistered, register(at, 1025))
	}
	upload := func(at int, n uintptr) cudadrv.Result {
		return r.On(0, func() cudadrv.Result { return r.Drv.MemcpyHtoDAsync(p, host(at), n, s) })
	}
	for _, at := range []int{0, 1023, 1025} { // a part is registered
		require.Equal(t, cudadrv.ErrorInvalidValue, upload(at, 2048))
	}
	r.OK(upload(0, 1024))
	r.OK(upload(1024, 2048))
	r.OK(register(0, 1024))
	require.Equal(t, cudadrv.ErrorInvalidValue, unregister(1030))
	require.Equal(t, cudadrv.ErrorHostMemoryNotRegistered, unregister(3072))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemFreeHost(host(1024)) }))
	var pinned unsafe.Pointer
	r.Do(0, func() (res cudadrv.Result) { pinned, res = r.Drv.MemHostAlloc(64, 0); return res })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemHostRegister(pinned, 64, 0) }))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemHostUnregister(pinned) }))

	// The copy reads when it runs, and what it reads is the user's again afterwards.
	gate := make(chan bool)
	f := r.function(0, Kernel{Name: "gate", Func: func(*KernelCall) { <-gate }})
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, nil)
	})
	r.Do(0, func() cudadrv.Result { return r.Drv.MemcpyHtoDAsync(p, host(1024), 2048, s) })
	fill(mem, 7)
	close(gate)
	r.Sync(0, s)
	r.OK(unregister(1024))
	require.Equal(t, byte(7), mem[1024], "not poisoned")
	require.Equal(t, byte(7), virtualtest.Download[byte](r.Rig, 0, s, p+2047, 1)[0])
}
