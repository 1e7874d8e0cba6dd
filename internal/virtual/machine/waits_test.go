package machine

import (
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

const soon = 50 * time.Millisecond

func (r *rig) callback(s cudadrv.Stream, f func()) {
	r.T.Helper()
	r.Do(0, func() cudadrv.Result { return r.Drv.LaunchHostFunc(s, dl.OnceClosure(f)) })
}

func (r *rig) launch(f cudadrv.Function, s cudadrv.Stream) {
	r.T.Helper()
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, nil)
	})
}

// Host functions of all streams run on one thread, one after the other.
func TestHostFunctionsShareAThread(t *testing.T) {
	r := newRig(t, Config{Devices: 2})
	a, b, other := r.Stream(0), r.Stream(0), r.Stream(1)
	entered, gate, second, elsewhere := make(chan bool), make(chan bool), make(chan bool, 1), make(chan bool)
	r.callback(a, func() { entered <- true; <-gate })
	<-entered
	r.callback(b, func() { second <- true })
	r.Do(1, func() cudadrv.Result {
		return r.Drv.LaunchHostFunc(other, dl.OnceClosure(func() { elsewhere <- true }))
	})
	<-elsewhere // of another device
	select {
	case <-second:
		t.Fatal("two host functions of a device ran at the same time")
	case <-time.After(soon):
	}
	close(gate)
	r.Sync(0, b)
	require.True(t, <-second)
	require.Empty(t, r.m.Reports())
}

// A host function that waits for another one never ends.
func TestHostFunctionsThatWaitForEachOther(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Hang: soon})
	a, b := r.Stream(0), r.Stream(0)
	entered, gate := make(chan bool), make(chan bool)
	r.callback(a, func() { entered <- true; <-gate })
	<-entered
	r.callback(b, func() { close(gate) })
	require.Equal(t, cudadrv.ErrorLaunchTimeout, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(b) }))
	require.Contains(t, r.m.Explain(0), "waits for a host function of another stream")
	close(gate)
}

// Calls that wait for the device report the work that cannot proceed.
func TestCallsThatWaitForTheDevice(t *testing.T) {
	mem := make([]byte, 8192)
	for name, call := range map[string]func(r *rig) func() cudadrv.Result{
		"cuMemFreeHost": func(r *rig) func() cudadrv.Result {
			var host unsafe.Pointer
			r.Do(0, func() (res cudadrv.Result) { host, res = r.Drv.MemHostAlloc(64, 0); return res })
			return func() cudadrv.Result { return r.Drv.MemFreeHost(host) }
		},
		"cuMemHostUnregister": func(r *rig) func() cudadrv.Result {
			p := unsafe.Pointer(&mem[0])
			r.Do(0, func() cudadrv.Result { return r.Drv.MemHostRegister(p, 8192, 0) })
			return func() cudadrv.Result { return r.Drv.MemHostUnregister(p) }
		},
		"cuMemFree": func(r *rig) func() cudadrv.Result {
			p := r.Alloc(0, 64)
			return func() cudadrv.Result { return r.Drv.MemFree(p) }
		},
		"cuCtxSynchronize": func(r *rig) func() cudadrv.Result {
			return func() cudadrv.Result { return r.Drv.CtxSynchronize() }
		},
		"cuModuleLoadData": func(r *rig) func() cudadrv.Result {
			image := r.m.ModuleImage([]Kernel{store})
			return func() cudadrv.Result { _, res := r.Drv.ModuleLoadData(image); return res }
		},
		"cuModuleUnload": func(r *rig) func() cudadrv.Result {
			image := r.m.ModuleImage([]Kernel{store})
			var mod cudadrv.Module
			r.Do(0, func() (res cudadrv.Result) { mod, res = r.Drv.ModuleLoadData(image); return res })
			return func() cudadrv.Result { return r.Drv.ModuleUnload(mod) }
		},
	} {
		for _, hang := range []bool{false, true} {
			cfg := Config{Devices: 1}
			if hang {
				cfg.Hang = soon
			}
			r := newRig(t, cfg)
			s, gate, done := r.Stream(0), make(chan bool), make(chan cudadrv.Result, 1)
			f := call(r)
			r.callback(s, func() { <-gate })
			go func() { done <- r.On(0, f) }()
			if hang {
				<-done
				require.Contains(t, r.m.Explain(0), name+" waits for all work of device 0", name)
				require.Contains(t, r.m.Explain(0), "cuLaunchHostFunc on stream", name)
				close(gate)
				continue
			}
			select {
			case res := <-done:
				t.Fatalf("%s returned %v while the device had work", name, res)
			case <-time.After(soon):
			}
			close(gate)
			r.OK(<-done)
			require.Empty(t, r.m.Reports())
		}
	}
}

