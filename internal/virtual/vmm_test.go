package virtual

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

const unit = granularity

func (r *rig) reserve(dev int, units uintptr) (p cudadrv.DevicePtr) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) { p, res = r.drv.MemAddressReserve(units*unit, 0, 0); return res })
	return p
}

func (r *rig) physical(dev int, units uintptr) (h cudadrv.MemHandle) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) {
		h, res = r.drv.MemCreate(units*unit, cudadrv.MemAllocationProp{Device: cudadrv.Device(dev), HandleTypes: cudadrv.MemHandlePosixFD})
		return res
	})
	return h
}

// mapped maps new memory of a device, which only the mapping keeps, for devices.
func (r *rig) mapped(dev int, p cudadrv.DevicePtr, units uintptr, devices ...cudadrv.Device) {
	r.t.Helper()
	h := r.physical(dev, units)
	r.do(dev, func() cudadrv.Result { return r.drv.MemMap(p, units*unit, 0, h) })
	r.do(dev, func() cudadrv.Result { return r.drv.MemRelease(h) })
	if len(devices) > 0 {
		r.do(dev, func() cudadrv.Result {
			return r.drv.MemSetAccess(p, units*unit, cudadrv.MemAccessReadWrite, devices...)
		})
	}
}

func (r *rig) fill(dev int, s cudadrv.Stream, p cudadrv.DevicePtr, value uint8, n uintptr) cudadrv.Result {
	r.t.Helper()
	return r.on(dev, func() cudadrv.Result { return r.drv.MemsetD8Async(p, value, n, s) })
}

func (r *rig) freeBytes(dev int) (free uintptr) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) { free, _, res = r.drv.MemGetInfo(); return res })
	return free
}

// TestMappedMemoryIsStrict has uses of a reservation of which the first unit has
// memory that device 0 may use, the second memory that nobody may, the third some
// that may be read, the fourth none, and the fifth again some that device 0 may use.
func TestMappedMemoryIsStrict(t *testing.T) {
	for name, c := range map[string]struct {
		at, n uintptr
		read  bool
		dev   int
		want  string // "" is no error
	}{
		"mapped":          {at: 0, n: unit},
		"no access":       {at: unit, n: 8, want: "cuMemSetAccess gave device 0 no right to write it"},
		"into no access":  {at: unit - 8, n: 16, want: "no right to write"},
		"only read":       {at: 2 * unit, n: 8, want: "no right to write"},
		"reading":         {at: 2 * unit, n: unit, read: true},
		"unmapped":        {at: 3 * unit, n: 8, want: "nothing is mapped from byte 0 on"},
		"into unmapped":   {at: 3*unit - 8, n: 16, read: true, want: "nothing is mapped from byte 8 on"},
		"over unmapped":   {at: 3*unit - 8, n: unit + 16, read: true, want: "nothing is mapped from byte 8 on"},
		"past the end":    {at: 5*unit - 8, n: 16, want: "runs 8 bytes past the end of the reservation"},
		"behind the end":  {at: 5*unit + 8, n: 8, want: "8 bytes past the end of the reservation"},
		"of other device": {at: 0, n: 8, dev: 1, want: "gave device 1 no right to write"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 2})
			s, p := r.stream(c.dev), r.reserve(0, 5)
			r.mapped(0, p, 1, 0)
			r.mapped(0, p+4*unit, 1, 0)
			r.mapped(0, p+unit, 1)
			r.mapped(0, p+2*unit, 1)
			r.do(0, func() cudadrv.Result { return r.drv.MemSetAccess(p+2*unit, unit, cudadrv.MemAccessRead, 0) })
			q := r.alloc(c.dev, 2*unit)
			r.do(c.dev, func() cudadrv.Result {
				if c.read {
					return r.drv.MemcpyDtoDAsync(q, p+cudadrv.DevicePtr(c.at), c.n, s)
				}
				return r.drv.MemsetD8Async(p+cudadrv.DevicePtr(c.at), 1, c.n, s)
			})
			res := r.on(c.dev, func() cudadrv.Result { return r.drv.StreamSynchronize(s) })
			if c.want == "" {
				require.Equal(t, cudadrv.Success, res, r.m.Explain(cudadrv.Device(c.dev)))
				return
			}
			require.Equal(t, cudadrv.ErrorIllegalAddress, res)
			require.Contains(t, r.m.Explain(cudadrv.Device(c.dev)), c.want)
		})
	}
}

