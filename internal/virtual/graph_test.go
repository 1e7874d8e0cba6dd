package virtual

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// captured captures what f enqueues on the stream.
func (r *rig) captured(s cudadrv.Stream, f func()) cudadrv.GraphExec {
	r.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.do(0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal) })
	f()
	var g cudadrv.Graph
	var x cudadrv.GraphExec
	r.do(0, func() (res cudadrv.Result) { g, res = r.drv.StreamEndCapture(s); return res })
	r.do(0, func() (res cudadrv.Result) { x, res = r.drv.GraphInstantiateWithFlags(g, 0); return res })
	r.do(0, func() cudadrv.Result { return r.drv.GraphDestroy(g) })
	return x
}

func (r *rig) follow(e cudadrv.Event, after, s cudadrv.Stream) {
	r.t.Helper()
	r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, s) })
	r.do(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(after, e, 0) })
}

func (r *rig) set(s cudadrv.Stream, p cudadrv.DevicePtr) {
	r.t.Helper()
	r.do(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 64, s) })
}

func (r *rig) replay(x cudadrv.GraphExec, s cudadrv.Stream) cudadrv.Result {
	r.t.Helper()
	return r.on(0, func() cudadrv.Result { return r.drv.GraphLaunch(x, s) })
}

// Two branches that touch the same bytes race in every replay.
func TestRaceWithinGraph(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, e := r.stream(0), r.stream(0), r.event(0)
	p := r.alloc(0, 64)
	x := r.captured(a, func() {
		r.follow(e, b, a)
		r.set(a, p)
		r.set(b, p)
		r.follow(e, a, b)
	})
	require.Empty(t, r.m.Reports(), "a capture touches nothing")
	r.ok(r.replay(x, a))
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(a) }))
	require.Contains(t, r.m.Explain(0), "race: cuMemsetD8Async")
}

// A launch is ordered with its stream only.
func TestRaceWithGraph(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b := r.stream(0), r.stream(0)
	p := r.alloc(0, 64)
	x := r.captured(a, func() { r.set(a, p) })
	r.set(a, p)
	r.ok(r.replay(x, a))
	r.ok(r.replay(x, b)) // after the launch on a
	require.Empty(t, r.m.Reports())
	r.set(a, p) // but this is not after the launch on b
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.on(0, r.drv.CtxSynchronize))
	require.Contains(t, r.m.Explain(0), "race")
}

func TestGraphUsesFreedMemory(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, 64)
	x := r.captured(s, func() { r.set(s, p) })
	r.ok(r.replay(x, s))
	r.do(0, func() cudadrv.Result { return r.drv.MemFree(p) })
	r.ok(r.replay(x, s))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.on(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "was freed by cuMemFree")
}

func TestGraphUsesUnloadedModule(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	var mod cudadrv.Module
	var f cudadrv.Function
	image := r.m.ModuleImage([]Kernel{{Name: "none", Func: func(*KernelCall) {}}})
	r.do(0, func() (res cudadrv.Result) { mod, res = r.drv.ModuleLoadData(image); return res })
	r.do(0, func() (res cudadrv.Result) { f, res = r.drv.ModuleGetFunction(mod, "none"); return res })
	x := r.captured(s, func() {
		r.do(0, func() cudadrv.Result {
			return r.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, nil)
		})
	})
	r.ok(r.replay(x, s))
	r.sync(0, s)
	r.do(0, func() cudadrv.Result { return r.drv.ModuleUnload(mod) })
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.replay(x, s))
}

// What virtual devices refuse in a capture, each in one of its own, and that the
// device is as good as before.
func TestCaptureRefuses(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := r.alloc(0, 64)
	var pooled cudadrv.DevicePtr
	outside := r.stream(0)
	r.do(0, func() (res cudadrv.Result) { pooled, res = r.drv.MemAllocAsync(64, outside); return res })
	host := make([]byte, 64)
	other := r.captured(outside, func() { r.set(outside, p) })
	for name, call := range map[string]func(s cudadrv.Stream) cudadrv.Result{
		"cuMemAllocAsync": func(s cudadrv.Stream) cudadrv.Result { _, res := r.drv.MemAllocAsync(64, s); return res },
		"cuMemFreeAsync":  func(s cudadrv.Stream) cudadrv.Result { return r.drv.MemFreeAsync(pooled, s) },
		"pageable to device": func(s cudadrv.Stream) cudadrv.Result {
			return r.drv.MemcpyHtoDAsync(p, unsafe.Pointer(&host[0]), 64, s)
		},
		"device to pageable": func(s cudadrv.Stream) cudadrv.Result {
			return r.drv.MemcpyDtoHAsync(unsafe.Pointer(&host[0]), p, 64, s)
		},
		"cuMemcpyPeerAsync": func(s cudadrv.Stream) cudadrv.Result {
			return r.drv.MemcpyPeerAsync(p, r.ctxs[0], pooled, r.ctxs[0], 64, s)
		},
		"destroying the stream": r.drv.StreamDestroy,
		"a graph in a graph":    func(s cudadrv.Stream) cudadrv.Result { return r.drv.GraphLaunch(other, s) },
	} {
		s := r.stream(0)
		r.do(0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
		require.Equal(t, cudadrv.ErrorStreamCaptureUnsupported, r.on(0, func() cudadrv.Result { return call(s) }), name)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated,
			r.on(0, func() cudadrv.Result { return r.drv.MemsetD8Async(p, 1, 64, s) }), name)
		r.do(0, func() cudadrv.Result {
			status, res := r.drv.StreamIsCapturing(s)
			require.Equal(t, cudadrv.CaptureInvalidated, status)
			return res
		})
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated,
			r.on(0, func() cudadrv.Result { _, res := r.drv.StreamEndCapture(s); return res }), name)
		r.sync(0, s)
	}
	r.do(0, func() cudadrv.Result { return r.drv.MemFreeAsync(pooled, outside) })
	r.sync(0, outside)
}

