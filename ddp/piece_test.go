package ddp_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
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