func TestMappingRefusals(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	p := r.reserve(0, 4)
	r.mapped(0, p, 1, 0)
	r.mapped(0, p+2*unit, 1, 0)
	h := r.physical(0, 2)
	for name, call := range map[string]func() cudadrv.Result{
		"map into the next":    func() cudadrv.Result { return r.drv.MemMap(p+unit, 2*unit, 0, h) },
		"map beyond the end":   func() cudadrv.Result { return r.drv.MemMap(p+3*unit, 2*unit, 0, h) },
		"unmap with a hole":    func() cudadrv.Result { return r.drv.MemUnmap(p, 3*unit) },
		"unmap nothing":        func() cudadrv.Result { return r.drv.MemUnmap(p+unit, unit) },
		"unmap beyond the end": func() cudadrv.Result { return r.drv.MemUnmap(p+2*unit, 3*unit) },
		"access with a hole":   func() cudadrv.Result { return r.drv.MemSetAccess(p, 3*unit, cudadrv.MemAccessReadWrite, 0) },
		"access of a part":     func() cudadrv.Result { return r.drv.MemSetAccess(p, unit/2, cudadrv.MemAccessReadWrite, 0) },
		"no such access":       func() cudadrv.Result { return r.drv.MemSetAccess(p, unit, 2, 0) },
		"free of a part":       func() cudadrv.Result { return r.drv.MemAddressFree(p, 2*unit) },
		"free with mappings":   func() cudadrv.Result { return r.drv.MemAddressFree(p, 4*unit) },
		"free as memory":       func() cudadrv.Result { return r.drv.MemFree(p) },
		"close as opened":      func() cudadrv.Result { return r.drv.IpcCloseMemHandle(p) },
		"reserve a part":       func() cudadrv.Result { _, res := r.drv.MemAddressReserve(unit/2, 0, 0); return res },
		"reserve the world":    func() cudadrv.Result { _, res := r.drv.MemAddressReserve(1<<60, 0, 0); return res },
	} {
		require.Contains(t, []cudadrv.Result{cudadrv.ErrorInvalidValue, cudadrv.ErrorOutOfMemory}, r.on(0, call), name)
	}
	res := r.on(0, func() cudadrv.Result { return r.drv.MemSetAccess(p, unit, cudadrv.MemAccessReadWrite, 0, 1) })
	require.Equal(t, cudadrv.ErrorInvalidDevice, res)
}

func TestPhysicalMemoryIsPoisonedAndCounted(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Memory: 8 * unit})
	s, p := r.stream(0), r.reserve(0, 8)
	for range 3 {
		r.mapped(0, p, 3, 0)
		require.Equal(t, uintptr(5*unit), r.freeBytes(0), "its handle is released, but it is mapped")
		res := r.on(0, func() cudadrv.Result { _, res := r.drv.MemCreate(6*unit, cudadrv.MemAllocationProp{}); return res })
		require.Equal(t, cudadrv.ErrorOutOfMemory, res)
		for _, at := range []cudadrv.DevicePtr{0, unit, 3*unit - 8} {
			for _, x := range download[float64](r, 0, s, p+at, 1) {
				require.NotEqual(t, x, x, "not a NaN")
			}
		}
		r.ok(r.fill(0, s, p, 0, 3*unit))
		r.sync(0, s)
		r.do(0, func() cudadrv.Result { return r.drv.MemUnmap(p, 3*unit) })
		require.Equal(t, uintptr(8*unit), r.freeBytes(0))
	}
}

