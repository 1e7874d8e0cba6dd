package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Which streams a graph was captured on does not matter to an update: operations and
// their order do.
func TestUpdateFromOtherStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		side := newStream(t, devs[0])
		v, w := b.make(0), b.make(0)
		x := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
		y := capture(t, func() error { return b.launch(b.add, side, w, 5) }, b.s, side)
		require.NoError(t, x.Launch(b.s))
		require.NoError(t, x.Update(y), "a launch may be under way")
		for range 3 {
			require.NoError(t, x.Launch(b.s))
		}
		b.want(1, v)
		b.want(15, w)
		require.NoError(t, y.Update(x), "which gives what x has captured itself")
		require.NoError(t, y.Launch(b.s))
		b.want(2, v)
		b.want(15, w)
	})
}

// A graph that is updated often, with one pool, holds the communicators once.
func TestManyUpdates(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, g.Close()) }()
		xs, err := comm.Make[float32](g, 8)
		require.NoError(t, err)
		defer func() { require.NoError(t, xs.Close()) }()
		pool := memory.NewPool(nil)
		defer func() { require.NoError(t, pool.Close()) }()
		capture := func() *graph.Exec {
			x, err := graph.Capture(g.Streams(), func() error { return comm.AllReduce(g, comm.Sum, xs...) }, &graph.Config{Pool: pool})
			require.NoError(t, err)
			return x
		}
		x := capture()
		held := graph.Held(x)
		for range 3 {
			y := capture()
			require.NoError(t, x.Update(y))
			require.NoError(t, y.Close())
		}
		require.Equal(t, held, graph.Held(x))
		require.NoError(t, x.Launch(g.Stream(0)))
		require.NoError(t, g.Wait(testgpu.Context(t)))
		require.NoError(t, x.Close())
	})
}
