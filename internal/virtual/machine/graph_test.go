package machine

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// captured captures what f enqueues on the stream.
func (r *rig) captured(s cudadrv.Stream, f func()) cudadrv.GraphExec {
	r.T.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal) })
	f()
	var g cudadrv.Graph
	var x cudadrv.GraphExec
	r.Do(0, func() (res cudadrv.Result) { g, res = r.Drv.StreamEndCapture(s); return res })
	r.Do(0, func() (res cudadrv.Result) { x, res = r.Drv.GraphInstantiateWithFlags(g, 0); return res })
	r.Do(0, func() cudadrv.Result { return r.Drv.GraphDestroy(g) })
	return x
}

func (r *rig) follow(e cudadrv.Event, after, s cudadrv.Stream) {
	r.T.Helper()
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, s) })
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(after, e, 0) })
}

func (r *rig) set(s cudadrv.Stream, p cudadrv.DevicePtr) {
	r.T.Helper()
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 64, s) })
}

func (r *rig) replay(x cudadrv.GraphExec, s cudadrv.Stream) cudadrv.Result {
	r.T.Helper()
	return r.On(0, func() cudadrv.Result { return r.Drv.GraphLaunch(x, s) })
}

// Two branches that touch the same bytes race in every replay.
func TestRaceWithinGraph(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, e := r.Stream(0), r.Stream(0), r.Event(0)
	p := r.Alloc(0, 64)
	x := r.captured(a, func() {
		r.follow(e, b, a)
		r.set(a, p)
		r.set(b, p)
		r.follow(e, a, b)
	})
	require.Empty(t, r.m.Reports(), "a capture touches nothing")
	r.OK(r.replay(x, a))
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(a) }))
	require.Contains(t, r.m.Explain(0), "race: cuMemsetD8Async")
}

// A launch is ordered with its stream only.
func TestRaceWithGraph(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.Stream(0), r.Stream(0)
	p := r.Alloc(0, 64)
	x := r.captured(a, func() { r.set(a, p) })
	r.set(a, p)
	r.OK(r.replay(x, a))
	r.OK(r.replay(x, b)) // after the launch on a
	require.Empty(t, r.m.Reports())
	r.set(a, p) // but this is not after the launch on b
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.On(0, r.Drv.CtxSynchronize))
	require.Contains(t, r.m.Explain(0), "race")
}

func TestGraphUsesFreedMemory(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 64)
	x := r.captured(s, func() { r.set(s, p) })
	r.OK(r.replay(x, s))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
	r.OK(r.replay(x, s))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "was freed by cuMemFree")
}

// pointers are the kernels that write 8 bytes at an address: of a parameter, of a struct, and of memory.
var pointers = []Kernel{
	{Name: "direct", Params: []Param{PtrParam}, Func: func(k *KernelCall) { k.Write(k.Ptr(0), 8)[0] = 7 }},
	{Name: "struct", Params: []Param{StructParam(24)}, Func: func(k *KernelCall) {
		k.Write(cudadrv.DevicePtr(binary.NativeEndian.Uint64(k.Struct(0)[8:])), 8)[0] = 7
	}},
	{Name: "table", Params: []Param{PtrParam}, Func: func(k *KernelCall) {
		k.Write(cudadrv.DevicePtr(binary.NativeEndian.Uint64(k.Read(k.Ptr(0), 8))), 8)[0] = 7
	}},
}

