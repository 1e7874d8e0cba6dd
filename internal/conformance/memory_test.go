package conformance

import (
	"syscall"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

func (r *rig) testAddressRanges(t *testing.T) {
	const n = 5 << 20
	p := r.alloc(t, 0, n)
	for _, at := range []cudadrv.DevicePtr{0, 1, n - 1} {
		r.do(t, 0, func() cudadrv.Result {
			base, bytes, res := r.drv.MemGetAddressRange(p + at)
			require.Equal(t, p, base)
			require.EqualValues(t, n, bytes)
			return res
		})
	}
	res := r.on(t, 0, func() cudadrv.Result { _, _, res := r.drv.MemGetAddressRange(1); return res })
	require.NotEqual(t, cudadrv.Success, res)
	for want, a := range map[int32]cudadrv.PointerAttribute{cudadrv.MemoryTypeDevice: cudadrv.PointerMemoryType, 0: cudadrv.PointerDevice} {
		for _, at := range []cudadrv.DevicePtr{0, 1, n - 1} {
			r.do(t, 0, func() cudadrv.Result {
				got, res := r.drv.PointerGetAttribute(a, p+at)
				require.Equal(t, want, got, "attribute %d of byte %d", a, at)
				return res
			})
		}
		res := r.on(t, 0, func() cudadrv.Result { _, res := r.drv.PointerGetAttribute(a, 1); return res })
		require.NotEqual(t, cudadrv.Success, res, "attribute %d of no memory", a)
	}
}

// testInterprocessMemory tests the part that a single process can test.
func (r *rig) testInterprocessMemory(t *testing.T) {
	p := r.alloc(t, 0, 4<<20)
	var h, again cudadrv.IpcMemHandle
	for _, x := range []*cudadrv.IpcMemHandle{&h, &again} {
		r.do(t, 0, func() (res cudadrv.Result) { *x, res = r.drv.IpcGetMemHandle(p); return res })
	}
	require.NotZero(t, h)
	require.Equal(t, h, again)
	open := func(h cudadrv.IpcMemHandle, flags uint32) func() cudadrv.Result {
		return func() cudadrv.Result { _, res := r.drv.IpcOpenMemHandle(h, flags); return res }
	}
	require.Equal(t, cudadrv.ErrorInvalidContext, r.on(t, 0, open(h, cudadrv.IpcMemLazyEnablePeerAccess)), "in the process that has it")
	for name, call := range map[string]func() cudadrv.Result{
		"of no memory":  func() cudadrv.Result { _, res := r.drv.IpcGetMemHandle(1); return res },
		"no such flag":  open(h, 1<<20),
		"no handle":     open(cudadrv.IpcMemHandle{}, cudadrv.IpcMemLazyEnablePeerAccess),
		"close its own": func() cudadrv.Result { return r.drv.IpcCloseMemHandle(p) },
	} {
		require.NotEqual(t, cudadrv.Success, r.on(t, 0, call), name)
	}
}

// testRegistered page-locks memory of this process.
func (r *rig) testRegistered(t *testing.T) {
	const n = 1 << 20
	mem, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, syscall.Munmap(mem)) }()
	host := unsafe.Pointer(&mem[0])
	register := func() cudadrv.Result { return r.drv.MemHostRegister(host, n, cudadrv.MemHostRegisterPortable) }
	unregister := func() cudadrv.Result { return r.drv.MemHostUnregister(host) }
	require.Equal(t, cudadrv.ErrorHostMemoryNotRegistered, r.on(t, 0, unregister))
	for range 2 {
		r.do(t, 0, register)
		require.Equal(t, cudadrv.ErrorHostMemoryAlreadyRegistered, r.on(t, 0, register))
		s, p := r.stream(t, 0), r.alloc(t, 0, n)
		want := pattern(n, 4)
		copy(mem, want)
		r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyHtoDAsync(p, host, n, s) })
		r.sync(t, 0, s)
		clear(mem)
		r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyDtoHAsync(host, p, n, s) })
		r.sync(t, 0, s)
		require.Equal(t, want, append([]byte(nil), mem...))
		require.NotEqual(t, cudadrv.Success, r.on(t, 0, func() cudadrv.Result { return r.drv.MemFreeHost(host) }))
		r.do(t, 0, unregister)
	}
	require.NotEqual(t, cudadrv.Success, r.on(t, 0, func() cudadrv.Result { return r.drv.MemHostRegister(host, 0, 0) }))
}

// testPools checks the attributes of a pool.
func (r *rig) testPools(t *testing.T) {
	pool, res := r.drv.DeviceGetDefaultMemPool(r.devs[0])
	ok(t, res)
	value := func(attr int32) uint64 {
		t.Helper()
		v, res := r.drv.MemPoolGetAttribute(pool, attr)
		ok(t, res)
		return v
	}
	ok(t, r.drv.MemPoolTrimTo(pool, 0))
	ok(t, r.drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrUsedHigh, 0))
	before := value(cudadrv.MemPoolAttrReleaseThreshold)
	defer func() { ok(t, r.drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, before)) }()
	ok(t, r.drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, 1<<40))
	require.Equal(t, uint64(1<<40), value(cudadrv.MemPoolAttrReleaseThreshold))
	require.Zero(t, value(cudadrv.MemPoolAttrUsedCurrent))
	s, n := r.stream(t, 0), 3<<20
	var list [4]cudadrv.DevicePtr
	for i := range list {
		r.do(t, 0, func() (res cudadrv.Result) {
			list[i], res = r.drv.MemAllocAsync(uintptr(n), s)
			return res
		})
	}
	want := pattern(n, 5)
	r.upload(t, 0, s, list[3], want)
	require.Equal(t, want, r.download(t, 0, s, list[3], n))
	used := value(cudadrv.MemPoolAttrUsedCurrent)
	require.GreaterOrEqual(t, used, uint64(len(list)*n))
	require.GreaterOrEqual(t, value(cudadrv.MemPoolAttrReservedCurrent), used)
	for _, p := range list {
		r.do(t, 0, func() cudadrv.Result { return r.drv.MemFreeAsync(p, s) })
	}
	r.sync(t, 0, s)
	require.Zero(t, value(cudadrv.MemPoolAttrUsedCurrent))
	require.Equal(t, used, value(cudadrv.MemPoolAttrUsedHigh))
	require.GreaterOrEqual(t, value(cudadrv.MemPoolAttrReservedCurrent), used, "the threshold is not reached")
	for _, attr := range []int32{cudadrv.MemPoolAttrUsedHigh, cudadrv.MemPoolAttrReservedHigh} {
		require.NotEqual(t, cudadrv.Success, r.drv.MemPoolSetAttribute(pool, attr, 5))
		ok(t, r.drv.MemPoolSetAttribute(pool, attr, 0))
	}
	require.Zero(t, value(cudadrv.MemPoolAttrUsedHigh))
	ok(t, r.drv.MemPoolTrimTo(pool, 0))
	require.Zero(t, value(cudadrv.MemPoolAttrReservedCurrent))
}
