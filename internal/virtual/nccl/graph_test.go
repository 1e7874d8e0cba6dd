package nccl

import (
	"runtime"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// reduceAll issues an all-reduce of one number on each rank as one group.
func (c *clan) reduceAll(ps []cudadrv.DevicePtr) ncclapi.Result {
	c.T.Helper()
	c.good(c.api.GroupStart())
	for i, p := range ps {
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[i], Stream: c.streams[i]}))
	}
	return c.api.GroupEnd()
}

// A graph over two ranks keeps their communicators from being ended, and all of
// a group belongs to one graph.
func TestGraphHoldsCommunicators(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ps := []cudadrv.DevicePtr{c.Alloc(0, 4), c.Alloc(1, 4)}
	e, back := c.Event(0), c.Event(1)
	begin := func() {
		c.Do(0, func() cudadrv.Result { return c.Drv.StreamBeginCapture(c.streams[0], cudadrv.CaptureThreadLocal) })
	}
	end := func() (g cudadrv.Graph, r cudadrv.Result) {
		r = c.On(0, func() (res cudadrv.Result) { g, res = c.Drv.StreamEndCapture(c.streams[0]); return res })
		return g, r
	}

	c.good(c.reduceAll(ps)) // which connects the ranks
	begin()
	require.Equal(t, ncclapi.InvalidUsage, c.reduceAll(ps), "the second stream is not captured")
	require.Contains(t, c.api.GetLastError(0), "captured into the same graph")
	g, r := end()
	c.OK(r)
	c.Do(0, func() cudadrv.Result { return c.Drv.GraphDestroy(g) })

	begin()
	c.Do(0, func() cudadrv.Result { return c.Drv.EventRecord(e, c.streams[0]) })
	c.Do(1, func() cudadrv.Result { return c.Drv.StreamWaitEvent(c.streams[1], e, 0) })
	c.good(c.reduceAll(ps))
	c.Do(1, func() cudadrv.Result { return c.Drv.EventRecord(back, c.streams[1]) })
	c.Do(0, func() cudadrv.Result { return c.Drv.StreamWaitEvent(c.streams[0], back, 0) })
	g, r = end()
	c.OK(r)
	var x cudadrv.GraphExec
	c.Do(0, func() (res cudadrv.Result) { x, res = c.Drv.GraphInstantiateWithFlags(g, 0); return res })
	c.Do(0, func() cudadrv.Result { return c.Drv.GraphDestroy(g) })

	for i := range 10 {
		for d, p := range ps {
			virtualtest.Upload(c.Rig, d, c.streams[d], p, []float32{float32(i + d)})
			c.Sync(d, c.streams[d])
		}
		c.Do(0, func() cudadrv.Result { return c.Drv.GraphLaunch(x, c.streams[0]) })
		c.Sync(0, c.streams[0])
		for d, p := range ps {
			require.Equal(t, []float32{float32(2*i + 1)}, virtualtest.Download[float32](c.Rig, d, c.streams[d], p, 1))
		}
	}
	require.Equal(t, ncclapi.InvalidUsage, c.api.CommDestroy(c.comms[0]))
	require.Contains(t, c.api.GetLastError(0), "a graph has operations of rank 0")
	require.Equal(t, ncclapi.InvalidUsage, c.api.CommAbort(c.comms[1]))
	c.Do(0, func() cudadrv.Result { return c.Drv.GraphExecDestroy(x) })
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
		c := newUnconnectedClan(t, machine.Config{Devices: 2}, Config{})
		ps := []cudadrv.DevicePtr{c.Alloc(0, 4), c.Alloc(1, 4)}
		fork, join := c.Event(0), c.Event(1)
		c.Do(0, func() cudadrv.Result { return c.Drv.StreamBeginCapture(c.streams[0], x.mode) })
		c.Do(0, func() cudadrv.Result { return c.Drv.EventRecord(fork, c.streams[0]) })
		c.Do(1, func() cudadrv.Result { return c.Drv.StreamWaitEvent(c.streams[1], fork, 0) })
		old, r := c.Drv.ThreadExchangeStreamCaptureMode(x.thread)
		c.OK(r)
		require.Equal(t, x.issued, c.reduceAll(ps), "%+v", x)
		if x.issued != ncclapi.Success {
			require.Contains(t, c.api.GetLastError(0), "failed to connect with the other ranks")
		}
		_, r = c.Drv.ThreadExchangeStreamCaptureMode(old)
		c.OK(r)
		if x.ended == cudadrv.Success {
			c.Do(1, func() cudadrv.Result { return c.Drv.EventRecord(join, c.streams[1]) })
			c.Do(0, func() cudadrv.Result { return c.Drv.StreamWaitEvent(c.streams[0], join, 0) })
		}
		var g cudadrv.Graph
		r = c.On(0, func() (res cudadrv.Result) { g, res = c.Drv.StreamEndCapture(c.streams[0]); return res })
		require.Equal(t, x.ended, r, "%+v", x)
		if r == cudadrv.Success {
			c.Do(0, func() cudadrv.Result { return c.Drv.GraphDestroy(g) })
		}
	}
}

// A collective of a launched graph that waits while nothing else runs is a deadlock, if all ranks are in this process.
func TestLaunchThatWaitsForAnother(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2, Hang: 50 * time.Millisecond})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ps := []cudadrv.DevicePtr{c.Alloc(0, 4), c.Alloc(1, 4)}
	c.good(c.reduceAll(ps)) // which connects the ranks
	execs := make([]cudadrv.GraphExec, 2)
	for i, p := range ps {
		c.Do(i, func() cudadrv.Result { return c.Drv.StreamBeginCapture(c.streams[i], cudadrv.CaptureThreadLocal) })
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[i], Stream: c.streams[i]}))
		var g cudadrv.Graph
		c.Do(i, func() (res cudadrv.Result) { g, res = c.Drv.StreamEndCapture(c.streams[i]); return res })
		c.Do(i, func() (res cudadrv.Result) { execs[i], res = c.Drv.GraphInstantiateWithFlags(g, 0); return res })
		c.Do(i, func() cudadrv.Result { return c.Drv.GraphDestroy(g) })
	}
	launch := func(i int) {
		c.Do(i, func() cudadrv.Result { return c.Drv.GraphLaunch(execs[i], c.streams[i]) })
	}
	launch(0)
	launch(1)
	c.Sync(0, c.streams[0])
	c.Sync(1, c.streams[1])
	require.Empty(t, c.m.Reports())
	launch(0)
	require.Equal(t, cudadrv.ErrorLaunchTimeout, c.On(0, func() cudadrv.Result { return c.Drv.StreamSynchronize(c.streams[0]) }))
	why := c.m.Explain(0)
	require.Contains(t, why, "ncclAllReduce, which a graph launched for rank 0 of 2, waits for the other ranks")
	require.Contains(t, why, "ncclAllReduce on stream", "the work that is pending")
	for i := range execs {
		c.On(i, func() cudadrv.Result { return c.Drv.GraphExecDestroy(execs[i]) })
	}
}
