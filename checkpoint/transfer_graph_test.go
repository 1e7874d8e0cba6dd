package checkpoint

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A Transfer stays open until the graph that has captured it is closed: each launch uses its scratch memory.
func TestTransferCloseBeforeTheGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g, err := comm.Local(ctx, devs, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, g.Close()) }()
		shape := []int{4, 8}
		src := [][]Part{{makePart(t, g.Stream(0), Part{Name: "x"}, memory.Float32, shape, func(i int) float64 { return number(1, i) })}, nil}
		dst := [][]Part{nil, {makePart(t, g.Stream(1), Part{Name: "x"}, memory.BFloat16, shape, func(int) float64 { return -1 })}}
		x, err := NewTransfer(ctx, g, dst, src, nil)
		require.NoError(t, err)
		require.NoError(t, x.Run())
		require.NoError(t, g.Wait(ctx))
		exec, err := graph.Capture(g.Streams(), x.Run, nil)
		require.NoError(t, err)
		for range 2 {
			require.ErrorContains(t, x.Close(), "checkpoint: close a transfer: graph ")
		}
		require.NoError(t, exec.Launch(g.Stream(0)))
		require.NoError(t, g.Stream(0).Sync(ctx))
		require.NoError(t, exec.Close())
		require.NoError(t, x.Close())
		require.NoError(t, x.Close())
		require.ErrorContains(t, x.Run(), "closed")
	})
}