// An event that was recorded in a capture that has ended marks nothing.
func TestEventOfEndedCapture(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, e := r.stream(0), r.event(0)
	r.captured(s, func() { r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, s) }) })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(s, e, 0) }))
	require.Equal(t, cudadrv.ErrorCapturedEvent, r.on(0, func() cudadrv.Result { return r.drv.EventQuery(e) }))
	r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, s) })
	r.do(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(s, e, 0) })
	r.sync(0, s)
}

func TestDestroyedGraphs(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, 64)
	x := r.captured(s, func() { r.set(s, p) })
	r.ok(r.replay(x, s))
	r.do(0, func() cudadrv.Result { return r.drv.GraphExecDestroy(x) })
	require.Equal(t, cudadrv.ErrorInvalidValue, r.replay(x, s))
	require.Equal(t, cudadrv.ErrorInvalidValue, r.on(0, func() cudadrv.Result { return r.drv.GraphExecDestroy(x) }))
	require.Equal(t, byte(1), download[byte](r, 0, s, p, 1)[0], "the launch completed")
	require.Empty(t, r.m.graphs)
	require.Empty(t, r.m.execs)
	require.Empty(t, r.m.captures)

	slots := len(r.m.slots.last)
	for range 50 {
		z := r.captured(s, func() { r.set(s, p) })
		r.do(0, func() cudadrv.Result { return r.drv.GraphExecDestroy(z) })
	}
	require.Len(t, r.m.slots.last, slots, "the lanes' slots are used again")

	// Resetting a device takes its graphs and captures.
	y := r.captured(s, func() { r.set(s, p) })
	r.do(0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
	r.ok(r.drv.DevicePrimaryCtxRelease(0))
	_, res := r.drv.DevicePrimaryCtxRetain(0)
	r.ok(res)
	require.Equal(t, cudadrv.ErrorInvalidValue, r.replay(y, r.stream(0)))
	require.Empty(t, r.m.captures)
}

func TestGraphFaults(t *testing.T) {
	r := newRig(t, Config{Devices: 1, Faults: "cuGraphLaunch#1=CUDA_ERROR_OUT_OF_MEMORY, hang@cuGraphLaunch#2"})
	s, p := r.stream(0), r.alloc(0, 64)
	x := r.captured(s, func() { r.set(s, p) })
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.replay(x, s))
	r.sync(0, s)
	r.ok(r.replay(x, s))
	require.Equal(t, cudadrv.ErrorNotReady, r.on(0, func() cudadrv.Result { return r.drv.StreamQuery(s) }))
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	r.m.devices[0].lose(cudadrv.ErrorUnknown, "the test is over") // ends what waits for the hang
}

// The end of a capture on another thread fails, and the capture is lost.
func TestEndOnAnotherThread(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	end := func() cudadrv.Result {
		return r.on(0, func() cudadrv.Result { _, res := r.drv.StreamEndCapture(s); return res })
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.do(0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, cudadrv.CaptureThreadLocal) })
	other := make(chan cudadrv.Result)
	go func() { other <- end() }()
	require.Equal(t, cudadrv.ErrorStreamCaptureWrongThread, <-other)
	require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, end())
	r.sync(0, s)
}

func TestDotOfGraph(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.stream(0), r.alloc(0, 64)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.do(0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, cudadrv.CaptureGlobal) })
	r.set(s, p)
	r.set(s, p)
	var g cudadrv.Graph
	r.do(0, func() (res cudadrv.Result) { g, res = r.drv.StreamEndCapture(s); return res })
	path := filepath.Join(t.TempDir(), "graph.dot")
	r.do(0, func() cudadrv.Result { return r.drv.GraphDebugDotPrint(g, path, 0) })
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(text), "n0 -> n1")
	require.Equal(t, cudadrv.ErrorOperatingSystem, r.on(0, func() cudadrv.Result { return r.drv.GraphDebugDotPrint(g, "/nowhere/x", 0) }))
}
