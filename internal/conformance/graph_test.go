package conformance

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// testGraphs tests captures and graphs.
func (r *rig) testGraphs(t *testing.T) {
	t.Run("Replay", r.testGraphReplay)
	t.Run("Fork", r.testGraphFork)
	t.Run("ExternalEvents", r.testGraphExternalEvents)
	t.Run("Modes", r.testCaptureModes)
	t.Run("Refusals", r.testCaptureRefusals)
	t.Run("Update", r.testGraphUpdate)
	t.Run("HostFuncs", r.testGraphHostFuncs)
	t.Run("Unmapped", r.testGraphUnmapped)
}

// testGraphUnmapped frees memory between the end of a capture and the instantiation, which
// then fails if a copy or a fill uses the memory.
func (r *rig) testGraphUnmapped(t *testing.T) {
	s := r.stream(t, 0)
	for name, call := range map[string]func(x, y cudadrv.DevicePtr) cudadrv.Result{
		"fill":      func(x, _ cudadrv.DevicePtr) cudadrv.Result { return r.drv.MemsetD8Async(x, 1, 4096, s) },
		"copy to":   func(x, y cudadrv.DevicePtr) cudadrv.Result { return r.drv.MemcpyDtoDAsync(x, y, 4096, s) },
		"copy from": func(x, y cudadrv.DevicePtr) cudadrv.Result { return r.drv.MemcpyDtoDAsync(y, x, 4096, s) },
	} {
		t.Run(name, func(t *testing.T) {
			if _, cuda := r.drv.(*cudadrv.Lib); cuda && name != "fill" {
				t.Skip("CUDA 13.0 crashes when it instantiates a graph that copies unmapped memory")
			}
			y := r.alloc(t, 0, 4096)
			var x cudadrv.DevicePtr
			r.do(t, 0, func() (res cudadrv.Result) { x, res = r.drv.MemAlloc(4 << 20); return res })
			r.begin(t, s, cudadrv.CaptureRelaxed)
			r.do(t, 0, func() cudadrv.Result { return call(x, y) })
			var g cudadrv.Graph
			r.do(t, 0, func() (res cudadrv.Result) { g, res = r.drv.StreamEndCapture(s); return res })
			r.do(t, 0, func() cudadrv.Result { return r.drv.MemFree(x) })
			require.Equal(t, cudadrv.ErrorInvalidValue, r.on(t, 0, func() (res cudadrv.Result) {
				_, res = r.drv.GraphInstantiateWithFlags(g, 0)
				return res
			}))
			r.do(t, 0, func() cudadrv.Result { return r.drv.GraphDestroy(g) })
		})
	}
}

// begin starts a capture. It locks the test's goroutine to its thread until the
// end of the test.
func (r *rig) begin(t *testing.T, s cudadrv.Stream, mode cudadrv.CaptureMode) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, mode) })
}

// end ends a valid capture and instantiates the graph.
func (r *rig) end(t *testing.T, s cudadrv.Stream, nodes int) (g cudadrv.Graph, x cudadrv.GraphExec) {
	t.Helper()
	r.do(t, 0, func() (res cudadrv.Result) { g, res = r.drv.StreamEndCapture(s); return res })
	t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return r.drv.GraphDestroy(g) }) })
	r.do(t, 0, func() cudadrv.Result {
		n, res := r.drv.GraphGetNodes(g)
		require.Equal(t, uintptr(nodes), n)
		return res
	})
	r.do(t, 0, func() (res cudadrv.Result) { x, res = r.drv.GraphInstantiateWithFlags(g, 0); return res })
	t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return r.drv.GraphExecDestroy(x) }) })
	return g, x
}

func (r *rig) graphLaunch(t *testing.T, x cudadrv.GraphExec, s cudadrv.Stream) {
	t.Helper()
	r.do(t, 0, func() cudadrv.Result { return r.drv.GraphLaunch(x, s) })
}

