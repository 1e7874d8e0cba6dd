package comm_test

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// Virtual devices that nobody uses any more are freed with all that was made on them, so that
// a program can make any number of them.
func TestUnreachableVirtualDevicesAreFreed(t *testing.T) {
	ctx := testgpu.Context(t)
	const n = 4
	var freed atomic.Int64
	for range n {
		sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
		require.NoError(t, err)
		runtime.AddCleanup(sys, func(int) { freed.Add(1) }, 0)
		g, err := comm.Local(ctx, sys.Devices(), &comm.Config{Strategy: comm.OwnKernels})
		require.NoError(t, err)
		xs, err := comm.Make[float32](g, 100)
		require.NoError(t, err)
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		require.NoError(t, g.Wait(ctx))
		for _, x := range xs {
			require.NoError(t, x.Close())
		}
		require.NoError(t, g.Close())
	}
	for freed.Load() < n {
		require.NoError(t, ctx.Err(), "%d of %d were freed", freed.Load(), n)
		runtime.GC()
	}
}
