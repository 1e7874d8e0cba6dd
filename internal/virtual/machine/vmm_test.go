package machine

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

const unit = granularity

func (r *rig) fill(dev int, s cudadrv.Stream, p cudadrv.DevicePtr, value uint8, n uintptr) cudadrv.Result {
	r.T.Helper()
	return r.On(dev, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, value, n, s) })
}

func (r *rig) freeBytes(dev int) (free uintptr) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { free, _, res = r.Drv.MemGetInfo(); return res })
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
		"no access":       {at: unit, n: 8, want: "cuMemSetAccess did not permit device 0 to write it"},
		"into no access":  {at: unit - 8, n: 16, want: "did not permit device"},
		"only read":       {at: 2 * unit, n: 8, want: "did not permit device"},
		"reading":         {at: 2 * unit, n: unit, read: true},
		"unmapped":        {at: 3 * unit, n: 8, want: "nothing is mapped from byte 0 on"},
		"into unmapped":   {at: 3*unit - 8, n: 16, read: true, want: "nothing is mapped from byte 8 on"},
		"over unmapped":   {at: 3*unit - 8, n: unit + 16, read: true, want: "nothing is mapped from byte 8 on"},
		"past the end":    {at: 5*unit - 8, n: 16, want: "runs 8 bytes past the end of the reservation"},
		"behind the end":  {at: 5*unit + 8, n: 8, want: "8 bytes past the end of the reservation"},
		"of other device": {at: 0, n: 8, dev: 1, want: "did not permit device 1 to write"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 2})
			s, p := r.Stream(c.dev), r.Reserve(0, 5)
			r.Map(0, p, 1, 0)
			r.Map(0, p+4*unit, 1, 0)
			r.Map(0, p+unit, 1)
			r.Map(0, p+2*unit, 1)
			r.Do(0, func() cudadrv.Result { return r.Drv.MemSetAccess(p+2*unit, unit, cudadrv.MemAccessRead, 0) })
			q := r.Alloc(c.dev, 2*unit)
			r.Do(c.dev, func() cudadrv.Result {
				if c.read {
					return r.Drv.MemcpyDtoDAsync(q, p+cudadrv.DevicePtr(c.at), c.n, s)
				}
				return r.Drv.MemsetD8Async(p+cudadrv.DevicePtr(c.at), 1, c.n, s)
			})
			res := r.On(c.dev, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
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
	p := r.Reserve(0, 4)
	r.Map(0, p, 1, 0)
	r.Map(0, p+2*unit, 1, 0)
	h := r.Physical(0, 2)
	for name, call := range map[string]func() cudadrv.Result{
		"map into the next":    func() cudadrv.Result { return r.Drv.MemMap(p+unit, 2*unit, 0, h) },
		"map beyond the end":   func() cudadrv.Result { return r.Drv.MemMap(p+3*unit, 2*unit, 0, h) },
		"unmap with a hole":    func() cudadrv.Result { return r.Drv.MemUnmap(p, 3*unit) },
		"unmap nothing":        func() cudadrv.Result { return r.Drv.MemUnmap(p+unit, unit) },
		"unmap beyond the end": func() cudadrv.Result { return r.Drv.MemUnmap(p+2*unit, 3*unit) },
		"access with a hole":   func() cudadrv.Result { return r.Drv.MemSetAccess(p, 3*unit, cudadrv.MemAccessReadWrite, 0) },
		"access of a part":     func() cudadrv.Result { return r.Drv.MemSetAccess(p, unit/2, cudadrv.MemAccessReadWrite, 0) },
		"no such access":       func() cudadrv.Result { return r.Drv.MemSetAccess(p, unit, 2, 0) },
		"free of a part":       func() cudadrv.Result { return r.Drv.MemAddressFree(p, 2*unit) },
		"free with mappings":   func() cudadrv.Result { return r.Drv.MemAddressFree(p, 4*unit) },
		"free as memory":       func() cudadrv.Result { return r.Drv.MemFree(p) },
		"close as opened":      func() cudadrv.Result { return r.Drv.IpcCloseMemHandle(p) },
		"reserve a part":       func() cudadrv.Result { _, res := r.Drv.MemAddressReserve(unit/2, 0, 0); return res },
		"reserve the world":    func() cudadrv.Result { _, res := r.Drv.MemAddressReserve(1<<60, 0, 0); return res },
	} {
		require.Contains(t, []cudadrv.Result{cudadrv.ErrorInvalidValue, cudadrv.ErrorOutOfMemory}, r.On(0, call), name)
	}
	res := r.On(0, func() cudadrv.Result { return r.Drv.MemSetAccess(p, unit, cudadrv.MemAccessReadWrite, 0, 1) })
	require.Equal(t, cudadrv.ErrorInvalidDevice, res)
}