// follow orders a stream after another one, by an event of the other stream's device.
func (r *rig) follow(t *testing.T, e cudadrv.Event, after, s cudadrv.Stream) {
	t.Helper()
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecord(e, s) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamWaitEvent(after, e, 0) })
}

// testGraphReplay copies from page-locked memory, which each launch must read
// again.
func (r *rig) testGraphReplay(t *testing.T) {
	const n = 4096
	s, other := r.stream(t, 0), r.stream(t, 0)
	p := r.alloc(t, 0, 2*n)
	var in unsafe.Pointer
	r.do(t, 0, func() (res cudadrv.Result) { in, res = r.drv.MemHostAlloc(n, 0); return res })
	t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return r.drv.MemFreeHost(in) }) })
	host := unsafe.Slice((*byte)(in), n)
	r.set(t, 0, s, p, 0x77, 2*n)
	r.begin(t, s, cudadrv.CaptureThreadLocal)
	r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyHtoDAsync(p, in, n, s) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.MemcpyDtoDAsync(p+n, p, n, s) })
	r.set(t, 0, s, p, 0x11, n/2)
	r.do(t, 0, func() cudadrv.Result {
		status, id, res := r.drv.StreamGetCaptureInfo(s)
		require.Equal(t, cudadrv.CaptureActive, status)
		require.NotZero(t, id)
		return res
	})
	_, x := r.end(t, s, 3)
	r.do(t, 0, func() cudadrv.Result {
		status, res := r.drv.StreamIsCapturing(s)
		require.Equal(t, cudadrv.CaptureNone, status)
		return res
	})
	require.Equal(t, byte(0x77), r.download(t, 0, s, p, 2*n)[2*n-1], "a capture runs nothing")
	r.do(t, 0, func() cudadrv.Result { return r.drv.GraphUpload(x, s) })
	for round := range 5 {
		want := pattern(n, uint64(round))
		copy(host, want)
		r.graphLaunch(t, x, other)
		got := r.download(t, 0, other, p, 2*n)
		require.Equal(t, want, got[n:])
		require.Equal(t, byte(0x11), got[0])
		require.Equal(t, want[n/2:], got[n/2:n])
	}
}

// testGraphFork captures two streams, on two devices if available.
func (r *rig) testGraphFork(t *testing.T) {
	const n = 1 << 16
	last := len(r.devs) - 1
	a, b := r.stream(t, 0), r.stream(t, last)
	p, q := r.alloc(t, 0, n), r.alloc(t, last, n)
	begun, done := r.event(t, 0, cudadrv.EventDisableTiming), r.event(t, last, cudadrv.EventDisableTiming)
	r.begin(t, a, cudadrv.CaptureThreadLocal)
	r.set(t, 0, a, p, 1, n)
	r.follow(t, begun, b, a)
	r.set(t, last, b, q, 2, n)
	r.set(t, 0, a, p, 3, n/2)
	r.do(t, last, func() cudadrv.Result { return r.drv.EventRecord(done, b) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamWaitEvent(a, done, 0) })
	_, x := r.end(t, a, 3)
	for range 5 {
		r.set(t, 0, a, p, 9, n)
		r.graphLaunch(t, x, a)
		got := r.download(t, 0, a, p, n)
		require.Equal(t, []byte{3, 3, 1, 1}, []byte{got[0], got[n/2-1], got[n/2], got[n-1]})
	}
	require.Equal(t, byte(2), r.download(t, last, b, q, n)[n-1])
}