// An operation of a graph must not use memory that an allocator has freed and allocated again since the capture. A kernel
// may, if it reads the address from memory.
func TestGraphUsesMemoryAllocatedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		again func(r *rig, s cudadrv.Stream, x cudadrv.DevicePtr)
		use   string // a kernel, or "" for a fill
		want  string
	}{
		"fill": {again: func(r *rig, s cudadrv.Stream, x cudadrv.DevicePtr) { r.OK(r.markAllocated(x, 2048, s)) },
			want: "cuMemsetD8Async on stream 0x"},
		"parameter": {use: "direct", want: "kernel direct on stream 0x",
			again: func(r *rig, s cudadrv.Stream, x cudadrv.DevicePtr) { r.OK(r.markAllocated(x, 2048, s)) }},
		"struct": {use: "struct", want: "kernel struct on stream 0x",
			again: func(r *rig, s cudadrv.Stream, x cudadrv.DevicePtr) { r.OK(r.markAllocated(x, 2048, s)) }},
		"part of it": {use: "direct", want: "which lies in 512 bytes at 0x",
			again: func(r *rig, s cudadrv.Stream, x cudadrv.DevicePtr) {
				r.OK(r.markAllocated(x+512, 512, s))
				r.OK(r.markAllocated(x, 512, s))
			}},
		"address in memory": {use: "table",
			again: func(r *rig, s cudadrv.Stream, x cudadrv.DevicePtr) { r.OK(r.markAllocated(x, 2048, s)) }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 1})
			s, p := r.Stream(0), r.Alloc(0, unit)
			table, x := p, p+4096
			r.OK(r.markAllocated(table, 512, s))
			r.OK(r.markAllocated(x, 2048, s))
			virtualtest.Upload(r.Rig, 0, s, table, []uint64{uint64(x)})
			at := x
			if c.use == "table" {
				at = table
			}
			f := cudadrv.Function(0)
			if c.use != "" {
				f = r.function(0, pointers[slices.IndexFunc(pointers, func(k Kernel) bool { return k.Name == c.use })])
			}
			g := r.captured(s, func() {
				if c.use == "" {
					r.set(s, at)
					return
				}
				words := [3]uint64{uint64(at), uint64(at)}
				params := []unsafe.Pointer{unsafe.Pointer(&words)}
				r.Do(0, func() cudadrv.Result {
					return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, unsafe.Pointer(unsafe.SliceData(params)))
				})
			})
			r.OK(r.replay(g, s))
			r.Sync(0, s)
			r.OK(r.markFreed(x, 2048, s))
			c.again(r, s, x)
			r.OK(r.replay(g, s))
			res := r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
			if c.want == "" {
				require.Equal(t, cudadrv.Success, res, r.m.Explain(0))
				return
			}
			require.Equal(t, cudadrv.ErrorIllegalAddress, res)
			require.Contains(t, r.m.Explain(0), c.want)
			require.Contains(t, r.m.Explain(0), "that were allocated after the graph captured the operation")
		})
	}
}

// Memory that was allocated before the capture and not freed stays usable when its neighbours change, and an update takes
// the time of the new capture.
func TestGraphUsesMemoryThatStays(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, unit)
	r.OK(r.markAllocated(p, 512, s))
	r.OK(r.markAllocated(p+512, 512, s))
	r.OK(r.markAllocated(p+1024, 512, s))
	x := r.captured(s, func() { r.set(s, p+512) })
	r.OK(r.markFreed(p, 512, s))
	r.OK(r.markFreed(p+1024, 512, s))
	r.OK(r.markAllocated(p, 512, s))
	r.OK(r.markAllocated(p+1024, 2048, s))
	r.OK(r.replay(x, s))
	r.Sync(0, s)
	r.OK(r.markFreed(p+512, 512, s))
	r.OK(r.markAllocated(p+512, 512, s))
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
	r.set(s, p+512)
	var g cudadrv.Graph
	r.Do(0, func() (res cudadrv.Result) { g, res = r.Drv.StreamEndCapture(s); return res })
	r.Do(0, func() cudadrv.Result { _, res := r.Drv.GraphExecUpdate(x, g); return res })
	r.OK(r.replay(x, s))
	r.Sync(0, s)
	require.Empty(t, r.m.Reports())
}

func TestGraphUsesUnloadedModule(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	var mod cudadrv.Module
	var f cudadrv.Function
	image := r.m.ModuleImage([]Kernel{{Name: "none", Func: func(*KernelCall) {}}})
	r.Do(0, func() (res cudadrv.Result) { mod, res = r.Drv.ModuleLoadData(image); return res })
	r.Do(0, func() (res cudadrv.Result) { f, res = r.Drv.ModuleGetFunction(mod, "none"); return res })
	x := r.captured(s, func() {
		r.Do(0, func() cudadrv.Result {
			return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, nil)
		})
	})
	r.OK(r.replay(x, s))
	r.Sync(0, s)
	r.Do(0, func() cudadrv.Result { return r.Drv.ModuleUnload(mod) })
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.replay(x, s))
}

