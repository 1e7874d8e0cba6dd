package virtual

import (
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// axpy is y += a·x over n elements.
var axpy = Kernel{
	Name:   "axpy",
	Params: []Param{Float32Param, PtrParam, PtrParam, Int32Param},
	Func: func(k *KernelCall) {
		n := int(k.Int32(3))
		x, y := ReadOf[float32](k, k.Ptr(1), n), WriteOf[float32](k, k.Ptr(2), n)
		for i := range y {
			y[i] += k.Float32(0) * x[i]
		}
	},
}

func (r *rig) function(dev int, k Kernel) (f cudadrv.Function) {
	r.t.Helper()
	var mod cudadrv.Module
	image := r.m.ModuleImage([]Kernel{k})
	r.do(dev, func() (res cudadrv.Result) { mod, res = r.drv.ModuleLoadData(image); return })
	r.do(dev, func() (res cudadrv.Result) { f, res = r.drv.ModuleGetFunction(mod, k.Name); return })
	return f
}

func (r *rig) axpy(dev int, f cudadrv.Function, s cudadrv.Stream, a float32, x, y cudadrv.DevicePtr, n int32) {
	r.t.Helper()
	params := []unsafe.Pointer{unsafe.Pointer(&a), unsafe.Pointer(&x), unsafe.Pointer(&y), unsafe.Pointer(&n)}
	r.do(dev, func() cudadrv.Result {
		return r.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{32, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
}

func TestKernelRuns(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	x, y := r.alloc(0, 12), r.alloc(0, 12)
	upload(r, 0, s, x, []float32{1, 2, 3})
	upload(r, 0, s, y, []float32{10, 20, 30})
	r.axpy(0, r.function(0, axpy), s, 2, x, y, 3)
	require.Equal(t, []float32{12, 24, 36}, download[float32](r, 0, s, y, 3))
	require.Empty(t, r.m.Reports())
}

func TestKernelPastTheEnd(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	x, y := r.alloc(0, 8), r.alloc(0, 12)
	r.axpy(0, r.function(0, axpy), s, 2, x, y, 3)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "kernel axpy")
	require.Contains(t, r.m.Explain(0), "runs 4 bytes past the end of the block of 8 bytes")
}

func TestRaceIsFound(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.stream(0), r.stream(0)
	x := r.alloc(0, 4096)
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(x, 1, 4096, a) })
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(x+1024, 2, 1024, b) })
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.on(0, r.drv.CtxSynchronize))
	require.Len(t, r.m.Reports(), 1)
	require.Contains(t, r.m.Explain(0), "race")
}

func TestEventOrdersStreams(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	a, b := r.stream(0), r.stream(1)
	x, e := r.alloc(0, 4096), r.event(0)
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(x, 1, 4096, a) })
	r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, a) })
	r.do(1, func() cudadrv.Result { return r.drv.StreamWaitEvent(b, e, 0) })
	r.do(1, func() cudadrv.Result { return r.drv.MemsetD8Async(x+1024, 2, 1024, b) })
	r.sync(1, b)
	got := download[byte](r, 0, a, x, 4096)
	require.Equal(t, byte(1), got[1023])
	require.Equal(t, byte(2), got[1024])
	require.Empty(t, r.m.Reports())
}