// A device that waits for another process, which may only be slow, is not reported.
func TestDeviceThatWaitsForAnotherProcess(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Hang: soon / 10})
	s, gate, done := r.Stream(0), make(chan bool), make(chan cudadrv.Result, 1)
	r.m.Lock()
	st, res := r.m.Stream(r.m.Device(0), s)
	r.OK(res)
	st.EnqueueAlways("ncclAllReduce", func(o *Op) {
		r.m.Lock()
		o.WaitForProcesses()
		r.m.Unlock()
		<-gate
	})
	r.m.Unlock()
	go func() { done <- r.On(0, func() cudadrv.Result { return r.Drv.CtxSynchronize() }) }()
	select {
	case res := <-done:
		t.Fatalf("cuCtxSynchronize returned %v: %s", res, r.m.Explain(0))
	case <-time.After(2 * soon):
	}
	close(gate)
	r.OK(<-done)
	require.Empty(t, r.m.Reports())
}

// More streams than hardware queues share them: a kernel waits for kernels of other streams.
func TestStreamsShareHardwareQueues(t *testing.T) {
	for _, queues := range []int{8, 32} {
		cfg := Config{Devices: 1, Queues: queues}
		if queues == 8 {
			cfg.Hang = soon
		}
		r := newRig(t, cfg)
		flag := make(chan bool)
		var spin, release cudadrv.Function
		spin = r.function(0, Kernel{Name: "spin", Func: func(k *KernelCall) {
			k.Await(func() bool {
				select {
				case <-flag:
					return true
				default:
					return false
				}
			})
		}})
		release = r.function(0, Kernel{Name: "release", Func: func(*KernelCall) { close(flag) }})
		for range 8 {
			s := r.Stream(0)
			r.launch(spin, s)
			r.launch(spin, s) // waits for the first one
		}
		last := r.Stream(0)
		r.launch(release, last)
		res := r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(last) })
		if queues == 8 {
			require.Equal(t, cudadrv.ErrorLaunchTimeout, res)
			require.Contains(t, r.m.Explain(0), "CUDA_DEVICE_MAX_CONNECTIONS")
			continue
		}
		r.OK(res)
		r.OK(r.On(0, r.Drv.CtxSynchronize))
		require.Empty(t, r.m.Reports())
	}
}

func TestOverlappingCopies(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 4096)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 4096, s) })
	copies := func(dst, src cudadrv.DevicePtr, n uintptr) cudadrv.Result {
		return r.On(0, func() cudadrv.Result { return r.Drv.MemcpyDtoDAsync(dst, src, n, s) })
	}
	r.OK(copies(p, p, 100))
	r.OK(copies(p, p+100, 100))
	rect := func(dst, src cudadrv.DevicePtr, dstPitch, srcPitch uintptr) cudadrv.Result {
		return r.On(0, func() cudadrv.Result {
			return r.Drv.Memcpy2DAsync(cudadrv.Memcpy2D{Dst: dst, Src: src, DstPitch: dstPitch, SrcPitch: srcPitch, WidthInBytes: 16, Height: 8}, s)
		})
	}
	r.OK(rect(p+16, p, 64, 64))
	require.Empty(t, r.m.Reports())
	require.Equal(t, cudadrv.ErrorInvalidValue, copies(p, p+99, 100))
	require.Equal(t, cudadrv.ErrorInvalidValue, copies(p+99, p, 100))
	require.Equal(t, cudadrv.ErrorInvalidValue, rect(p+15, p, 64, 64))
	require.Equal(t, cudadrv.ErrorInvalidValue, rect(p, p, 64, 32))
	require.Len(t, r.m.Reports(), 4)
	r.Sync(0, s)
}