func openFiles(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

func TestPhysicalMemoryLeavesNoFiles(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	p := r.reserve(0, 1)
	before := openFiles(t)
	for range 100 {
		r.mapped(0, p, 1)
		r.do(0, func() cudadrv.Result { return r.drv.MemUnmap(p, unit) })
	}
	require.Less(t, openFiles(t), before+50) // the collector may have closed some of other tests
}

// Who unmaps memory has waited for what uses it. What still runs does no harm.
func TestUnmapRacesWithUse(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p, alias := r.stream(0), r.reserve(0, 2), r.reserve(0, 1)
	r.mapped(0, p, 1, 0)
	h := r.physical(0, 1)
	for _, at := range []cudadrv.DevicePtr{p + unit, alias} {
		r.do(0, func() cudadrv.Result { return r.drv.MemMap(at, unit, 0, h) })
		r.do(0, func() cudadrv.Result { return r.drv.MemSetAccess(at, unit, cudadrv.MemAccessReadWrite, 0) })
	}
	r.ok(r.fill(0, s, p, 1, unit))
	r.sync(0, s)
	r.do(0, func() cudadrv.Result { return r.drv.MemUnmap(p, unit) })
	require.Empty(t, r.m.Reports())

	begun, gate, done := make(chan bool), make(chan bool), make(chan bool)
	f := r.function(0, Kernel{Name: "late", Params: []Param{PtrParam}, Func: func(k *KernelCall) {
		b := k.Write(k.Ptr(0), unit)
		close(begun)
		<-gate
		fill(b, 9)
		close(done)
	}})
	q := p + unit
	params := []unsafe.Pointer{unsafe.Pointer(&q)}
	r.do(0, func() cudadrv.Result {
		return r.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
	<-begun
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.on(0, func() cudadrv.Result { return r.drv.MemUnmap(q, unit) }))
	r.do(0, func() cudadrv.Result { return r.drv.MemAddressFree(p, 2*unit) })
	close(gate)
	<-done
	other, _ := r.m.find(alias)
	require.NotEqual(t, byte(9), other.data[0], "it went nowhere")
	require.Len(t, r.m.Reports(), 1)
	require.Contains(t, r.m.Reports()[0], "unmapped 2097152 bytes")
	require.Contains(t, r.m.Reports()[0], "has not waited for kernel late")
}

// Two streams race for memory also when each has it at an address of its own.
func TestRaceThroughAlias(t *testing.T) {
	for _, ordered := range []bool{true, false} {
		r := newRig(t, Config{Devices: 1})
		a, b, e := r.stream(0), r.stream(0), r.event(0)
		p, q, h := r.reserve(0, 1), r.reserve(0, 2), r.physical(0, 1)
		for _, at := range []cudadrv.DevicePtr{p, q + unit} {
			r.do(0, func() cudadrv.Result { return r.drv.MemMap(at, unit, 0, h) })
			r.do(0, func() cudadrv.Result { return r.drv.MemSetAccess(at, unit, cudadrv.MemAccessReadWrite, 0) })
		}
		r.ok(r.fill(0, a, p, 1, 64))
		if ordered {
			r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, a) })
			r.do(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(b, e, 0) })
		}
		r.ok(r.fill(0, b, q+unit+60, 2, 8))
		res := r.on(0, r.drv.CtxSynchronize)
		if ordered {
			r.ok(res)
			require.Equal(t, []byte{1, 2}, download[byte](r, 0, a, p+59, 2))
			continue
		}
		require.Equal(t, cudadrv.ErrorLaunchFailed, res)
		require.Contains(t, r.m.Explain(0), "the physical memory of 2097152 bytes of device 0")
	}
}