func (r *rig) testCaptureModes(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	previous, res := r.drv.ThreadExchangeStreamCaptureMode(cudadrv.CaptureRelaxed)
	ok(t, res)
	require.Equal(t, cudadrv.CaptureGlobal, previous)
	previous, res = r.drv.ThreadExchangeStreamCaptureMode(previous)
	ok(t, res)
	require.Equal(t, cudadrv.CaptureRelaxed, previous)
	for mode, allowed := range map[cudadrv.CaptureMode]bool{
		cudadrv.CaptureGlobal: false, cudadrv.CaptureThreadLocal: false, cudadrv.CaptureRelaxed: true,
	} {
		s := r.stream(t, 0)
		r.do(t, 0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, mode) })
		var p cudadrv.DevicePtr
		res := r.on(t, 0, func() (res cudadrv.Result) { p, res = r.drv.MemAlloc(1 << 20); return res })
		end := r.on(t, 0, func() cudadrv.Result {
			g, res := r.drv.StreamEndCapture(s)
			if res == cudadrv.Success {
				t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return r.drv.GraphDestroy(g) }) })
			}
			return res
		})
		if allowed {
			ok(t, res)
			ok(t, end)
			r.do(t, 0, func() cudadrv.Result { return r.drv.MemFree(p) })
			continue
		}
		require.Equal(t, cudadrv.ErrorStreamCaptureUnsupported, res, "mode %d", mode)
		require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, end, "mode %d", mode)
	}
}

// testCaptureRefusals tests calls that invalidate a capture. Ending the capture
// then fails, and the streams can be used again.
func (r *rig) testCaptureRefusals(t *testing.T) {
	p := r.alloc(t, 0, 64)
	const (
		unsupported = cudadrv.ErrorStreamCaptureUnsupported
		invalidated = cudadrv.ErrorStreamCaptureInvalidated
		unjoined    = cudadrv.ErrorStreamCaptureUnjoined
		illegal     = cudadrv.ErrorIllegalState
	)
	type results []cudadrv.Result // any of these, because CUDA's documentation does not specify which
	for _, c := range []struct {
		name      string
		call      func(s, side cudadrv.Stream, e cudadrv.Event) cudadrv.Result
		want, end results
	}{
		{"Synchronize", func(s, _ cudadrv.Stream, _ cudadrv.Event) cudadrv.Result { return r.drv.StreamSynchronize(s) },
			results{unsupported}, results{invalidated}},
		{"Query", func(s, _ cudadrv.Stream, _ cudadrv.Event) cudadrv.Result { return r.drv.StreamQuery(s) },
			results{unsupported}, results{invalidated}},
		{"CtxSynchronize", func(cudadrv.Stream, cudadrv.Stream, cudadrv.Event) cudadrv.Result { return r.drv.CtxSynchronize() },
			results{unsupported}, results{invalidated}},
		{"EventSynchronize", func(_, _ cudadrv.Stream, e cudadrv.Event) cudadrv.Result { return r.drv.EventSynchronize(e) },
			results{cudadrv.ErrorCapturedEvent, unsupported}, results{invalidated}},
		{"EventQuery", func(_, _ cudadrv.Stream, e cudadrv.Event) cudadrv.Result { return r.drv.EventQuery(e) },
			results{cudadrv.ErrorCapturedEvent, unsupported}, results{invalidated}},
		{"Begin", func(s, _ cudadrv.Stream, _ cudadrv.Event) cudadrv.Result {
			return r.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed)
		}, results{illegal, unsupported, cudadrv.ErrorInvalidValue}, results{cudadrv.Success, unjoined, invalidated}},
		{"EndOfFork", func(_, side cudadrv.Stream, _ cudadrv.Event) cudadrv.Result {
			_, res := r.drv.StreamEndCapture(side)
			return res
		}, results{cudadrv.ErrorStreamCaptureUnmatched}, results{invalidated, unjoined, cudadrv.Success}},
		{"Unjoined", func(_, side cudadrv.Stream, _ cudadrv.Event) cudadrv.Result {
			return r.drv.MemsetD8Async(p, 2, 64, side)
		}, results{cudadrv.Success}, results{unjoined}},
	} {
		t.Run(c.name, func(t *testing.T) { r.refused(t, p, c.call, c.want, c.end) })
	}
	t.Run("EndWithoutBegin", func(t *testing.T) {
		s := r.stream(t, 0)
		res := r.on(t, 0, func() cudadrv.Result { _, res := r.drv.StreamEndCapture(s); return res })
		require.Contains(t, results{illegal, cudadrv.ErrorInvalidValue}, res)
	})
}

