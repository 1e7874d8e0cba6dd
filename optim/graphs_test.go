package optim_test

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// The state of an optimiser and of its gradients stays until the graph that uses it is closed.
func TestCloseBeforeTheGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		x, _ := random(t, s, r, memory.Float32, 8)
		g, _ := random(t, s, r, memory.Float32, 8)
		o, err := optim.NewAdamW(s, []optim.Group{{Params: []optim.Param{{Value: x, Grad: g}}}}, nil)
		require.NoError(t, err)
		grads, err := o.Grads(s)
		require.NoError(t, err)
		for _, c := range []struct {
			what string
			fn   func() error
			in   []io.Closer
		}{
			{"step", func() error { return o.Step(s, nil) }, []io.Closer{o}},
			{"clip", func() error { _, err := grads.ClipNorm(s, 1, 2); return err }, []io.Closer{grads}},
			{"set gradients", func() error { return o.SetGradients(s, g) }, []io.Closer{o, grads}},
		} {
			require.NoError(t, c.fn(), c.what)
			exec, err := graph.Capture([]*stream.Stream{s}, c.fn, nil)
			require.NoError(t, err, c.what)
			for _, x := range c.in {
				require.ErrorContains(t, x.Close(), "uses it: close the graph first", c.what)
			}
			require.NoError(t, exec.Launch(s), c.what)
			require.NoError(t, s.Sync(testgpu.Context(t)), c.what)
			require.NoError(t, exec.Close(), c.what)
		}
		require.NoError(t, grads.Close())
		require.NoError(t, o.Close())
	})
}
