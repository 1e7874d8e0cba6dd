package conformance

import (
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// testDriver tests an implementation of the CUDA driver.
func testDriver(t *testing.T, drv cudadrv.Driver) {
	r := newRig(t, drv)
	t.Run("Devices", r.testDevices)
	t.Run("Contexts", r.testContexts)
	t.Run("Profiler", r.testProfiler)
	t.Run("Memory", r.testMemory)
	t.Run("Copies", r.testCopies)
	t.Run("Pinned", r.testPinned)
	t.Run("StreamOrdered", r.testStreamOrdered)
	t.Run("Pools", r.testPools)
	t.Run("Registered", r.testRegistered)
	t.Run("AddressRanges", r.testAddressRanges)
	t.Run("InterprocessMemory", r.testInterprocessMemory)
	t.Run("Mapping", r.testMapping)
	t.Run("MappingErrors", r.testMappingErrors)
	t.Run("MappingShared", r.testMappingShared)
	t.Run("MappingPeers", r.testMappingPeers)
	t.Run("Streams", r.testStreams)
	t.Run("Events", r.testEvents)
	t.Run("LegacyStream", r.testLegacyStream)
	t.Run("Priorities", r.testPriorities)
	t.Run("HostFuncs", r.testHostFuncs)
	t.Run("InterprocessEvents", r.testInterprocessEvents)
	t.Run("Peers", r.testPeers)
	t.Run("Rows", r.testRows)
	t.Run("Modules", r.testModules)
	t.Run("Graphs", r.testGraphs)
}

func (r *rig) testDevices(t *testing.T) {
	v, res := r.drv.DriverGetVersion()
	ok(t, res)
	require.GreaterOrEqual(t, v, int32(12000))
	uuids, buses := map[cudadrv.UUID]bool{}, map[string]bool{}
	for _, d := range r.devs {
		name, res := r.drv.DeviceGetName(d)
		ok(t, res)
		require.NotEmpty(t, name)
		uuid, res := r.drv.DeviceGetUUID(d)
		ok(t, res)
		uuids[uuid] = true
		bus, res := r.drv.DeviceGetPCIBusID(d)
		ok(t, res)
		buses[bus] = true
		total, res := r.drv.DeviceTotalMem(d)
		ok(t, res)
		require.Positive(t, total)
		warp, res := r.drv.DeviceGetAttribute(cudadrv.AttrWarpSize, d)
		ok(t, res)
		require.Equal(t, int32(32), warp)
		self, res := r.drv.DeviceCanAccessPeer(d, d)
		ok(t, res)
		require.Zero(t, self)
	}
	require.Len(t, uuids, len(r.devs))
	require.Len(t, buses, len(r.devs))
	_, res = r.drv.DeviceGet(-1)
	require.Equal(t, cudadrv.ErrorInvalidDevice, res)
	_, _, res = r.drv.DevicePrimaryCtxGetState(-1)
	require.Equal(t, cudadrv.ErrorInvalidDevice, res)
}

func (r *rig) testContexts(t *testing.T) {
	for i, d := range r.devs {
		again, res := r.drv.DevicePrimaryCtxRetain(d)
		ok(t, res)
		require.Equal(t, r.ctxs[i], again)
		ok(t, r.drv.DevicePrimaryCtxRelease(d))
		_, active, res := r.drv.DevicePrimaryCtxGetState(d)
		ok(t, res)
		require.EqualValues(t, 1, active, "the first owner still has it")
		r.do(t, i, func() cudadrv.Result {
			cur, res := r.drv.CtxGetCurrent()
			require.Equal(t, r.ctxs[i], cur)
			return res
		})
		r.do(t, i, r.drv.CtxSynchronize)
	}
	r.do(t, 0, func() cudadrv.Result {
		least, greatest, res := r.drv.CtxGetStreamPriorityRange()
		require.GreaterOrEqual(t, least, greatest)
		return res
	})
}

// testProfiler checks that starting and stopping twice is not an error.
func (r *rig) testProfiler(t *testing.T) {
	for range 2 {
		r.do(t, 0, r.drv.ProfilerStart)
	}
	for range 2 {
		r.do(t, 0, r.drv.ProfilerStop)
	}
}

func (r *rig) testMemory(t *testing.T) {
	r.do(t, 0, func() cudadrv.Result {
		free, total, res := r.drv.MemGetInfo()
		require.LessOrEqual(t, free, total)
		return res
	})
	res := r.on(t, 0, func() cudadrv.Result { _, res := r.drv.MemAlloc(0); return res })
	require.Equal(t, cudadrv.ErrorInvalidValue, res)
	res = r.on(t, 0, func() cudadrv.Result { _, res := r.drv.MemAlloc(1 << 46); return res })
	require.Equal(t, cudadrv.ErrorOutOfMemory, res)
	seen := map[cudadrv.DevicePtr]bool{}
	for _, n := range []uintptr{1, 511, 512, 513, 4 << 20} {
		p := r.alloc(t, 0, n)
		require.Zero(t, p%256, "device memory is aligned for every type")
		require.False(t, seen[p])
		seen[p] = true
	}
}

func (r *rig) testCopies(t *testing.T) {
	for dev := range r.devs {
		s := r.stream(t, dev)
		for _, n := range []int{1, 3, 4095, 4097, 3<<20 + 5} {
			a, b := r.alloc(t, dev, uintptr(n)), r.alloc(t, dev, uintptr(n))
			want := pattern(n, uint64(n))
			r.set(t, dev, s, b, 0x5a, uintptr(n))
			r.upload(t, dev, s, a, want)
			r.do(t, dev, func() cudadrv.Result { return r.drv.MemcpyDtoDAsync(b, a, uintptr(n), s) })
			require.Equal(t, want, r.download(t, dev, s, b, n))
			r.set(t, dev, s, b+cudadrv.DevicePtr(n/2), 0x11, uintptr(n-n/2))
			for i := n / 2; i < n; i++ {
				want[i] = 0x11
			}
			require.Equal(t, want, r.download(t, dev, s, b, n))
		}
	}
}

// testPinned checks that copies from and to page-locked memory are complete after
// the stream is synchronized.
func (r *rig) testPinned(t *testing.T) {
	const n = 1 << 20
	s, p := r.stream(t, 0), r.alloc(t, 0, n)
	var in, out unsafe.Pointer
	for _, host := range []*unsafe.Pointer{&in, &out} {
		r.do(t, 0, func() (res cudadrv.Result) {
			*host, res = r.drv.MemHostAlloc(n, cudadrv.MemHostAllocPortable)
			return res
		})
	}
	want := pattern(n, 1)
	copy(unsafe.Slice((*byte)(in), n), want)
	clear(unsafe.Slice((*byte)(out), n))
	r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyHtoDAsync(p, in, n, s) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyDtoHAsync(out, p, n, s) })
	r.sync(t, 0, s)
	require.Equal(t, want, append([]byte(nil), unsafe.Slice((*byte)(out), n)...))
	for _, host := range []unsafe.Pointer{in, out} {
		r.do(t, 0, func() cudadrv.Result { return r.drv.MemFreeHost(host) })
	}
}

