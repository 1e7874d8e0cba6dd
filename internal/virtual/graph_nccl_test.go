package virtual

import (
	"runtime"
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

// reduceAll issues an all-reduce of one number on each rank as one group.
func (c *clan) reduceAll(ps []cudadrv.DevicePtr) ncclapi.Result {
	c.t.Helper()
	c.good(c.api.GroupStart())
	for i, p := range ps {
		c.good(c.api.AllReduce(p, p, 1, ncclapi.Float32, ncclapi.Sum, c.comms[i], c.streams[i]))
	}
	return c.api.GroupEnd()
}

// A graph over two ranks keeps their communicators from being ended, and all of
// a group belongs to one graph.
func TestGraphHoldsCommunicators(t *testing.T) {
	c := newClan(t, Config{Devices: 2})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ps := []cudadrv.DevicePtr{c.alloc(0, 4), c.alloc(1, 4)}
	e, back := c.event(0), c.event(1)
	begin := func() {
		c.do(0, func() cudadrv.Result { return c.drv.StreamBeginCapture(c.streams[0], cudadrv.CaptureThreadLocal) })
	}
	end := func() (g cudadrv.Graph, r cudadrv.Result) {
		r = c.on(0, func() (res cudadrv.Result) { g, res = c.drv.StreamEndCapture(c.streams[0]); return res })
		return g, r
	}

	c.good(c.reduceAll(ps)) // which connects the ranks
	begin()
	require.Equal(t, ncclapi.InvalidUsage, c.reduceAll(ps), "the second stream is not captured")
	require.Contains(t, c.api.GetLastError(0), "captured into one graph")
	g, r := end()
	c.ok(r)
	c.do(0, func() cudadrv.Result { return c.drv.GraphDestroy(g) })

	begin()
	c.do(0, func() cudadrv.Result { return c.drv.EventRecord(e, c.streams[0]) })
	c.do(1, func() cudadrv.Result { return c.drv.StreamWaitEvent(c.streams[1], e, 0) })
	c.good(c.reduceAll(ps))
	c.do(1, func() cudadrv.Result { return c.drv.EventRecord(back, c.streams[1]) })
	c.do(0, func() cudadrv.Result { return c.drv.StreamWaitEvent(c.streams[0], back, 0) })
	g, r = end()
	c.ok(r)
	var x cudadrv.GraphExec
	c.do(0, func() (res cudadrv.Result) { x, res = c.drv.GraphInstantiateWithFlags(g, 0); return res })
	c.do(0, func() cudadrv.Result { return c.drv.GraphDestroy(g) })

	for i := range 10 {
		for d, p := range ps {
			upload(c.rig, d, c.streams[d], p, []float32{float32(i + d)})
			c.sync(d, c.streams[d])
		}
		c.do(0, func() cudadrv.Result { return c.drv.GraphLaunch(x, c.streams[0]) })
		c.sync(0, c.streams[0])
		for d, p := range ps {
			require.Equal(t, []float32{float32(2*i + 1)}, download[float32](c.rig, d, c.streams[d], p, 1))
		}
	}
	require.Equal(t, ncclapi.InvalidUsage, c.api.CommDestroy(c.comms[0]))
	require.Contains(t, c.api.GetLastError(0), "a graph has operations of rank 0")
	require.Equal(t, ncclapi.InvalidUsage, c.api.CommAbort(c.comms[1]))
	c.do(0, func() cudadrv.Result { return c.drv.GraphExecDestroy(x) })
	c.good(c.api.CommAbort(c.comms[1]))
	require.Empty(t, c.m.Reports())
}

// The first operation between ranks connects them, which the mode of a capture forbids to
// its thread, unless that is relaxed, and a global one to NCCL's own threads anyway.
func TestFirstOperationInACapture(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, x := range []struct {
		mode, thread cudadrv.CaptureMode
		issued       ncclapi.Result
		ended        cudadrv.Result
	}{
		{cudadrv.CaptureThreadLocal, cudadrv.CaptureGlobal, ncclapi.InternalError, cudadrv.ErrorStreamCaptureInvalidated},
		{cudadrv.CaptureThreadLocal, cudadrv.CaptureRelaxed, ncclapi.Success, cudadrv.Success},
		{cudadrv.CaptureRelaxed, cudadrv.CaptureGlobal, ncclapi.Success, cudadrv.Success},
		{cudadrv.CaptureGlobal, cudadrv.CaptureRelaxed, ncclapi.Success, cudadrv.ErrorStreamCaptureInvalidated},
	} {
		c := newClan(t, Config{Devices: 2})
		ps := []cudadrv.DevicePtr{c.alloc(0, 4), c.alloc(1, 4)}
		fork, join := c.event(0), c.event(1)
		c.do(0, func() cudadrv.Result { return c.drv.StreamBeginCapture(c.streams[0], x.mode) })
		c.do(0, func() cudadrv.Result { return c.drv.EventRecord(fork, c.streams[0]) })
		c.do(1, func() cudadrv.Result { return c.drv.StreamWaitEvent(c.streams[1], fork, 0) })
		old, r := c.drv.ThreadExchangeStreamCaptureMode(x.thread)
		c.ok(r)
		require.Equal(t, x.issued, c.reduceAll(ps), "%+v", x)
		if x.issued != ncclapi.Success {
			require.Contains(t, c.api.GetLastError(0), "failed to connect with the other ranks")
		}
		_, r = c.drv.ThreadExchangeStreamCaptureMode(old)
		c.ok(r)
		if x.ended == cudadrv.Success {
			c.do(1, func() cudadrv.Result { return c.drv.EventRecord(join, c.streams[1]) })
			c.do(0, func() cudadrv.Result { return c.drv.StreamWaitEvent(c.streams[0], join, 0) })
		}
		var g cudadrv.Graph
		r = c.on(0, func() (res cudadrv.Result) { g, res = c.drv.StreamEndCapture(c.streams[0]); return res })
		require.Equal(t, x.ended, r, "%+v", x)
		if r == cudadrv.Success {
			c.do(0, func() cudadrv.Result { return c.drv.GraphDestroy(g) })
		}
	}
}
