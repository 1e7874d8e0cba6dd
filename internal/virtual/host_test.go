package virtual

import (
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/stretchr/testify/require"
)

// A host function cannot call the driver, also not by binding a context first.
func TestHostFuncCallsDriver(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	results := make(chan cudadrv.Result, 3)
	r.do(0, func() cudadrv.Result {
		return r.drv.LaunchHostFunc(s, dl.OnceClosure(func() {
			results <- r.drv.CtxSetCurrent(r.ctxs[0])
			results <- r.drv.StreamQuery(s)
			_, res := r.drv.DeviceGetCount()
			results <- res
		}))
	})
	for range 3 {
		require.Equal(t, cudadrv.ErrorNotPermitted, <-results)
	}
	r.do(0, func() cudadrv.Result { return r.drv.StreamSynchronize(s) })
}

// The machine that made an interprocess event cannot open it; another of the
// process can, and sees its records as long as it lives.
func TestInterprocessEvent(t *testing.T) {
	const flags = cudadrv.EventInterprocess | cudadrv.EventDisableTiming
	a, b := newRig(t, Config{Devices: 2}), newRig(t, Config{Devices: 2})
	var e, o cudadrv.Event
	var h cudadrv.IpcEventHandle
	a.do(1, func() (res cudadrv.Result) { e, res = a.drv.EventCreate(flags); return res })
	a.do(1, func() (res cudadrv.Result) { h, res = a.drv.IpcGetEventHandle(e); return res })
	open := func(r *rig, dev int, h cudadrv.IpcEventHandle) cudadrv.Result {
		return r.on(dev, func() (res cudadrv.Result) { o, res = r.drv.IpcOpenEventHandle(h); return res })
	}
	require.Equal(t, cudadrv.ErrorInvalidContext, open(a, 1, h))
	require.Equal(t, cudadrv.ErrorInvalidHandle, open(b, 0, h), "another GPU")
	elsewhere := h
	elsewhere[len(eventMagic)]++
	require.Equal(t, cudadrv.ErrorNotSupported, open(b, 1, elsewhere), "another process")
	r := open(b, 1, h)
	require.Equal(t, cudadrv.Success, r)

	sa, sb := a.stream(1), b.stream(1)
	gate := make(chan struct{})
	query := func() cudadrv.Result { return b.on(1, func() cudadrv.Result { return b.drv.EventQuery(o) }) }
	require.Equal(t, cudadrv.Success, query())
	a.do(1, func() cudadrv.Result { return a.drv.LaunchHostFunc(sa, dl.OnceClosure(func() { <-gate })) })
	a.do(1, func() cudadrv.Result { return a.drv.EventRecord(e, sa) })
	require.Equal(t, cudadrv.ErrorNotReady, query())
	b.do(1, func() cudadrv.Result { return b.drv.StreamWaitEvent(sb, o, 0) })
	require.Equal(t, cudadrv.ErrorNotReady, b.on(1, func() cudadrv.Result { return b.drv.StreamQuery(sb) }))
	close(gate)
	b.do(1, func() cudadrv.Result { return b.drv.StreamSynchronize(sb) })
	b.do(1, func() cudadrv.Result { return b.drv.EventSynchronize(o) })

	b.do(1, func() cudadrv.Result { return b.drv.EventRecord(o, sb) })
	a.do(1, func() cudadrv.Result { return a.drv.EventSynchronize(e) })
	a.do(1, func() cudadrv.Result { return a.drv.EventDestroy(e) })
	require.Equal(t, cudadrv.ErrorInvalidHandle, query(), "what it was opened from is gone")
	b.do(1, func() cudadrv.Result { return b.drv.EventDestroy(o) })
	require.NotEqual(t, cudadrv.Success, open(b, 1, h))
}

// What waits for a capture on the legacy stream spoils it.
func TestLegacyStreamJoinsNoCapture(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)
	var e cudadrv.Event
	r.do(0, func() (res cudadrv.Result) { e, res = r.drv.EventCreate(cudadrv.EventDisableTiming); return res })
	r.do(0, func() cudadrv.Result { return r.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
	r.do(0, func() cudadrv.Result { return r.drv.EventRecord(e, s) })
	require.Equal(t, cudadrv.ErrorStreamCaptureImplicit, r.on(0, func() cudadrv.Result { return r.drv.StreamWaitEvent(0, e, 0) }))
	require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, r.on(0, func() cudadrv.Result {
		_, res := r.drv.StreamEndCapture(s)
		return res
	}))
}
