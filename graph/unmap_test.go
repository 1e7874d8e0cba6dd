package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Memory of a closed graph stays mapped while another capture, which has used it, goes on:
// CUDA makes no graph of a fill of memory that is unmapped.
func TestMemoryOfAClosedGraphStaysWhileCapturing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, other := newStream(t, devs[0]), newStream(t, devs[0])
		require.NoError(t, memory.EmptyCache(devs[0]))
		begin, err := memory.Reserved(devs[0])
		require.NoError(t, err)
		var x memory.Slice[float32]
		first, err := graph.Capture([]*stream.Stream{s}, func() (err error) {
			if x, err = memory.Make[float32](s, 16); err != nil {
				return err
			}
			return x.Zero(s)
		})
		require.NoError(t, err)
		require.NoError(t, first.Close())
		second, err := graph.Capture([]*stream.Stream{other}, func() error {
			if err := x.Zero(other); err != nil {
				return err
			}
			before, err := memory.Reserved(devs[0])
			require.NoError(t, err)
			require.NoError(t, x.Close())
			after, err := memory.Reserved(devs[0])
			require.NoError(t, err)
			require.Equal(t, before, after, "bytes of the driver")
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, second.Close())
		require.NoError(t, memory.EmptyCache(devs[0]))
		left, err := memory.Reserved(devs[0])
		require.NoError(t, err)
		require.Equal(t, begin, left)
	})
}
