package ddp_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Memory of gradients, in place and copied, and of the reducer's buckets may be closed
// while the reduction goes on.
func TestGradientsOutliveTheReduction(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for _, flat := range []bool{true, false} {
			g := local(t, devs)
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			defer s.Close()
			var grads, owned []memory.Slice[float32]
			if flat {
				all, parts, err := memory.MakeFlat[float32](s, 1<<16, 1<<16)
				require.NoError(t, err)
				require.NoError(t, all.Zero(s))
				grads, owned = parts, []memory.Slice[float32]{all}
			} else {
				for range 2 {
					x, err := memory.Make[float32](s, 1<<16)
					require.NoError(t, err)
					require.NoError(t, x.Zero(s))
					owned = append(owned, x)
				}
				grads = owned
			}
			red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, nil)
			require.NoError(t, err)
			require.NoError(t, red.Ready(s, 1))
			if !flat {
				// In the middle of a bucket: the copy into it is still on its way.
				half, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, nil)
				require.NoError(t, err)
				require.NoError(t, half.Ready(s, 0))
				require.NoError(t, half.Close())
			}
			require.NoError(t, red.Ready(s, 0))
			for _, x := range owned {
				require.NoError(t, x.Close())
			}
			require.NoError(t, red.Close())
			require.NoError(t, g.Wait(testgpu.Context(t)))
			require.NoError(t, s.Sync(testgpu.Context(t)))
		}
	})
}

func TestFinishTakesOneStreamForEachRank(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		bs := backwards(t, g, true)
		red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{bs[0].grads, bs[1].grads}, nil)
		require.NoError(t, err)
		defer red.Close()
		for _, b := range bs {
			for j := range b.grads {
				require.NoError(t, red.Ready(b.s, j))
			}
		}
		require.ErrorContains(t, red.Finish(bs[0].s, bs[0].s), "want one for each local rank")
		require.NoError(t, red.Finish(bs[0].s, bs[1].s))
		require.NoError(t, g.Close())
		require.ErrorIs(t, red.Ready(bs[0].s, 0), device.ErrClosed)
	})
}

// The gaps between copied gradients are reduced too, so they must be numbers:
// the average of a poisoned gap would be none.
func TestGapsOfABucketAreNumbers(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		lists := make([][]memory.Slice[float32], 2)
		for i := range lists {
			for range 2 { // one element and a gap of three
				x, err := memory.MakeFrom(g.Stream(i), []float32{1})
				require.NoError(t, err)
				defer x.Close()
				lists[i] = append(lists[i], x)
			}
		}
		red, err := ddp.NewReducer(g, lists, nil)
		require.NoError(t, err)
		defer red.Close()
		for i := range lists {
			for _, gap := range ddp.Gaps[float32](t, red, i) {
				require.Zero(t, gap)
			}
		}
	})
}
