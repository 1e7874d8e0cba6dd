package conformance

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// maxDevices limits the number of devices that the suite uses.
const maxDevices = 4

// A rig holds the primary contexts of the devices under test.
type rig struct {
	drv  cudadrv.Driver
	devs []cudadrv.Device
	ctxs []cudadrv.Context
}

func newRig(t *testing.T, drv cudadrv.Driver) *rig {
	t.Helper()
	r := &rig{drv: drv}
	ok(t, drv.Init())
	n, res := drv.DeviceGetCount()
	ok(t, res)
	require.Positive(t, n, "there are no devices")
	for i := range min(n, maxDevices) {
		dev, res := drv.DeviceGet(i)
		ok(t, res)
		ctx, res := drv.DevicePrimaryCtxRetain(dev)
		ok(t, res)
		r.devs, r.ctxs = append(r.devs, dev), append(r.ctxs, ctx)
		t.Cleanup(func() { ok(t, drv.DevicePrimaryCtxRelease(dev)) })
	}
	return r
}

func ok(t *testing.T, r cudadrv.Result) {
	t.Helper()
	require.Equal(t, cudadrv.Success, r, "%v: %s", r, r.Meaning())
}

// on calls f with the context of a device bound.
func (r *rig) on(t *testing.T, dev int, f func() cudadrv.Result) cudadrv.Result {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ok(t, r.drv.CtxSetCurrent(r.ctxs[dev]))
	return f()
}

// do is on for a call that must succeed.
func (r *rig) do(t *testing.T, dev int, f func() cudadrv.Result) {
	t.Helper()
	ok(t, r.on(t, dev, f))
}

func (r *rig) stream(t *testing.T, dev int) (s cudadrv.Stream) {
	t.Helper()
	r.do(t, dev, func() (res cudadrv.Result) {
		s, res = r.drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
		return res
	})
	t.Cleanup(func() { r.do(t, dev, func() cudadrv.Result { return r.drv.StreamDestroy(s) }) })
	return s
}

func (r *rig) event(t *testing.T, dev int, flags uint32) (e cudadrv.Event) {
	t.Helper()
	r.do(t, dev, func() (res cudadrv.Result) { e, res = r.drv.EventCreate(flags); return res })
	t.Cleanup(func() { r.do(t, dev, func() cudadrv.Result { return r.drv.EventDestroy(e) }) })
	return e
}

func (r *rig) alloc(t *testing.T, dev int, bytes uintptr) (p cudadrv.DevicePtr) {
	t.Helper()
	r.do(t, dev, func() (res cudadrv.Result) { p, res = r.drv.MemAlloc(max(bytes, 1)); return res })
	t.Cleanup(func() { r.do(t, dev, func() cudadrv.Result { return r.drv.MemFree(p) }) })
	return p
}

func (r *rig) sync(t *testing.T, dev int, s cudadrv.Stream) {
	t.Helper()
	r.do(t, dev, func() cudadrv.Result { return r.drv.StreamSynchronize(s) })
}

func (r *rig) set(t *testing.T, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, value uint8, n uintptr) {
	t.Helper()
	if n > 0 {
		r.do(t, dev, func() cudadrv.Result { return r.drv.MemsetD8Async(p, value, n, s) })
	}
}

func (r *rig) upload(t *testing.T, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, v []byte) {
	t.Helper()
	if len(v) > 0 {
		r.do(t, dev, func() cudadrv.Result {
			return r.drv.MemcpyHtoDAsync(p, unsafe.Pointer(unsafe.SliceData(v)), uintptr(len(v)), s)
		})
	}
}

// download copies n bytes to the host and waits for the copy.
func (r *rig) download(t *testing.T, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, n int) []byte {
	t.Helper()
	v := make([]byte, n)
	if n > 0 {
		r.do(t, dev, func() cudadrv.Result {
			return r.drv.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(v)), p, uintptr(n), s)
		})
		r.sync(t, dev, s)
	}
	return v
}