// What virtual devices refuse in a capture, each in one of its own, and that the
// device is as good as before.
func TestCaptureRefuses(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := r.Alloc(0, 64)
	var pooled cudadrv.DevicePtr
	outside := r.Stream(0)
	r.Do(0, func() (res cudadrv.Result) { pooled, res = r.Drv.MemAllocAsync(64, outside); return res })
	host := make([]byte, 64)
	other := r.captured(outside, func() { r.set(outside, p) })
	for name, call := range map[string]func(s cudadrv.Stream) cudadrv.Result{
		"cuMemAllocAsync": func(s cudadrv.Stream) cudadrv.Result { _, res := r.Drv.MemAllocAsync(64, s); return res },
		"cuMemFreeAsync":  func(s cudadrv.Stream) cudadrv.Result { return r.Drv.MemFreeAsync(pooled, s) },
		"pageable to device": func(s cudadrv.Stream) cudadrv.Result {
			return r.Drv.MemcpyHtoDAsync(p, unsafe.Pointer(&host[0]), 64, s)
		},
		"device to pageable": func(s cudadrv.Stream) cudadrv.Result {
			return r.Drv.MemcpyDtoHAsync(unsafe.Pointer(&host[0]), p, 64, s)
		},
		"cuMemcpyPeerAsync": func(s cudadrv.Stream) cudadrv.Result {
			return r.Drv.MemcpyPeerAsync(p, r.Contexts[0], pooled, r.Contexts[0], 64, s)
		},
		"destroying the stream": r.Drv.StreamDestroy,
		"a graph in a graph":    func(s cudadrv.Stream) cudadrv.Result { return r.Drv.GraphLaunch(other, s) },
	} {
		s := r.Stream(0)
		r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
		require.Equal(t, cudadrv.ErrorStreamCaptureUnsupported, r.On(0, func() cudadrv.Result { return call(s) }), name)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated,
			r.On(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 1, 64, s) }), name)
		r.Do(0, func() cudadrv.Result {
			status, res := r.Drv.StreamIsCapturing(s)
			require.Equal(t, cudadrv.CaptureInvalidated, status)
			return res
		})
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated,
			r.On(0, func() cudadrv.Result { _, res := r.Drv.StreamEndCapture(s); return res }), name)
		r.Sync(0, s)
	}
	r.Do(0, func() cudadrv.Result { return r.Drv.MemFreeAsync(pooled, outside) })
	r.Sync(0, outside)
}

// An event that was recorded in a capture that has ended marks nothing.
func TestEventOfEndedCapture(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, e := r.Stream(0), r.Event(0)
	r.captured(s, func() { r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, s) }) })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(s, e, 0) }))
	require.Equal(t, cudadrv.ErrorCapturedEvent, r.On(0, func() cudadrv.Result { return r.Drv.EventQuery(e) }))
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, s) })
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(s, e, 0) })
	r.Sync(0, s)
}

func TestDestroyedGraphs(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 64)
	x := r.captured(s, func() { r.set(s, p) })
	r.OK(r.replay(x, s))
	r.Do(0, func() cudadrv.Result { return r.Drv.GraphExecDestroy(x) })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.replay(x, s))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.On(0, func() cudadrv.Result { return r.Drv.GraphExecDestroy(x) }))
	require.Equal(t, byte(1), virtualtest.Download[byte](r.Rig, 0, s, p, 1)[0], "the launch completed")
	require.Empty(t, r.m.graphs)
	require.Empty(t, r.m.execs)
	require.Empty(t, r.m.captures)

	slots := r.m.slots.Made() + 1 // the branch of x may still be busy with its end
	for range 50 {
		z := r.captured(s, func() { r.set(s, p) })
		r.Do(0, func() cudadrv.Result { return r.Drv.GraphExecDestroy(z) })
	}
	require.LessOrEqual(t, r.m.slots.Made(), slots, "the branches' slots are used again")

	// Resetting a device takes its graphs and captures.
	y := r.captured(s, func() { r.set(s, p) })
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
	r.OK(r.Drv.DevicePrimaryCtxRelease(0))
	_, res := r.Drv.DevicePrimaryCtxRetain(0)
	r.OK(res)
	require.Equal(t, cudadrv.ErrorInvalidValue, r.replay(y, r.Stream(0)))
	require.Empty(t, r.m.captures)
}