func (r *rig) testStreamOrdered(t *testing.T) {
	pool, res := r.drv.DeviceGetDefaultMemPool(r.devs[0])
	ok(t, res)
	ok(t, r.drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, 1<<30))
	s := r.stream(t, 0)
	for i := range 20 {
		n := 1000 * (i + 1)
		var p cudadrv.DevicePtr
		r.do(t, 0, func() (res cudadrv.Result) { p, res = r.drv.MemAllocAsync(uintptr(n), s); return res })
		want := pattern(n, uint64(i))
		r.upload(t, 0, s, p, want)
		require.Equal(t, want, r.download(t, 0, s, p, n))
		r.do(t, 0, func() cudadrv.Result { return r.drv.MemFreeAsync(p, s) })
	}
	r.sync(t, 0, s)
	ok(t, r.drv.MemPoolTrimTo(pool, 0))
}

func (r *rig) testStreams(t *testing.T) {
	s := r.stream(t, 0)
	r.sync(t, 0, s)
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamQuery(s) })
	p := r.alloc(t, 0, 1<<20)
	for i := range 50 {
		r.set(t, 0, s, p, byte(i), 1<<20)
	}
	res := r.on(t, 0, func() cudadrv.Result { return r.drv.StreamQuery(s) })
	require.Contains(t, []cudadrv.Result{cudadrv.Success, cudadrv.ErrorNotReady}, res)
	r.do(t, 0, r.drv.CtxSynchronize)
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamQuery(s) })
	require.Equal(t, byte(49), r.download(t, 0, s, p, 1)[0])
}

func (r *rig) testEvents(t *testing.T) {
	a, b := r.stream(t, 0), r.stream(t, 0)
	start, end := r.event(t, 0, cudadrv.EventDefault), r.event(t, 0, cudadrv.EventDefault)
	untimed := r.event(t, 0, cudadrv.EventDisableTiming)
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventQuery(untimed) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamWaitEvent(b, untimed, 0) })

	// The second stream reads the data of the first one only if it waits.
	const n = 1 << 20
	p, q := r.alloc(t, 0, n), r.alloc(t, 0, n)
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecord(start, a) })
	for i := range 10 {
		r.set(t, 0, a, p, byte(i), n)
		r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecord(untimed, a) })
		r.do(t, 0, func() cudadrv.Result { return r.drv.StreamWaitEvent(b, untimed, 0) })
		r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyDtoDAsync(q, p, n, b) })
		r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecord(untimed, b) })
		r.do(t, 0, func() cudadrv.Result { return r.drv.StreamWaitEvent(a, untimed, 0) })
	}
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecord(end, b) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventSynchronize(end) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventQuery(end) })
	require.Equal(t, byte(9), r.download(t, 0, b, q, n)[n-1])
	r.do(t, 0, func() cudadrv.Result {
		ms, res := r.drv.EventElapsedTime(start, end)
		require.Positive(t, ms)
		return res
	})
	res := r.on(t, 0, func() cudadrv.Result { _, res := r.drv.EventElapsedTime(start, untimed); return res })
	require.Equal(t, cudadrv.ErrorInvalidHandle, res)
}

