package machine

import (
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/stretchr/testify/require"
)

// A host function cannot call the driver, also not by binding a context first.
func TestHostFuncCallsDriver(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	results := make(chan cudadrv.Result, 3)
	r.Do(0, func() cudadrv.Result {
		return r.Drv.LaunchHostFunc(s, dl.OnceClosure(func() {
			results <- r.Drv.CtxSetCurrent(r.Contexts[0])
			results <- r.Drv.StreamQuery(s)
			_, res := r.Drv.DeviceGetCount()
			results <- res
		}))
	})
	for range 3 {
		require.Equal(t, cudadrv.ErrorNotPermitted, <-results)
	}
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
}

// The machine that made an interprocess event cannot open it; another of the
// process can, and sees its records as long as it lives.
func TestInterprocessEvent(t *testing.T) {
	const flags = cudadrv.EventInterprocess | cudadrv.EventDisableTiming
	a, b := newRig(t, Config{Devices: 2}), newRig(t, Config{Devices: 2})
	var e, o cudadrv.Event
	var h cudadrv.IpcEventHandle
	a.Do(1, func() (res cudadrv.Result) { e, res = a.Drv.EventCreate(flags); return res })
	a.Do(1, func() (res cudadrv.Result) { h, res = a.Drv.IpcGetEventHandle(e); return res })
	open := func(r *rig, dev int, h cudadrv.IpcEventHandle) cudadrv.Result {
		return r.On(dev, func() (res cudadrv.Result) { o, res = r.Drv.IpcOpenEventHandle(h); return res })
	}
	require.Equal(t, cudadrv.ErrorInvalidContext, open(a, 1, h))
	require.Equal(t, cudadrv.ErrorInvalidHandle, open(b, 0, h), "another GPU")
	elsewhere := h
	elsewhere[len(eventMagic)]++
	require.Equal(t, cudadrv.ErrorNotSupported, open(b, 1, elsewhere), "another process")
	r := open(b, 1, h)
	require.Equal(t, cudadrv.Success, r)

	sa, sb := a.Stream(1), b.Stream(1)
	gate := make(chan struct{})
	query := func() cudadrv.Result { return b.On(1, func() cudadrv.Result { return b.Drv.EventQuery(o) }) }
	require.Equal(t, cudadrv.Success, query())
	a.Do(1, func() cudadrv.Result { return a.Drv.LaunchHostFunc(sa, dl.OnceClosure(func() { <-gate })) })
	a.Do(1, func() cudadrv.Result { return a.Drv.EventRecord(e, sa) })
	require.Equal(t, cudadrv.ErrorNotReady, query())
	b.Do(1, func() cudadrv.Result { return b.Drv.StreamWaitEvent(sb, o, 0) })
	require.Equal(t, cudadrv.ErrorNotReady, b.On(1, func() cudadrv.Result { return b.Drv.StreamQuery(sb) }))
	close(gate)
	b.Do(1, func() cudadrv.Result { return b.Drv.StreamSynchronize(sb) })
	b.Do(1, func() cudadrv.Result { return b.Drv.EventSynchronize(o) })

	b.Do(1, func() cudadrv.Result { return b.Drv.EventRecord(o, sb) })
	a.Do(1, func() cudadrv.Result { return a.Drv.EventSynchronize(e) })
	a.Do(1, func() cudadrv.Result { return a.Drv.EventDestroy(e) })
	require.Equal(t, cudadrv.ErrorInvalidHandle, query(), "what it was opened from is gone")
	b.Do(1, func() cudadrv.Result { return b.Drv.EventDestroy(o) })
	require.NotEqual(t, cudadrv.Success, open(b, 1, h))
}

// What waits for a capture on the legacy stream spoils it.
func TestLegacyStreamJoinsNoCapture(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)
	var e cudadrv.Event
	r.Do(0, func() (res cudadrv.Result) { e, res = r.Drv.EventCreate(cudadrv.EventDisableTiming); return res })
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, s) })
	require.Equal(t, cudadrv.ErrorStreamCaptureImplicit, r.On(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(0, e, 0) }))
	require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, r.On(0, func() cudadrv.Result {
		_, res := r.Drv.StreamEndCapture(s)
		return res
	}))
}
