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

// A buffer of the ordinary pool that another stream's capture has filled, and that is
// closed before the capture ends, is a mistake of the program, but End must not tell it so by
// chance: CUDA makes no graph if the allocator unmaps the memory meanwhile, which depends on
// whether any goroutine runs out of memory or empties the cache. Torch then unmaps nothing
// while it captures, and runs out of memory. Chorus keeps only the segments of which a block
// was freed while a graph was captured, and still gives back all others.
func TestMemoryFreedInACaptureStaysMapped(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		s, other, captured := newStream(t, d), newStream(t, d), newStream(t, d)
		require.NoError(t, memory.EmptyCache(d))
		begin, err := memory.Reserved(d)
		require.NoError(t, err)
		idle, err := memory.Make[byte](other, 40*mib)
		require.NoError(t, err)
		x, err := memory.Make[float32](s, 16)
		require.NoError(t, err)
		require.NoError(t, idle.Close())
		g, err := graph.Capture([]*stream.Stream{captured}, func() error {
			if err := x.Zero(captured); err != nil {
				return err
			}
			require.NoError(t, x.Close())
			_, err := memory.Make[byte](other, 1<<45)
			require.ErrorIs(t, err, device.ErrorOutOfMemory)
			require.NoError(t, memory.EmptyCache(d))
			return nil
		}, nil)
		require.NoError(t, err)
		left, err := memory.Reserved(d)
		require.NoError(t, err)
		require.EqualValues(t, 2*mib, left-begin, "the segment of x; the idle one went back")
		require.NoError(t, g.Close())
		require.NoError(t, memory.EmptyCache(d))
		left, err = memory.Reserved(d)
		require.NoError(t, err)
		require.Equal(t, begin, left)
	})
}

// Memory of a closed graph stays mapped while another capture, which has used it, goes on:
// CUDA instantiates no graph with a fill of memory that is unmapped.
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
		}, nil)
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
		}, nil)
		require.NoError(t, err)
		require.NoError(t, second.Close())
		require.NoError(t, memory.EmptyCache(devs[0]))
		left, err := memory.Reserved(devs[0])
		require.NoError(t, err)
		require.Equal(t, begin, left)
	})
}
