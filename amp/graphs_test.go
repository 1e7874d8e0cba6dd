package amp_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

// The state of a scaler stays until the graph that uses it is closed.
func TestCloseBeforeTheGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 4)
		sc, err := amp.NewScaler(b.s, nil)
		require.NoError(t, err)
		fn := func() error {
			if err := sc.Unscale(b.s, b.opt); err != nil {
				return err
			}
			return sc.Update(b.s)
		}
		require.NoError(t, fn())
		exec, err := graph.Capture([]*stream.Stream{b.s}, fn, nil)
		require.NoError(t, err)
		require.ErrorContains(t, sc.Close(), "amp: close the scaler on "+devs[0].String()+": graph ")
		require.NoError(t, exec.Launch(b.s))
		require.NoError(t, b.s.Sync(testgpu.Context(t)))
		require.NoError(t, exec.Close())
		require.NoError(t, sc.Close())
		require.NoError(t, sc.Close())
	})
}

// A place of a closed optimiser is not reused while a graph uses it.
func TestPlaceInAGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 4)
		sc := b.scaler(t, nil)
		other := benchOn(t, b.s, 4)
		fn := func() error {
			if err := sc.Unscale(b.s, b.opt); err != nil {
				return err
			}
			return sc.Update(b.s)
		}
		require.NoError(t, fn())
		exec, err := graph.Capture([]*stream.Stream{b.s}, fn, nil)
		require.NoError(t, err)
		require.NoError(t, b.opt.Close()) // the graph uses no state of it
		require.NoError(t, sc.Unscale(b.s, other.opt))
		require.NoError(t, sc.Update(b.s))
		require.NoError(t, exec.Launch(b.s))
		require.NoError(t, b.s.Sync(testgpu.Context(t)))
		require.NoError(t, exec.Close())
	})
}