func TestPhysicalMemoryIsPoisonedAndCounted(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Memory: 8 * unit})
	s, p := r.Stream(0), r.Reserve(0, 8)
	for range 3 {
		r.Map(0, p, 3, 0)
		require.Equal(t, uintptr(5*unit), r.freeBytes(0), "its handle is released, but it is mapped")
		res := r.On(0, func() cudadrv.Result { _, res := r.Drv.MemCreate(6*unit, cudadrv.MemAllocationProp{}); return res })
		require.Equal(t, cudadrv.ErrorOutOfMemory, res)
		for _, at := range []cudadrv.DevicePtr{0, unit, 3*unit - 8} {
			for _, x := range virtualtest.Download[float64](r.Rig, 0, s, p+at, 1) {
				require.NotEqual(t, x, x, "not a NaN")
			}
		}
		r.OK(r.fill(0, s, p, 0, 3*unit))
		r.Sync(0, s)
		r.Do(0, func() cudadrv.Result { return r.Drv.MemUnmap(p, 3*unit) })
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
	p := r.Reserve(0, 1)
	before := openFiles(t)
	for range 100 {
		r.Map(0, p, 1)
		r.Do(0, func() cudadrv.Result { return r.Drv.MemUnmap(p, unit) })
	}
	require.Less(t, openFiles(t), before+50) // the collector may have closed some of other tests
}

// Who unmaps memory has waited for what uses it. What still runs does no harm.
func TestUnmapRacesWithUse(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p, alias := r.Stream(0), r.Reserve(0, 2), r.Reserve(0, 1)
	r.Map(0, p, 1, 0)
	h := r.Physical(0, 1)
	for _, at := range []cudadrv.DevicePtr{p + unit, alias} {
		r.Do(0, func() cudadrv.Result { return r.Drv.MemMap(at, unit, 0, h) })
		r.Do(0, func() cudadrv.Result { return r.Drv.MemSetAccess(at, unit, cudadrv.MemAccessReadWrite, 0) })
	}
	r.OK(r.fill(0, s, p, 1, unit))
	r.Sync(0, s)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemUnmap(p, unit) })
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
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
	<-begun
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.On(0, func() cudadrv.Result { return r.Drv.MemUnmap(q, unit) }))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemAddressFree(p, 2*unit) })
	close(gate)
	<-done
	other, _ := r.m.Find(alias)
	require.NotEqual(t, byte(9), other.data[0], "it went nowhere")
	require.Len(t, r.m.Reports(), 1)
	require.Contains(t, r.m.Reports()[0], "unmapped 2097152 bytes")
	require.Contains(t, r.m.Reports()[0], "has not waited for kernel late")
}

