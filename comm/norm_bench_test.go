package comm_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// BenchmarkAllReduceNorm measures graphs of fused norms (own), and of NCCL's all-reduces with a
// separate kernel for the norm (nccl), in one process.
func BenchmarkAllReduceNorm(b *testing.B) {
	for _, rows := range []int{1, 6, 32} {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			b.Run(fmt.Sprintf("rows=%d/cols=6144/%s", rows, s), func(b *testing.B) {
				ctx := testgpu.Context(b)
				g, err := comm.Local(ctx, testgpu.CUDA(b, 2), &comm.Config{Strategy: s})
				require.NoError(b, err)
				defer g.Close()
				var xs [4]comm.Shards[memory.BFloat16Bits]
				for i, n := range []int{rows * 6144, rows * 6144, rows * 6144, 6144} {
					xs[i], err = comm.Make[memory.BFloat16Bits](g, n)
					require.NoError(b, err)
					defer xs[i].Close()
					for k, x := range xs[i] {
						require.NoError(b, x.Zero(g.Stream(k)))
					}
				}
				benchmarkGraph(b, g, 50, func() error {
					return comm.AllReduceNorm(g, xs[0], xs[1], xs[2], xs[3], &comm.NormConfig{Eps: 1e-5})
				})
			})
		}
	}
}
