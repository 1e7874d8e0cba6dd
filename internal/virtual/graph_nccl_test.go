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

	begin()
	join := func() {
		c.do(0, func() cudadrv.Result { return c.drv.EventRecord(e, c.streams[0]) })
		c.do(1, func() cudadrv.Result { return c.drv.StreamWaitEvent(c.streams[1], e, 0) })
	}
	join()
	require.Equal(t, ncclapi.InternalError, c.reduceAll(ps), "the first of the ranks, which connects them")
	require.Contains(t, c.api.GetLastError(0), "failed to connect with the other ranks")
	_, r := end()
	require.Equal(t, cudadrv.ErrorStreamCaptureInvalidated, r)
	c.good(c.reduceAll(ps))

	begin()
	require.Equal(t, ncclapi.InvalidUsage, c.reduceAll(ps), "the second stream is not captured")
	require.Contains(t, c.api.GetLastError(0), "captured into one graph")
	g, r := end()
	c.ok(r)
	c.do(0, func() cudadrv.Result { return c.drv.GraphDestroy(g) })

	begin()
	join()
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