// CUDA pins pages for writing.
func TestPinnedPages(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	const n = 4 * 4096
	base, err := unix.MmapPtr(-1, 0, nil, n+4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.MunmapPtr(base, n)) }()
	register := func(at, bytes uintptr) cudadrv.Result {
		return r.On(0, func() cudadrv.Result { return r.Drv.MemHostRegister(unsafe.Add(base, at), bytes, 0) })
	}
	require.NoError(t, unix.Mprotect(unsafe.Slice((*byte)(unsafe.Add(base, 2*4096)), 4096), unix.PROT_READ))
	r.OK(register(0, 100))
	r.OK(register(200, 100)) // of the same page
	require.Equal(t, cudadrv.ErrorInvalidValue, register(4096, 2*4096))
	require.Equal(t, cudadrv.ErrorInvalidValue, register(2*4096, 1))
	r.OK(register(3*4096, 4096))
	require.NoError(t, unix.Mprotect(unsafe.Slice((*byte)(unsafe.Add(base, 2*4096)), 4096), unix.PROT_READ|unix.PROT_WRITE))
	r.OK(register(4096, 2*4096))
	require.NoError(t, unix.MunmapPtr(unsafe.Add(base, n), 4096))
	require.Equal(t, cudadrv.ErrorInvalidValue, register(n, 4096))
}

// CUDA has no way to use a lost device again in the same process.
func TestLostDeviceStaysLost(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "cuEventCreate#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { _, res := r.Drv.EventCreate(0); return res }))
	r.OK(r.Drv.DevicePrimaryCtxRelease(0))
	_, res := r.Drv.DevicePrimaryCtxRetain(0)
	r.OK(res)
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, r.Drv.CtxSynchronize))
}

// The limits of a compiled kernel hold for launches and occupancy.
func TestKernelLimits(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	launch := func(f cudadrv.Function, threads, shared uint32) cudadrv.Result {
		return r.On(0, func() cudadrv.Result {
			return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{threads, 1, 1}, shared, s, nil)
		})
	}
	occupancy := func(f cudadrv.Function, threads int32) (n int32) {
		r.Do(0, func() (res cudadrv.Result) {
			n, res = r.Drv.OccupancyMaxActiveBlocksPerMultiprocessor(f, threads, 0)
			return res
		})
		return n
	}
	nothing := func(*KernelCall) {}
	bounded := r.function(0, Kernel{Name: "bounded", Func: nothing, Limits: Limits{MaxThreads: 128}})
	r.OK(launch(bounded, 128, 0))
	require.Equal(t, cudadrv.ErrorInvalidValue, launch(bounded, 129, 0))

	static := r.function(0, Kernel{Name: "static", Func: nothing, Limits: Limits{SharedBytes: 40000}})
	r.OK(launch(static, 32, 9152))
	require.Equal(t, cudadrv.ErrorInvalidValue, launch(static, 32, 9153))
	require.EqualValues(t, 5, occupancy(static, 128)) // as on an H200
	odd := r.function(0, Kernel{Name: "odd", Func: nothing, Limits: Limits{SharedBytes: maxSharedPerSM/5 - reservedShared}})
	require.EqualValues(t, 4, occupancy(odd, 128), "with the rounding of each block, 5 do not fit")
	set := func(n int32) cudadrv.Result {
		return r.On(0, func() cudadrv.Result { return r.Drv.FuncSetAttribute(static, cudadrv.FuncMaxDynamicSharedBytes, n) })
	}
	require.Equal(t, cudadrv.ErrorInvalidValue, set(200000))
	r.OK(set(192448))

	many := r.function(0, Kernel{Name: "many", Func: nothing, Limits: Limits{Registers: 168}})
	r.OK(launch(many, 384, 0)) // as on an H200
	require.Equal(t, cudadrv.ErrorInvalidValue, launch(many, 385, 0))
	require.EqualValues(t, 1, occupancy(many, 384))
	require.EqualValues(t, 3, occupancy(many, 128))

	local := r.function(0, Kernel{Name: "local", Func: nothing, Limits: Limits{LocalBytes: 600000}})
	require.Equal(t, cudadrv.ErrorInvalidValue, launch(local, 32, 0))
	r.Sync(0, s)
}

// Under CUDA_LAUNCH_BLOCKING the stream is idle after each call, and the call
// that goes wrong is the one that says so.
func TestBlocking(t *testing.T) {
	r := newRig(t, Config{Devices: 2, Blocking: true})
	s, p := r.Stream(0), r.Alloc(0, 1<<20)
	for i := range 200 {
		r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, uint8(i), 1<<20, s) })
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) })
	}
	res := r.On(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 2<<20, s) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, res)

	r = newRig(t, Config{Devices: 1})
	s, p = r.Stream(0), r.Alloc(0, 1<<20)
	res = r.On(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 2<<20, s) })
	require.Equal(t, cudadrv.Success, res, "without it a later call does")
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
}
