// Package virtualtest helps the tests of the virtual devices.
package virtualtest

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// Unit is the size of the parts of a reservation that Map maps.
const Unit = 2 << 20

// A Rig is a driver with the contexts of its devices retained.
type Rig struct {
	T        *testing.T
	Drv      cudadrv.Driver
	Contexts []cudadrv.Context
}

// New initializes the driver and retains the contexts of its devices.
func New(t *testing.T, drv cudadrv.Driver, devices int) *Rig {
	t.Helper()
	r := &Rig{T: t, Drv: drv}
	t.Cleanup(func() { runtime.KeepAlive(drv) }) // or its memory may go while others have it open
	r.OK(drv.Init())
	for i := range devices {
		ctx, res := drv.DevicePrimaryCtxRetain(cudadrv.Device(i))
		r.OK(res)
		r.Contexts = append(r.Contexts, ctx)
	}
	return r
}

// OK stops the test if the result is an error.
func (r *Rig) OK(res cudadrv.Result) {
	r.T.Helper()
	require.Equal(r.T, cudadrv.Success, res)
}

// On binds the context of a device to this thread and calls f.
func (r *Rig) On(dev int, f func() cudadrv.Result) cudadrv.Result {
	r.T.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.OK(r.Drv.CtxSetCurrent(r.Contexts[dev]))
	return f()
}

// Do is On for a call that must succeed.
func (r *Rig) Do(dev int, f func() cudadrv.Result) {
	r.T.Helper()
	r.OK(r.On(dev, f))
}

// Stream creates a stream.
func (r *Rig) Stream(dev int) (s cudadrv.Stream) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { s, res = r.Drv.StreamCreateWithPriority(1, 0); return })
	return s
}

// Alloc allocates memory.
func (r *Rig) Alloc(dev int, bytes uintptr) (p cudadrv.DevicePtr) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { p, res = r.Drv.MemAlloc(bytes); return })
	return p
}

// Event creates an event.
func (r *Rig) Event(dev int) (e cudadrv.Event) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { e, res = r.Drv.EventCreate(0); return })
	return e
}

// Sync waits for the stream.
func (r *Rig) Sync(dev int, s cudadrv.Stream) {
	r.T.Helper()
	r.Do(dev, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
}

// Reserve reserves addresses.
func (r *Rig) Reserve(dev int, units uintptr) (p cudadrv.DevicePtr) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { p, res = r.Drv.MemAddressReserve(units*Unit, 0, 0); return res })
	return p
}

// Physical creates memory without addresses.
func (r *Rig) Physical(dev int, units uintptr) (h cudadrv.MemHandle) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) {
		h, res = r.Drv.MemCreate(units*Unit, cudadrv.MemAllocationProp{Device: cudadrv.Device(dev), HandleTypes: cudadrv.MemHandlePosixFD})
		return res
	})
	return h
}

// Map maps new memory of a device for the given devices. Only the mapping refers to it.
func (r *Rig) Map(dev int, p cudadrv.DevicePtr, units uintptr, devices ...cudadrv.Device) {
	r.T.Helper()
	h := r.Physical(dev, units)
	r.Do(dev, func() cudadrv.Result { return r.Drv.MemMap(p, units*Unit, 0, h) })
	r.Do(dev, func() cudadrv.Result { return r.Drv.MemRelease(h) })
	if len(devices) > 0 {
		r.Do(dev, func() cudadrv.Result {
			return r.Drv.MemSetAccess(p, units*Unit, cudadrv.MemAccessReadWrite, devices...)
		})
	}
}

// Upload copies elements to device memory.
func Upload[T any](r *Rig, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, v []T) {
	r.T.Helper()
	r.Do(dev, func() cudadrv.Result {
		return r.Drv.MemcpyHtoDAsync(p, unsafe.Pointer(unsafe.SliceData(v)), uintptr(len(v))*unsafe.Sizeof(v[0]), s)
	})
}

// Download copies n elements of device memory to the host.
func Download[T any](r *Rig, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, n int) []T {
	r.T.Helper()
	v := make([]T, n)
	r.Do(dev, func() cudadrv.Result {
		return r.Drv.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(v)), p, uintptr(n)*unsafe.Sizeof(v[0]), s)
	})
	return v
}
