package machine

import (
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// meet is a kernel that tells the one at there that it has come, and waits until it is
// told so here.
var meet = Kernel{
	Name:   "meet",
	Params: []Param{PtrParam, PtrParam, PtrParam},
	Func: func(k *KernelCall) {
		here, there := SharedOf[uint64](k, k.Ptr(0), 2), SharedOf[uint64](k, k.Ptr(1), 2)
		atomic.StoreUint64(&there[1], 7)
		if k.Await(func() bool { return atomic.LoadUint64(&here[1]) == 7 }) {
			WriteOf[uint32](k, k.Ptr(2), 1)[0] = 1
		}
	},
}

func (r *rig) meet(dev int, s cudadrv.Stream, here, there, out cudadrv.DevicePtr) {
	r.T.Helper()
	f := r.function(dev, meet)
	params := []unsafe.Pointer{unsafe.Pointer(&here), unsafe.Pointer(&there), unsafe.Pointer(&out)}
	r.Do(dev, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{32, 1, 1}, 0, s, unsafe.Pointer(&params[0]))
	})
}

func (r *rig) peers(a, b int) {
	r.T.Helper()
	r.Do(a, func() cudadrv.Result { return r.Drv.CtxEnablePeerAccess(r.Contexts[b], 0) })
	r.Do(b, func() cudadrv.Result { return r.Drv.CtxEnablePeerAccess(r.Contexts[a], 0) })
}

// Kernels of two devices wait for each other in memory of both, which is no race.
func TestSharedMemory(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	r.peers(0, 1)
	var s [2]cudadrv.Stream
	var x, out [2]cudadrv.DevicePtr
	for dev := range s {
		s[dev], x[dev], out[dev] = r.Stream(dev), r.Alloc(dev, 16), r.Alloc(dev, 4)
		virtualtest.Upload(r.Rig, dev, s[dev], x[dev], []uint64{0, 0})
		r.Sync(dev, s[dev])
	}
	for dev := range s {
		r.meet(dev, s[dev], x[dev], x[1-dev], out[dev])
	}
	for dev := range s {
		require.Equal(t, []uint32{1}, virtualtest.Download[uint32](r.Rig, dev, s[dev], out[dev], 1))
	}
	require.Empty(t, r.m.Reports())
}

// What a device may not use it may not share, nor what has another size or place.
func TestSharedMemoryIsChecked(t *testing.T) {
	for want, there := range map[string]func(x cudadrv.DevicePtr) cudadrv.DevicePtr{
		"device 0 was not given access to it": func(x cudadrv.DevicePtr) cudadrv.DevicePtr { return x },
		"runs 8 bytes past the end":           func(x cudadrv.DevicePtr) cudadrv.DevicePtr { return x + 8 },
		"misaligned address":                  func(x cudadrv.DevicePtr) cudadrv.DevicePtr { return x + 4 },
		"which is not a device address":       func(x cudadrv.DevicePtr) cudadrv.DevicePtr { return 8 },
	} {
		r := newRig(t, Config{Devices: 2})
		s, here, x := r.Stream(0), r.Alloc(0, 16), r.Alloc(1, 16)
		r.meet(0, s, here, there(x), here)
		require.NotEqual(t, cudadrv.Success, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
		require.Contains(t, r.m.Explain(0), want)
	}
}

// A kernel that waits for what does not come ends when its device is lost.
func TestAwaitOnALostDevice(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.Stream(0), r.Stream(0)
	x, y := r.Alloc(0, 16), r.Alloc(0, 16)
	virtualtest.Upload(r.Rig, 0, a, x, []uint64{0, 0})
	r.Sync(0, a)
	r.meet(0, a, x, y, y)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(y, 0, 17, b) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(a) }))
	r.m.mu.Lock()
	working := r.m.streams[a]
	r.m.mu.Unlock()
	require.Eventually(t, func() bool {
		r.m.mu.Lock()
		defer r.m.mu.Unlock()
		return !working.working
	}, 20*time.Second, time.Millisecond, "the kernel still waits")
}