func TestGraphFaults(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "cuGraphLaunch#1=CUDA_ERROR_OUT_OF_MEMORY, hang@cuGraphLaunch#2"})
	s, p := r.Stream(0), r.Alloc(0, 64)
	x := r.captured(s, func() { r.set(s, p) })
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.replay(x, s))
	r.Sync(0, s)
	r.OK(r.replay(x, s))
	require.Equal(t, cudadrv.ErrorNotReady, r.On(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) }))
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	r.m.devices[0].lose(cudadrv.ErrorUnknown, "the test is over") // ends what waits for the hang
}

// The end of a capture on another thread fails, and the capture is lost.
func TestEndOnAnotherThread(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	end := func() cudadrv.Result {
		return r.On(0, func() cudadrv.Result { _, res := r.Drv.StreamEndCapture(s); return res })
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal) })
	other := make(chan cudadrv.Result)
	go func() { other <- end() }()
	require.Equal(t, cudadrv.ErrorStreamCaptureWrongThread, <-other)
	require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, end())
	r.Sync(0, s)
}

func TestDotOfGraph(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 64)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureGlobal) })
	r.set(s, p)
	r.set(s, p)
	var g cudadrv.Graph
	r.Do(0, func() (res cudadrv.Result) { g, res = r.Drv.StreamEndCapture(s); return res })
	path := filepath.Join(t.TempDir(), "graph.dot")
	r.Do(0, func() cudadrv.Result { return r.Drv.GraphDebugDotPrint(g, path, 0) })
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(text), "n0 -> n1")
	require.Equal(t, cudadrv.ErrorOperatingSystem, r.On(0, func() cudadrv.Result { return r.Drv.GraphDebugDotPrint(g, "/nowhere/x", 0) }))
}

// A race with a graph names the stream that launched it, not the one that it was captured on.
func TestRaceNamesTheLaunch(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.Stream(0), r.Stream(0)
	p := r.Alloc(0, 64)
	x := r.captured(b, func() { r.set(b, p) })
	r.set(b, p)
	r.OK(r.replay(x, a))
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.On(0, r.Drv.CtxSynchronize))
	why := r.m.Explain(0)
	require.Contains(t, why, sanitizer.NameOf(a))
	require.Contains(t, why, sanitizer.NameOf(b))
}

// The driver ends a capture even if cuStreamEndCapture fails.
func TestFaultEndsACapture(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "cuStreamEndCapture#1=CUDA_ERROR_OUT_OF_MEMORY"})
	s, p := r.Stream(0), r.Alloc(0, 64)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal) })
	r.set(s, p)
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.On(0, func() cudadrv.Result { _, res := r.Drv.StreamEndCapture(s); return res }))
	r.set(s, p)
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
}

// Faults deliver a wrong byte, and delay a copy.
func TestWrongAndSlowCopies(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "wrong@cuMemcpyHtoDAsync#2, slow@cuMemcpyHtoDAsync#3=50ms"})
	s, p := r.Stream(0), r.Alloc(0, 16)
	want := []int32{1, 2, 3, 4}
	for n := 1; n <= 3; n++ {
		begun := time.Now()
		virtualtest.Upload(r.Rig, 0, s, p, want)
		got := virtualtest.Download[int32](r.Rig, 0, s, p, 4)
		require.Equal(t, n != 2, slices.Equal(want, got), "copy %d", n)
		require.True(t, n < 3 || time.Since(begun) >= 50*time.Millisecond, "it was not delayed")
	}
}

// Hosts with the same name differ in their network namespaces at least.
func TestHostIdentity(t *testing.T) {
	network, err := os.Readlink("/proc/self/ns/net")
	require.NoError(t, err)
	require.Contains(t, hostIdentity(), network)
	require.Equal(t, hostIdentity(), hostIdentity())
}
