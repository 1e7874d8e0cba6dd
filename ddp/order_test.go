package ddp_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// TestDeterministicReducer compares the means of gradients in a deterministic group with additions
// in rank order: they have the same bits, whatever the size of the buckets.
func TestDeterministicReducer(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		seed := rand.Uint64()
		t.Log("seed", seed)
		g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Deterministic: &comm.Order{}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, g.Close()) })
		for _, flat := range []bool{true, false} {
			for _, bytes := range []int{1, 4096, 64 << 10, 0} {
				reduceInOrder(t, g, flat, bytes, rand.New(rand.NewPCG(seed, 2)))
			}
		}
	})
}

func reduceInOrder(t *testing.T, g *comm.Group, flat bool, bytes int, r *rand.Rand) {
	bs, op := backwards(t, g, flat), comm.Avg
	lists, streams := make([][]memory.Slice[float32], len(bs)), make([]*stream.Stream, len(bs))
	for i := range bs {
		lists[i], streams[i] = bs[i].grads, bs[i].s
	}
	red, err := ddp.NewReducer(g, lists, &ddp.ReducerConfig{BucketBytes: bytes, FirstBucketBytes: bytes / 2, Op: &op})
	require.NoError(t, err)
	defer red.Close()
	want := make([][]float32, len(gradLens))
	for i, b := range bs {
		for j := len(gradLens) - 1; j >= 0; j-- {
			h := make([]float32, gradLens[j])
			for k := range h {
				h[k] = float32(r.NormFloat64())
			}
			if i == 0 {
				want[j] = make([]float32, len(h))
			}
			for k := range h {
				want[j][k] += h[k]
			}
			require.NoError(t, b.grads[j].CopyFrom(b.s, h))
			require.NoError(t, red.Ready(b.s, j))
		}
	}
	require.NoError(t, red.Finish(streams...))
	for _, b := range bs {
		for j, n := range gradLens {
			h := make([]float32, n)
			require.NoError(t, b.grads[j].CopyTo(b.s, h))
			for k := range h {
				require.Equal(t, want[j][k]/float32(len(bs)), h[k], "gradient %d, element %d, buckets of %d bytes", j, k, bytes)
			}
		}
	}
}