// refused issues a call while a stream is captured, which another stream and an event have
// joined. It checks the results of the call and of the end of the capture.
func (r *rig) refused(t *testing.T, p cudadrv.DevicePtr, call func(s, side cudadrv.Stream, e cudadrv.Event) cudadrv.Result, want, ends []cudadrv.Result) {
	s, side := r.stream(t, 0), r.stream(t, 0)
	e := r.event(t, 0, cudadrv.EventDisableTiming)
	r.begin(t, s, cudadrv.CaptureThreadLocal)
	r.set(t, 0, s, p, 1, 64)
	r.follow(t, e, side, s)
	require.Contains(t, want, r.on(t, 0, func() cudadrv.Result { return call(s, side, e) }))
	require.Contains(t, ends, r.on(t, 0, func() cudadrv.Result {
		g, res := r.drv.StreamEndCapture(s)
		if res == cudadrv.Success {
			t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return r.drv.GraphDestroy(g) }) })
		}
		return res
	}))
	for _, s := range []cudadrv.Stream{s, side} {
		r.set(t, 0, s, p, 3, 64)
		r.sync(t, 0, s)
	}
}

func (r *rig) testGraphUpdate(t *testing.T) {
	s := r.stream(t, 0)
	p := r.alloc(t, 0, 64)
	made := func(t *testing.T, values ...uint8) (cudadrv.Graph, cudadrv.GraphExec) {
		r.begin(t, s, cudadrv.CaptureThreadLocal)
		for _, v := range values {
			r.set(t, 0, s, p, v, 64)
		}
		return r.end(t, s, len(values))
	}
	_, x := made(t, 1)
	g, _ := made(t, 2)
	more, _ := made(t, 3, 4)
	r.do(t, 0, func() cudadrv.Result { _, res := r.drv.GraphExecUpdate(x, g); return res })
	r.graphLaunch(t, x, s)
	require.Equal(t, byte(2), r.download(t, 0, s, p, 64)[63])
	res := r.on(t, 0, func() cudadrv.Result {
		why, res := r.drv.GraphExecUpdate(x, more)
		require.Equal(t, cudadrv.GraphUpdateTopologyChanged, why)
		return res
	})
	require.Equal(t, cudadrv.ErrorGraphExecUpdateFailure, res)
	r.graphLaunch(t, x, s)
	require.Equal(t, byte(2), r.download(t, 0, s, p, 64)[63])
}

// testGraphExternalEvents records and awaits events in each launch of a graph.
func (r *rig) testGraphExternalEvents(t *testing.T) {
	const n = 1 << 12
	s, other := r.stream(t, 0), r.stream(t, 0)
	p := r.alloc(t, 0, n)
	start, end, ready := r.event(t, 0, cudadrv.EventDefault), r.event(t, 0, cudadrv.EventDefault), r.event(t, 0, cudadrv.EventDisableTiming)
	r.begin(t, s, cudadrv.CaptureThreadLocal)
	r.do(t, 0, func() cudadrv.Result { return r.drv.StreamWaitEvent(s, ready, cudadrv.EventExternal) })
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecordWithFlags(start, s, cudadrv.EventExternal) })
	r.set(t, 0, s, p, 7, n)
	r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecordWithFlags(end, s, cudadrv.EventExternal) })
	_, x := r.end(t, s, 4)
	for range 3 {
		r.set(t, 0, other, p, 1, n)
		r.do(t, 0, func() cudadrv.Result { return r.drv.EventRecord(ready, other) })
		r.graphLaunch(t, x, s)
		r.do(t, 0, func() cudadrv.Result { return r.drv.EventSynchronize(end) })
		r.do(t, 0, func() cudadrv.Result {
			ms, res := r.drv.EventElapsedTime(start, end)
			require.GreaterOrEqual(t, ms, float32(0))
			return res
		})
		require.Equal(t, byte(7), r.download(t, 0, s, p, n)[n-1])
	}
}