// What another machine made and sent is not counted here, shows poison where nothing
// was written, and is one memory however often it comes.
func TestImportedMemory(t *testing.T) {
	a, b := newRig(t, Config{Devices: 1}), newRig(t, Config{Devices: 1})
	h := a.physical(0, 1)
	var fd int32
	a.do(0, func() (res cudadrv.Result) {
		fd, res = a.drv.MemExportToShareableHandle(h, cudadrv.MemHandlePosixFD)
		return res
	})
	f := os.NewFile(uintptr(fd), "physical memory")
	defer f.Close()
	receive := func() (in cudadrv.MemHandle) {
		b.do(0, func() (res cudadrv.Result) {
			in, res = b.drv.MemImportFromShareableHandle(fd, cudadrv.MemHandlePosixFD)
			return res
		})
		return in
	}
	whole, p, in := b.freeBytes(0), b.reserve(0, 2), receive()
	b.do(0, func() cudadrv.Result { return b.drv.MemRelease(in) })
	require.Equal(t, whole, b.freeBytes(0))
	for i := range cudadrv.DevicePtr(2) {
		in := receive()
		b.do(0, func() cudadrv.Result { return b.drv.MemMap(p+i*unit, unit, 0, in) })
		b.do(0, func() cudadrv.Result {
			return b.drv.MemSetAccess(p+i*unit, unit, cudadrv.MemAccessReadWrite, 0)
		})
		b.do(0, func() cudadrv.Result { return b.drv.MemRelease(in) })
	}
	require.Equal(t, whole, b.freeBytes(0))
	x, y := b.stream(0), b.stream(0)
	for _, v := range download[float32](b, 0, x, p+unit-64, 16) {
		require.True(t, v != v, "not a NaN")
	}
	b.ok(b.fill(0, x, p, 3, 8))
	b.sync(0, x)
	b.do(0, func() cudadrv.Result { return b.drv.MemUnmap(p, unit) })
	require.Equal(t, whole, b.freeBytes(0))
	b.mapped(0, p, 1, 0)
	require.Equal(t, whole-unit, b.freeBytes(0))
	require.Equal(t, byte(3), download[byte](b, 0, x, p+unit, 1)[0])
	b.do(0, func() cudadrv.Result { return b.drv.MemUnmap(p, unit) })
	in = receive()
	b.do(0, func() cudadrv.Result { return b.drv.MemMap(p, unit, 0, in) })
	b.do(0, func() cudadrv.Result { return b.drv.MemSetAccess(p, unit, cudadrv.MemAccessReadWrite, 0) })
	b.ok(b.fill(0, x, p, 1, 8))
	b.ok(b.fill(0, y, p+unit, 1, 8))
	require.Equal(t, cudadrv.ErrorLaunchFailed, b.on(0, b.drv.CtxSynchronize), "a race through two imports")
}

// Memory that a running kernel uses stays mapped, whatever becomes of the context.
func TestResetWhileKernelRuns(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, unit)
	begun, gate, done := make(chan bool), make(chan bool), make(chan bool)
	f := r.function(0, Kernel{Name: "late", Params: []Param{PtrParam}, Func: func(k *KernelCall) {
		b := k.Write(k.Ptr(0), unit)
		close(begun)
		<-gate
		fill(b, 9)
		close(done)
	}})
	params := []unsafe.Pointer{unsafe.Pointer(&p)}
	r.do(0, func() cudadrv.Result {
		return r.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
	<-begun
	r.ok(r.drv.DevicePrimaryCtxRelease(0))
	for range 3 {
		runtime.GC()
		runtime.Gosched()
	}
	close(gate)
	<-done
}

func TestResetTakesMappings(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	whole := r.freeBytes(0)
	p, q := r.reserve(0, 2), r.reserve(1, 1)
	r.mapped(0, p, 1, 0)
	r.mapped(1, p+unit, 1, 0, 1)
	r.mapped(0, q, 1, 0, 1)
	h := r.physical(0, 1)
	r.ok(r.drv.DevicePrimaryCtxRelease(0))
	_, res := r.drv.DevicePrimaryCtxRetain(0)
	r.ok(res)
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(0, func() cudadrv.Result { return r.drv.MemRelease(h) }))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(0, func() cudadrv.Result { return r.drv.MemUnmap(p, unit) }))
	require.Equal(t, whole, r.freeBytes(0))
	require.Equal(t, whole, r.freeBytes(1))
	s := r.stream(1)
	r.ok(r.fill(1, s, q, 1, 8))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(1, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(1), "nothing is mapped")
}
