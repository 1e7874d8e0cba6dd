package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
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