// testPeers copies between all pairs of devices.
func (r *rig) testPeers(t *testing.T) {
	const n = 100003
	for src := range r.devs {
		for dst := range r.devs {
			s := r.stream(t, src)
			from, to := r.alloc(t, src, n), r.alloc(t, dst, n)
			want := pattern(n, uint64(src*8+dst))
			r.upload(t, src, s, from, want)
			r.do(t, src, func() cudadrv.Result {
				return r.drv.MemcpyPeerAsync(to, r.ctxs[dst], from, r.ctxs[src], n, s)
			})
			r.sync(t, src, s)
			require.Equal(t, want, r.download(t, dst, r.stream(t, dst), to, n))
			if src == dst {
				continue
			}
			can, res := r.drv.DeviceCanAccessPeer(r.devs[src], r.devs[dst])
			ok(t, res)
			if can == 1 {
				res := r.on(t, src, func() cudadrv.Result { return r.drv.CtxEnablePeerAccess(r.ctxs[dst], 0) })
				require.Contains(t, []cudadrv.Result{cudadrv.Success, cudadrv.ErrorPeerAccessAlreadyEnabled}, res)
				res = r.on(t, src, func() cudadrv.Result { return r.drv.CtxEnablePeerAccess(r.ctxs[dst], 0) })
				require.Equal(t, cudadrv.ErrorPeerAccessAlreadyEnabled, res)
			}
		}
	}
}

// testRows copies rows with a pitch, within a device and between devices with
// peer access, and checks that the bytes between rows do not change.
func (r *rig) testRows(t *testing.T) {
	for src := range r.devs {
		for dst := range r.devs {
			if src != dst {
				can, res := r.drv.DeviceCanAccessPeer(r.devs[src], r.devs[dst])
				ok(t, res)
				if can == 0 {
					continue
				}
				res = r.on(t, src, func() cudadrv.Result { return r.drv.CtxEnablePeerAccess(r.ctxs[dst], 0) })
				require.Contains(t, []cudadrv.Result{cudadrv.Success, cudadrv.ErrorPeerAccessAlreadyEnabled}, res)
			}
			r.rows(t, src, dst)
		}
	}
}

// rows copies rows from one device to another: by a call, and from the first device also
// by a graph.
func (r *rig) rows(t *testing.T, src, dst int) {
	t.Helper()
	const width, rows, from, to = 1001, 37, 1536, 1003
	s, other := r.stream(t, src), r.stream(t, dst)
	p, q := r.alloc(t, src, from*rows), r.alloc(t, dst, to*rows)
	have, want := pattern(from*rows, uint64(src*8+dst)), make([]byte, to*rows)
	r.upload(t, src, s, p, have)
	for i := range want {
		if want[i] = 0x5a; i%to < width {
			want[i] = have[i/to*from+i%to]
		}
	}
	c := cudadrv.Memcpy2D{Dst: q, Src: p, DstPitch: to, SrcPitch: from, WidthInBytes: width, Height: rows}
	enqueue := func() { r.do(t, src, func() cudadrv.Result { return r.drv.Memcpy2DAsync(c, s) }) }
	ways := []func(){enqueue}
	if src == 0 {
		r.begin(t, s, cudadrv.CaptureThreadLocal)
		enqueue()
		_, x := r.end(t, s, 1)
		ways = append(ways, func() { r.graphLaunch(t, x, s) })
	}
	for _, f := range ways {
		r.set(t, dst, other, q, 0x5a, to*rows)
		r.sync(t, dst, other)
		f()
		r.sync(t, src, s)
		require.Equal(t, want, r.download(t, dst, other, q, to*rows))
	}
	c.SrcPitch = width - 1
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(t, src, func() cudadrv.Result { return r.drv.Memcpy2DAsync(c, s) }))
}

func (r *rig) testModules(t *testing.T) {
	res := r.on(t, 0, func() cudadrv.Result { _, res := r.drv.ModuleLoadData([]byte("not an image\x00")); return res })
	require.Contains(t, []cudadrv.Result{cudadrv.ErrorInvalidImage, cudadrv.ErrorInvalidPTX, cudadrv.ErrorNoBinaryForGPU}, res)
}
