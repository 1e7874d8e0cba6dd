package conformance

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/stretchr/testify/require"
)

// testLegacyStream tests the stream with handle 0 of each device. It cannot be
// created, destroyed or captured.
func (r *rig) testLegacyStream(t *testing.T) {
	const n = 1 << 16
	for dev := range r.devs {
		p := r.alloc(t, dev, n)
		r.set(t, dev, 0, p, byte(dev+1), n)
		require.Equal(t, byte(dev+1), r.download(t, dev, 0, p, n)[n-1])
		r.do(t, dev, func() cudadrv.Result { return r.drv.StreamQuery(0) })
		r.do(t, dev, func() cudadrv.Result {
			ctx, res := r.drv.StreamGetCtx(0)
			require.Equal(t, r.ctxs[dev], ctx)
			return res
		})
		e, s := r.event(t, dev, cudadrv.EventDisableTiming), r.stream(t, dev)
		r.set(t, dev, 0, p, 9, n)
		r.do(t, dev, func() cudadrv.Result { return r.drv.EventRecord(e, 0) })
		r.do(t, dev, func() cudadrv.Result { return r.drv.StreamWaitEvent(s, e, 0) })
		require.Equal(t, byte(9), r.download(t, dev, s, p, n)[0])
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NotEqual(t, cudadrv.Success, r.on(t, 0, func() cudadrv.Result {
		return r.drv.StreamBeginCapture(0, cudadrv.CaptureThreadLocal)
	}))
}

func (r *rig) testPriorities(t *testing.T) {
	var least, greatest int32
	r.do(t, 0, func() (res cudadrv.Result) {
		least, greatest, res = r.drv.CtxGetStreamPriorityRange()
		return res
	})
	for asked, want := range map[int32]int32{0: min(0, least), greatest: greatest, greatest - 100: greatest, least + 100: least} {
		var s cudadrv.Stream
		r.do(t, 0, func() (res cudadrv.Result) {
			s, res = r.drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, asked)
			return res
		})
		r.do(t, 0, func() cudadrv.Result {
			got, res := r.drv.StreamGetPriority(s)
			require.Equal(t, want, got, "asked for %d", asked)
			return res
		})
		r.do(t, 0, func() cudadrv.Result {
			ctx, res := r.drv.StreamGetCtx(s)
			require.Equal(t, r.ctxs[0], ctx)
			return res
		})
		r.do(t, 0, func() cudadrv.Result { return r.drv.StreamDestroy(s) })
	}
}

// testHostFuncs checks that the stream waits for a host function, and the
// function for earlier operations.
func (r *rig) testHostFuncs(t *testing.T) {
	s := r.stream(t, 0)
	open := make(chan struct{})
	var mu sync.Mutex
	var order []int
	for i := range 3 {
		f := dl.OnceClosure(func() {
			if i == 0 {
				<-open
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, i)
		})
		r.do(t, 0, func() cudadrv.Result { return r.drv.LaunchHostFunc(s, f) })
	}
	require.Equal(t, cudadrv.ErrorNotReady, r.on(t, 0, func() cudadrv.Result { return r.drv.StreamQuery(s) }))
	close(open)
	r.sync(t, 0, s)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []int{0, 1, 2}, order)
}

// testGraphHostFuncs checks that each launch runs a captured function, and that a
// user object lives as long as a graph that may launch it.
func (r *rig) testGraphHostFuncs(t *testing.T) {
	s := r.stream(t, 0)
	var calls atomic.Int32
	f := dl.NewClosure(func() { calls.Add(1) })
	r.begin(t, s, cudadrv.CaptureThreadLocal)
	r.do(t, 0, func() cudadrv.Result { return r.drv.LaunchHostFunc(s, f) })
	var object cudadrv.UserObject
	r.do(t, 0, func() (res cudadrv.Result) { object, res = r.drv.UserObjectCreate(f); return res })
	var g cudadrv.Graph
	r.do(t, 0, func() (res cudadrv.Result) { g, res = r.drv.StreamGetCaptureGraph(s); return res })
	r.do(t, 0, func() cudadrv.Result {
		return r.drv.GraphRetainUserObject(g, object, 1, cudadrv.GraphUserObjectMove)
	})
	var x cudadrv.GraphExec
	r.do(t, 0, func() (res cudadrv.Result) { g, res = r.drv.StreamEndCapture(s); return res })
	r.do(t, 0, func() (res cudadrv.Result) { x, res = r.drv.GraphInstantiateWithFlags(g, 0); return res })
	r.do(t, 0, func() cudadrv.Result { return r.drv.GraphDestroy(g) })
	require.Zero(t, calls.Load(), "a capture runs nothing")
	for range 3 {
		r.graphLaunch(t, x, s)
	}
	r.sync(t, 0, s)
	require.Equal(t, int32(3), calls.Load())
	// A launch in progress needs the function even after everything is destroyed.
	open := make(chan struct{})
	wait := dl.OnceClosure(func() { <-open })
	r.do(t, 0, func() cudadrv.Result { return r.drv.LaunchHostFunc(s, wait) })
	r.graphLaunch(t, x, s)
	r.do(t, 0, func() cudadrv.Result { return r.drv.GraphExecDestroy(x) })
	close(open)
	r.sync(t, 0, s)
	require.Equal(t, int32(4), calls.Load())
	gone := poll.UntilNoLaterThan(10*time.Second, func() bool {
		before := calls.Load()
		f.Call()
		return calls.Load() == before
	})
	require.True(t, gone, "the driver released the function")
}

func (r *rig) testInterprocessEvents(t *testing.T) {
	const interprocess = cudadrv.EventInterprocess | cudadrv.EventDisableTiming
	e, plain := r.event(t, 0, interprocess), r.event(t, 0, cudadrv.EventDisableTiming)
	var h cudadrv.IpcEventHandle
	r.do(t, 0, func() (res cudadrv.Result) { h, res = r.drv.IpcGetEventHandle(e); return res })
	require.NotZero(t, h)
	for name, call := range map[string]func() cudadrv.Result{
		"of a plain event": func() cudadrv.Result { _, res := r.drv.IpcGetEventHandle(plain); return res },
		"with timing":      func() cudadrv.Result { _, res := r.drv.EventCreate(cudadrv.EventInterprocess); return res },
		"no handle": func() cudadrv.Result {
			_, res := r.drv.IpcOpenEventHandle(cudadrv.IpcEventHandle{})
			return res
		},
	} {
		require.NotEqual(t, cudadrv.Success, r.on(t, 0, call), name)
	}
}
