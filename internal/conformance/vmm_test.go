package conformance

import (
	"syscall"
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// A vmm allocates physical memory of device 0; unit is its granularity.
type vmm struct {
	*rig
	prop cudadrv.MemAllocationProp
	unit uintptr
}

// newVMM skips the test if the device does not support virtual memory management.
func (r *rig) newVMM(t *testing.T, types cudadrv.MemHandleType) *vmm {
	t.Helper()
	attr := cudadrv.AttrVMMSupported
	if types == cudadrv.MemHandlePosixFD {
		attr = cudadrv.AttrPosixFDHandleSupported
	}
	has, res := r.drv.DeviceGetAttribute(attr, r.devs[0])
	ok(t, res)
	if has == 0 {
		t.Skip("the device has no virtual memory management of this kind")
	}
	v := &vmm{rig: r, prop: cudadrv.MemAllocationProp{Device: r.devs[0], HandleTypes: types}}
	for _, option := range []cudadrv.MemGranularity{cudadrv.MemGranularityMinimum, cudadrv.MemGranularityRecommended} {
		r.do(t, 0, func() (res cudadrv.Result) {
			v.unit, res = r.drv.MemGetAllocationGranularity(v.prop, option)
			return res
		})
		require.Positive(t, v.unit)
		require.Zero(t, v.unit&(v.unit-1), "a power of two")
	}
	return v
}

func (v *vmm) reserve(t *testing.T, units uintptr) (p cudadrv.DevicePtr) {
	t.Helper()
	v.do(t, 0, func() (res cudadrv.Result) { p, res = v.drv.MemAddressReserve(units*v.unit, 0, 0); return res })
	require.Zero(t, uintptr(p)%v.unit)
	return p
}

func (v *vmm) create(t *testing.T, units uintptr) (h cudadrv.MemHandle) {
	t.Helper()
	v.do(t, 0, func() (res cudadrv.Result) { h, res = v.drv.MemCreate(units*v.unit, v.prop); return res })
	return h
}

func (v *vmm) release(t *testing.T, h cudadrv.MemHandle) {
	t.Helper()
	v.do(t, 0, func() cudadrv.Result { return v.drv.MemRelease(h) })
}

// open maps memory at p and gives device 0 access.
func (v *vmm) open(t *testing.T, p cudadrv.DevicePtr, units uintptr, h cudadrv.MemHandle) {
	t.Helper()
	v.do(t, 0, func() cudadrv.Result { return v.drv.MemMap(p, units*v.unit, 0, h) })
	v.do(t, 0, func() cudadrv.Result {
		return v.drv.MemSetAccess(p, units*v.unit, cudadrv.MemAccessReadWrite, v.devs[0])
	})
}

func (v *vmm) close(t *testing.T, p cudadrv.DevicePtr, units uintptr) {
	t.Helper()
	v.do(t, 0, func() cudadrv.Result { return v.drv.MemUnmap(p, units*v.unit) })
}

func (v *vmm) free(t *testing.T, p cudadrv.DevicePtr, units uintptr) {
	t.Helper()
	v.do(t, 0, func() cudadrv.Result { return v.drv.MemAddressFree(p, units*v.unit) })
}

// testMapping checks that adjacent mappings form one range, that memory mapped
// twice is the same memory, and that it outlives its handle.
func (r *rig) testMapping(t *testing.T) {
	v := r.newVMM(t, cudadrv.MemHandleNone)
	s, n := r.stream(t, 0), int(3*v.unit)
	p, alias := v.reserve(t, 4), v.reserve(t, 1)
	one, two := v.create(t, 1), v.create(t, 2)
	v.open(t, p, 1, one)
	v.open(t, p+cudadrv.DevicePtr(v.unit), 2, two)
	v.open(t, alias, 1, one)
	v.release(t, one)
	v.release(t, two)
	want := pattern(n, 7)
	r.upload(t, 0, s, p, want)
	require.Equal(t, want, r.download(t, 0, s, p, n))
	require.Equal(t, want[:v.unit], r.download(t, 0, s, alias, int(v.unit)))
	r.set(t, 0, s, alias+5, 0x77, 1)
	require.Equal(t, byte(0x77), r.download(t, 0, s, p+5, 1)[0])
	for _, at := range []uintptr{0, v.unit - 1} {
		r.do(t, 0, func() cudadrv.Result {
			base, _, res := r.drv.MemGetAddressRange(p + cudadrv.DevicePtr(at))
			require.Equal(t, p, base)
			return res
		})
	}

	// A part can be unmapped and replaced.
	v.close(t, p, 1)
	v.close(t, alias, 1)
	fresh := v.create(t, 1)
	v.open(t, p, 1, fresh)
	r.set(t, 0, s, p, 0x42, v.unit)
	got := r.download(t, 0, s, p, n)
	require.Equal(t, byte(0x42), got[v.unit-1])
	require.Equal(t, want[v.unit:], got[v.unit:])
	v.close(t, p, 1)
	v.close(t, p+cudadrv.DevicePtr(v.unit), 2)
	v.release(t, fresh)
	v.free(t, p, 4)
	v.free(t, alias, 1)
}

// testMappingErrors tests invalid calls.
func (r *rig) testMappingErrors(t *testing.T) {
	v := r.newVMM(t, cudadrv.MemHandleNone)
	u := v.unit
	p, h := v.reserve(t, 4), v.create(t, 2)
	v.open(t, p, 2, h)
	var taken []string
	for name, call := range map[string]func() cudadrv.Result{
		"create nothing":    func() cudadrv.Result { _, res := r.drv.MemCreate(0, v.prop); return res },
		"create less":       func() cudadrv.Result { _, res := r.drv.MemCreate(u/2, v.prop); return res },
		"create too much":   func() cudadrv.Result { _, res := r.drv.MemCreate(1<<46, v.prop); return res },
		"reserve nothing":   func() cudadrv.Result { _, res := r.drv.MemAddressReserve(0, 0, 0); return res },
		"release no handle": func() cudadrv.Result { return r.drv.MemRelease(0) },
		"map over":          func() cudadrv.Result { return r.drv.MemMap(p+cudadrv.DevicePtr(u), 2*u, 0, h) },
		"map a part":        func() cudadrv.Result { return r.drv.MemMap(p+cudadrv.DevicePtr(2*u), u, 0, h) },
		"map from within":   func() cudadrv.Result { return r.drv.MemMap(p+cudadrv.DevicePtr(2*u), u, u, h) },
		"map between":       func() cudadrv.Result { return r.drv.MemMap(p+cudadrv.DevicePtr(2*u+512), u, 0, h) },
		"unmap a part":      func() cudadrv.Result { return r.drv.MemUnmap(p, u) },
		"access to nothing": func() cudadrv.Result {
			return r.drv.MemSetAccess(p+cudadrv.DevicePtr(2*u), u, cudadrv.MemAccessReadWrite, v.devs[0])
		},
		"access of nobody":  func() cudadrv.Result { return r.drv.MemSetAccess(p, 2*u, cudadrv.MemAccessReadWrite) },
		"free with mapping": func() cudadrv.Result { return r.drv.MemAddressFree(p, 4*u) },
		"export": func() cudadrv.Result {
			_, res := r.drv.MemExportToShareableHandle(h, cudadrv.MemHandlePosixFD)
			return res
		},
		"import no memory": func() cudadrv.Result {
			_, res := r.drv.MemImportFromShareableHandle(0, cudadrv.MemHandlePosixFD)
			return res
		},
	} {
		if r.on(t, 0, call) == cudadrv.Success {
			taken = append(taken, name)
		}
	}
	require.Empty(t, taken, "these are refused")
	v.close(t, p, 2)
	v.release(t, h)
	require.NotEqual(t, cudadrv.Success, r.on(t, 0, func() cudadrv.Result { return r.drv.MemRelease(h) }))
	v.free(t, p, 4)
	require.NotEqual(t, cudadrv.Success, r.on(t, 0, func() cudadrv.Result { return r.drv.MemAddressFree(p, 4*u) }))
}

// testMappingShared exports memory as a file descriptor and imports it in the same process.
func (r *rig) testMappingShared(t *testing.T) {
	v := r.newVMM(t, cudadrv.MemHandlePosixFD)
	s, n := r.stream(t, 0), int(v.unit)
	p, q, h := v.reserve(t, 1), v.reserve(t, 1), v.create(t, 1)
	v.open(t, p, 1, h)
	want := pattern(n, 3)
	r.upload(t, 0, s, p, want)
	r.sync(t, 0, s)
	var fd int32
	r.do(t, 0, func() (res cudadrv.Result) {
		fd, res = r.drv.MemExportToShareableHandle(h, cudadrv.MemHandlePosixFD)
		return res
	})
	var again cudadrv.MemHandle
	r.do(t, 0, func() (res cudadrv.Result) {
		again, res = r.drv.MemImportFromShareableHandle(fd, cudadrv.MemHandlePosixFD)
		return res
	})
	require.NoError(t, syscall.Close(int(fd)))
	v.open(t, q, 1, again)
	v.close(t, p, 1)
	v.release(t, h)
	require.Equal(t, want, r.download(t, 0, s, q, n))
	v.close(t, q, 1)
	v.release(t, again)
	v.free(t, p, 1)
	v.free(t, q, 1)
}

// testMappingPeers copies from memory that peers have access to.
func (r *rig) testMappingPeers(t *testing.T) {
	if len(r.devs) < 2 {
		t.Skip("one device")
	}
	can, res := r.drv.DeviceCanAccessPeer(r.devs[1], r.devs[0])
	ok(t, res)
	if can == 0 {
		t.Skip("the devices cannot access each other")
	}
	v := r.newVMM(t, cudadrv.MemHandleNone)
	p, h, n := v.reserve(t, 1), v.create(t, 1), int(v.unit)
	r.do(t, 0, func() cudadrv.Result { return r.drv.MemMap(p, v.unit, 0, h) })
	r.do(t, 0, func() cudadrv.Result {
		return r.drv.MemSetAccess(p, v.unit, cudadrv.MemAccessReadWrite, r.devs[0], r.devs[1])
	})
	s, want := r.stream(t, 0), pattern(n, 9)
	r.upload(t, 0, s, p, want)
	r.sync(t, 0, s)
	q, other := r.alloc(t, 1, v.unit), r.stream(t, 1)
	r.do(t, 1, func() cudadrv.Result { return r.drv.MemcpyDtoDAsync(q, p, v.unit, other) })
	require.Equal(t, want, r.download(t, 1, other, q, n))
	v.close(t, p, 1)
	v.release(t, h)
	v.free(t, p, 1)
}
