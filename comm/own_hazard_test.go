package comm_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// TestOwnKernelsThatCannotBe has more ranks than own kernels have, and GPUs whose memory
// gets something else than what others store there, once they are known to copy: NCCL
// does it all.
func TestOwnKernelsThatCannotBe(t *testing.T) {
	for name, cfg := range map[string]*device.SystemConfig{
		"nine":   {VirtualDevices: 9},
		"spoilt": {VirtualDevices: 2, Faults: "zero@cuMemcpyDtoDAsync#3"}, // two are device's test
	} {
		t.Run(name, func(t *testing.T) {
			g := localOwn(t, testgpu.Virtual(t, cfg), nil)
			require.Equal(t, comm.NCCLOnly, g.Strategy())
			require.NoError(t, conform(testgpu.Context(t), g))
		})
	}
}

// TestOwnKernelsOfGraphsAfterTheEnd launches graphs of two GPUs when their group is
// broken: that is an error, nothing waits, and the group closes once they are closed.
func TestOwnKernelsOfGraphsAfterTheEnd(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, &nccl.Config{Timeout: time.Minute})
		xs, _ := shards(t, g, 100)
		var graphs []*graph.Exec
		for i, x := range xs {
			exec, err := graph.Capture([]*stream.Stream{g.Stream(i)}, func() error {
				return reduceAlone(g, i, x, nccl.Max)
			}, nil)
			require.NoError(t, err)
			graphs = append(graphs, exec)
		}
		for i, exec := range graphs {
			require.NoError(t, exec.Launch(g.Stream(i)))
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
		require.Error(t, g.Close(), "graphs use it")
		require.NoError(t, g.SetTimeout(shortTimeout))
		require.NoError(t, reduceAlone(g, 0, xs[0], nccl.Sum))
		require.ErrorIs(t, g.Wait(testgpu.Context(t)), comm.ErrBroken, "rank 1 does not come")
		for i, exec := range graphs {
			require.Error(t, exec.Launch(g.Stream(i)))
			require.NoError(t, g.Stream(i).Sync(testgpu.Context(t)))
			require.NoError(t, exec.Close())
		}
		require.NoError(t, g.Close())
		require.ErrorIs(t, comm.AllReduce(g, comm.Sum, xs...), device.ErrClosed)
	})
}
