package comm_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// BenchmarkExperts measures a dispatch and a combine of 128 tokens of each rank, with 7168 elements, for 8 of 64 experts: by Chorus kernels and
// by blocks that NCCL moves, in graphs, and by counts that the host exchanges and AllToAllV of NCCL, which no graph can have. The last one
// selects and adds no rows, so it is a lower bound of that way.
func BenchmarkExperts(b *testing.B) {
	const tokens = 128
	cfg := comm.ExpertsConfig{DType: memory.BFloat16, Experts: 64, TopK: 8, Hidden: 7168, MaxTokens: tokens}
	ctx, devs := testgpu.Context(b), testgpu.CUDA(b, 2)
	r := rand.New(rand.NewPCG(1, 2))
	c := &expertsCase[memory.BFloat16Bits]{number: bfloats, cfg: cfg, ranks: 2}
	for range c.ranks {
		ids, weights := []int32{}, make([]float32, tokens*cfg.TopK)
		for range tokens {
			for _, e := range r.Perm(cfg.Experts)[:cfg.TopK] {
				ids = append(ids, int32(e))
			}
		}
		for i := range weights {
			weights[i] = r.Float32()
		}
		c.x, c.ids, c.weights = append(c.x, make([]memory.BFloat16Bits, tokens*cfg.Hidden)), append(c.ids, ids), append(c.weights, weights)
	}
	for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		for _, payload := range []memory.DType{memory.BFloat16, memory.Float8E4M3} {
			g, err := comm.Local(ctx, devs, &comm.Config{Strategy: s})
			require.NoError(b, err)
			c.cfg.Payload = payload
			e, err := comm.NewExperts(ctx, g, &c.cfg)
			require.NoError(b, err)
			run, err := newExpertsRun(g, e, c)
			require.NoError(b, err)
			run.weighted = true
			step := func() error { return errors.Join(e.Dispatch(run.rows, run.x, run.ids, nil), run.combine(run.made)) }
			b.Run(fmt.Sprintf("%s/%s", s, payload), func(b *testing.B) { benchmarkGraph(b, g, 20, step) })
			require.NoError(b, errors.Join(run.close(), e.Close(), g.Close()))
		}
	}
	b.Run("alltoallv", func(b *testing.B) {
		g, err := comm.Local(ctx, devs, &comm.Config{Strategy: comm.NCCLOnly})
		require.NoError(b, err)
		defer g.Close()
		counts, sends := make([][]int, c.ranks), make([][]int, c.ranks)
		for rank := range c.ranks {
			counts[rank], sends[rank] = make([]int, cfg.Experts), make([]int, c.ranks)
			for _, id := range c.ids[rank] {
				counts[rank][id]++
				sends[rank][int(id)/c.own()]++
			}
		}
		recvs := [][]int{{sends[0][0], sends[1][0]}, {sends[0][1], sends[1][1]}}
		var x, y []tensor.Tensor
		for i := range c.ranks {
			sent, err := tensorOf[memory.BFloat16Bits](g, i, nil, sends[i][0]+sends[i][1], cfg.Hidden)
			require.NoError(b, err)
			received, err := tensorOf[memory.BFloat16Bits](g, i, nil, recvs[i][0]+recvs[i][1], cfg.Hidden)
			require.NoError(b, err)
			x, y = append(x, sent), append(y, received)
			defer sent.Close()
			defer received.Close()
		}
		step := func() error {
			_, err := comm.ExchangeCounts(ctx, g, counts)
			on := comm.OfTensors(g)
			return errors.Join(err, on.AllToAllV(y, recvs, x, sends), on.AllToAllV(x, sends, y, recvs))
		}
		require.NoError(b, errors.Join(step(), g.Wait(ctx)))
		b.ResetTimer()
		for range b.N {
			require.NoError(b, step())
		}
		require.NoError(b, g.Wait(ctx))
		reportMicroseconds(b, b.N)
	})
}
