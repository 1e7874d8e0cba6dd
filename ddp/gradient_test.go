package ddp_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The pieces of all ranks are all elements of all parameters, each once, and lie in the memory of
// the shards.
func TestPieces(t *testing.T) {
	for _, ranks := range []int{1, 2, 5} {
		for _, bytes := range []int{1, 4096, 0} {
			t.Run(fmt.Sprintf("ranks=%d/bucket=%d", ranks, bytes), func(t *testing.T) {
				testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
					g := local(t, devs)
					sh, err := ddp.NewSharder[float32](g, shardLens, &ddp.ShardConfig{BucketBytes: bytes, FirstBucketBytes: bytes})
					require.NoError(t, err)
					defer sh.Close()
					seen := make([][]bool, len(shardLens))
					for j, n := range shardLens {
						seen[j] = make([]bool, n)
					}
					for i := range g.Locals() {
						end := 0
						for _, p := range sh.Pieces(i) {
							require.GreaterOrEqual(t, p.At, end)
							end = p.At + p.Len
							want := sh.Params(i)[p.Param].Slice(p.Start, p.Start+p.Len)
							require.Equal(t, want.Ptr(), inShard(t, sh.Parts(i), p))
							for k := p.Start; k < p.Start+p.Len; k++ {
								require.False(t, seen[p.Param][k], "element %d of parameter %d", k, p.Param)
								seen[p.Param][k] = true
							}
						}
						require.LessOrEqual(t, end, sh.Len())
					}
					for j := range seen {
						require.NotContains(t, seen[j], false, "parameter %d", j)
					}
				})
			})
		}
	}
}

// inShard returns the address of a piece by its place in the shard.
func inShard(t *testing.T, parts []ddp.Part[float32], p ddp.Piece) uint64 {
	for _, x := range parts {
		if p.At >= x.At && p.At+p.Len <= x.At+x.Param.Len() {
			return x.Param.Slice(p.At-x.At, p.At-x.At+p.Len).Ptr()
		}
	}
	t.Fatalf("no part of the shard has %+v", p)
	panic("unreachable")
}

// The norm over the shards of all ranks is that of the whole gradients, and clips them.
func TestNormOfAShardedModel(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 1))
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		defer g.Close()
		lens := []int{1000, 7, 4097}
		op := comm.Sum
		sh, err := ddp.NewSharder[float32](g, lens, &ddp.ShardConfig{BucketBytes: 4096, FirstBucketBytes: 4096, Op: &op})
		require.NoError(t, err)
		defer sh.Close()
		var streams []*stream.Stream
		for _, d := range devs {
			s, err := stream.New(d, nil)
			require.NoError(t, err)
			defer s.Close()
			require.NoError(t, sh.WaitOn(s, 0))
			streams = append(streams, s)
		}
		var all []float64
		for k, n := range lens {
			sum := make([]float64, n)
			for i, s := range streams {
				part := make([]float32, n)
				for j := range part {
					part[j] = float32(r.IntN(17) - 8)
					sum[j] += float64(part[j])
				}
				require.NoError(t, sh.WaitOn(s, k))
				require.NoError(t, sh.Grads(i)[k].CopyFrom(s, part))
				require.NoError(t, sh.Ready(s, k))
			}
			all = append(all, sum...)
		}
		var grads []*optim.Grads
		require.NoError(t, sh.Finish(streams...))
		for i, s := range streams {
			var mine []tensor.Tensor
			for _, p := range sh.Parts(i) {
				mine = append(mine, optim.Of(p.Param, p.Grad).Grad)
			}
			x, err := optim.NewGrads(s, mine...)
			require.NoError(t, err)
			defer x.Close()
			grads = append(grads, x)
		}
		for _, p := range []float64{1, 2, math.Inf(1)} {
			require.NoError(t, ddp.Powers(g, p, grads, streams))
			for i, s := range streams {
				norm, factor, err := grads[i].Coef(s, 1)
				require.NoError(t, err)
				got := make([]float32, 2)
				require.NoError(t, norm.CopyTo(s, got[:1]))
				require.NoError(t, factor.CopyTo(s, got[1:]))
				require.InEpsilon(t, normOf(all, p), got[0], 1e-6, "order %v on rank %d", p, i)
				require.InEpsilon(t, 1/(normOf(all, p)+1e-6), got[1], 1e-6)
			}
		}
		require.ErrorContains(t, ddp.Powers(g, 2, grads[:1], streams), "1 gradients and 3 streams")
		require.ErrorContains(t, ddp.Powers(g, -1, grads, streams), "order -1")
	})
}

func normOf(xs []float64, p float64) (norm float64) {
	for _, x := range xs {
		if math.IsInf(p, 1) {
			norm = max(norm, math.Abs(x))
		} else {
			norm += math.Pow(math.Abs(x), p)
		}
	}
	if math.IsInf(p, 1) {
		return norm
	}
	return math.Pow(norm, 1/p)
}