// Two streams race for memory also when each has it at an address of its own.
func TestRaceThroughAlias(t *testing.T) {
	for _, ordered := range []bool{true, false} {
		r := newRig(t, Config{Devices: 1})
		a, b, e := r.Stream(0), r.Stream(0), r.Event(0)
		p, q, h := r.Reserve(0, 1), r.Reserve(0, 2), r.Physical(0, 1)
		for _, at := range []cudadrv.DevicePtr{p, q + unit} {
			r.Do(0, func() cudadrv.Result { return r.Drv.MemMap(at, unit, 0, h) })
			r.Do(0, func() cudadrv.Result { return r.Drv.MemSetAccess(at, unit, cudadrv.MemAccessReadWrite, 0) })
		}
		r.OK(r.fill(0, a, p, 1, 64))
		if ordered {
			r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, a) })
			r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(b, e, 0) })
		}
		r.OK(r.fill(0, b, q+unit+60, 2, 8))
		res := r.On(0, r.Drv.CtxSynchronize)
		if ordered {
			r.OK(res)
			require.Equal(t, []byte{1, 2}, virtualtest.Download[byte](r.Rig, 0, a, p+59, 2))
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
	h := a.Physical(0, 1)
	var fd int32
	a.Do(0, func() (res cudadrv.Result) {
		fd, res = a.Drv.MemExportToShareableHandle(h, cudadrv.MemHandlePosixFD)
		return res
	})
	f := os.NewFile(uintptr(fd), "physical memory")
	defer f.Close()
	receive := func() (in cudadrv.MemHandle) {
		b.Do(0, func() (res cudadrv.Result) {
			in, res = b.Drv.MemImportFromShareableHandle(fd, cudadrv.MemHandlePosixFD)
			return res
		})
		return in
	}
	whole, p, in := b.freeBytes(0), b.Reserve(0, 2), receive()
	b.Do(0, func() cudadrv.Result { return b.Drv.MemRelease(in) })
	require.Equal(t, whole, b.freeBytes(0))
	for i := range cudadrv.DevicePtr(2) {
		in := receive()
		b.Do(0, func() cudadrv.Result { return b.Drv.MemMap(p+i*unit, unit, 0, in) })
		b.Do(0, func() cudadrv.Result {
			return b.Drv.MemSetAccess(p+i*unit, unit, cudadrv.MemAccessReadWrite, 0)
		})
		b.Do(0, func() cudadrv.Result { return b.Drv.MemRelease(in) })
	}
	require.Equal(t, whole, b.freeBytes(0))
	x, y := b.Stream(0), b.Stream(0)
	for _, v := range virtualtest.Download[float32](b.Rig, 0, x, p+unit-64, 16) {
		require.True(t, v != v, "not a NaN")
	}
	b.OK(b.fill(0, x, p, 3, 8))
	b.Sync(0, x)
	b.Do(0, func() cudadrv.Result { return b.Drv.MemUnmap(p, unit) })
	require.Equal(t, whole, b.freeBytes(0))
	b.Map(0, p, 1, 0)
	require.Equal(t, whole-unit, b.freeBytes(0))
	require.Equal(t, byte(3), virtualtest.Download[byte](b.Rig, 0, x, p+unit, 1)[0])
	b.Do(0, func() cudadrv.Result { return b.Drv.MemUnmap(p, unit) })
	in = receive()
	b.Do(0, func() cudadrv.Result { return b.Drv.MemMap(p, unit, 0, in) })
	b.Do(0, func() cudadrv.Result { return b.Drv.MemSetAccess(p, unit, cudadrv.MemAccessReadWrite, 0) })
	b.OK(b.fill(0, x, p, 1, 8))
	b.OK(b.fill(0, y, p+unit, 1, 8))
	require.Equal(t, cudadrv.ErrorLaunchFailed, b.On(0, b.Drv.CtxSynchronize), "a race through two imports")
}

// Memory that a running kernel uses stays mapped, whatever becomes of the context.
func TestResetWhileKernelRuns(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, unit)
	begun, gate, done := make(chan bool), make(chan bool), make(chan bool)
	f := r.function(0, Kernel{Name: "late", Params: []Param{PtrParam}, Func: func(k *KernelCall) {
		b := k.Write(k.Ptr(0), unit)
		close(begun)
		<-gate
		fill(b, 9)
		close(done)
	}})
	params := []unsafe.Pointer{unsafe.Pointer(&p)}
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
	<-begun
	r.OK(r.Drv.DevicePrimaryCtxRelease(0))
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
	p, q := r.Reserve(0, 2), r.Reserve(1, 1)
	r.Map(0, p, 1, 0)
	r.Map(1, p+unit, 1, 0, 1)
	r.Map(0, q, 1, 0, 1)
	h := r.Physical(0, 1)
	r.OK(r.Drv.DevicePrimaryCtxRelease(0))
	_, res := r.Drv.DevicePrimaryCtxRetain(0)
	r.OK(res)
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemRelease(h) }))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.MemUnmap(p, unit) }))
	require.Equal(t, whole, r.freeBytes(0))
	require.Equal(t, whole, r.freeBytes(1))
	s := r.Stream(1)
	r.OK(r.fill(1, s, q, 1, 8))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(1, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(1), "nothing is mapped")
}
