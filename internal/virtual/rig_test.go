package virtual

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// A rig is a machine with the contexts of its devices retained.
type rig struct {
	t    *testing.T
	m    *Machine
	drv  cudadrv.Driver
	ctxs []cudadrv.Context
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	m, err := New(&cfg)
	require.NoError(t, err)
	t.Logf("seed %#x", m.Seed())
	r := &rig{t: t, m: m, drv: m.Driver()}
	t.Cleanup(func() { runtime.KeepAlive(m) }) // or its memory may go while others have it open
	r.ok(r.drv.Init())
	for i := range cfg.Devices {
		ctx, res := r.drv.DevicePrimaryCtxRetain(cudadrv.Device(i))
		r.ok(res)
		r.ctxs = append(r.ctxs, ctx)
	}
	return r
}

func (r *rig) ok(res cudadrv.Result) {
	r.t.Helper()
	require.Equal(r.t, cudadrv.Success, res)
}

// on binds the context of a device to this thread and calls f.
func (r *rig) on(dev int, f func() cudadrv.Result) cudadrv.Result {
	r.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.ok(r.drv.CtxSetCurrent(r.ctxs[dev]))
	return f()
}

// do is on for what must succeed.
func (r *rig) do(dev int, f func() cudadrv.Result) {
	r.t.Helper()
	r.ok(r.on(dev, f))
}

func (r *rig) stream(dev int) (s cudadrv.Stream) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) { s, res = r.drv.StreamCreateWithPriority(1, 0); return })
	return s
}

func (r *rig) alloc(dev int, bytes uintptr) (p cudadrv.DevicePtr) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) { p, res = r.drv.MemAlloc(bytes); return })
	return p
}

func (r *rig) event(dev int) (e cudadrv.Event) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) { e, res = r.drv.EventCreate(0); return })
	return e
}

func (r *rig) sync(dev int, s cudadrv.Stream) {
	r.t.Helper()
	r.do(dev, func() cudadrv.Result { return r.drv.StreamSynchronize(s) })
}

func upload[T any](r *rig, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, v []T) {
	r.t.Helper()
	r.do(dev, func() cudadrv.Result {
		return r.drv.MemcpyHtoDAsync(p, unsafe.Pointer(unsafe.SliceData(v)), uintptr(len(v))*unsafe.Sizeof(v[0]), s)
	})
}

func download[T any](r *rig, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, n int) []T {
	r.t.Helper()
	v := make([]T, n)
	r.do(dev, func() cudadrv.Result {
		return r.drv.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(v)), p, uintptr(n)*unsafe.Sizeof(v[0]), s)
	})
	return v
}
