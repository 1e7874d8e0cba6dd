package machine

import (
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
)

// store is conformance.StorePTX.
var store = Kernel{Name: "store", Params: []Param{PtrParam, Uint32Param},
	Func: func(k *KernelCall) { WriteOf[uint32](k, k.Ptr(0), 1)[0] = uint32(k.Bits(1, Uint32Param)) }}

// axpy is y += a·x over n elements.
var axpy = Kernel{
	Name:   "axpy",
	Params: []Param{Float32Param, PtrParam, PtrParam, Int32Param},
	Func: func(k *KernelCall) {
		n := int(k.Bits(3, Int32Param))
		x, y := ReadOf[float32](k, k.Ptr(1), n), WriteOf[float32](k, k.Ptr(2), n)
		for i := range y {
			y[i] += math.Float32frombits(uint32(k.Bits(0, Float32Param))) * x[i]
		}
	},
}

func (r *rig) function(dev int, k Kernel) (f cudadrv.Function) {
	r.T.Helper()
	var mod cudadrv.Module
	image := r.m.ModuleImage([]Kernel{k})
	r.Do(dev, func() (res cudadrv.Result) { mod, res = r.Drv.ModuleLoadData(image); return })
	r.Do(dev, func() (res cudadrv.Result) { f, res = r.Drv.ModuleGetFunction(mod, k.Name); return })
	return f
}

func (r *rig) axpy(dev int, f cudadrv.Function, s cudadrv.Stream, a float32, x, y cudadrv.DevicePtr, n int32) {
	r.T.Helper()
	params := []unsafe.Pointer{unsafe.Pointer(&a), unsafe.Pointer(&x), unsafe.Pointer(&y), unsafe.Pointer(&n)}
	r.Do(dev, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{32, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
}

func TestKernelRuns(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	x, y := r.Alloc(0, 12), r.Alloc(0, 12)
	virtualtest.Upload(r.Rig, 0, s, x, []float32{1, 2, 3})
	virtualtest.Upload(r.Rig, 0, s, y, []float32{10, 20, 30})
	r.axpy(0, r.function(0, axpy), s, 2, x, y, 3)
	require.Equal(t, []float32{12, 24, 36}, virtualtest.Download[float32](r.Rig, 0, s, y, 3))
	require.Empty(t, r.m.Reports())
}

func TestKernelPastTheEnd(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	x, y := r.Alloc(0, 8), r.Alloc(0, 12)
	r.axpy(0, r.function(0, axpy), s, 2, x, y, 3)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "kernel axpy")
	require.Contains(t, r.m.Explain(0), "runs 4 bytes past the end of the block of 8 bytes")
}

func TestRaceIsFound(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.Stream(0), r.Stream(0)
	x := r.Alloc(0, 4096)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(x, 1, 4096, a) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(x+1024, 2, 1024, b) })
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.On(0, r.Drv.CtxSynchronize))
	require.Len(t, r.m.Reports(), 1)
	require.Contains(t, r.m.Explain(0), "race")
}

func TestEventOrdersStreams(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	a, b := r.Stream(0), r.Stream(1)
	x, e := r.Alloc(0, 4096), r.Event(0)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(x, 1, 4096, a) })
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, a) })
	r.Do(1, func() cudadrv.Result { return r.Drv.StreamWaitEvent(b, e, 0) })
	r.Do(1, func() cudadrv.Result { return r.Drv.MemsetD8Async(x+1024, 2, 1024, b) })
	r.Sync(1, b)
	got := virtualtest.Download[byte](r.Rig, 0, a, x, 4096)
	require.Equal(t, byte(1), got[1023])
	require.Equal(t, byte(2), got[1024])
	require.Empty(t, r.m.Reports())
}
