package comm_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// BenchmarkAllReduceQuantized measures graphs of all-reduces of bfloat16: of NCCL, and in blocks of 8-bit numbers, which
// NCCL or Chorus kernels move. A tuned group has more scratch memory than one with OwnKernels, and larger chunks.
func BenchmarkAllReduceQuantized(b *testing.B) {
	ctx := testgpu.Context(b)
	for _, bytes := range []int{4 << 20, 64 << 20} {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.Tuned} {
			g, err := comm.Local(ctx, testgpu.CUDA(b, 2), &comm.Config{Strategy: s})
			require.NoError(b, err)
			xs, err := comm.Make[memory.BFloat16Bits](g, bytes/2)
			require.NoError(b, err)
			errs, err := comm.Make[float32](g, bytes/2)
			require.NoError(b, err)
			for i := range xs {
				require.NoError(b, errors.Join(xs[i].Zero(g.Stream(i)), errs[i].Zero(g.Stream(i))))
			}
			steps := []struct {
				name string
				do   func() error
			}{
				{"allreduce", func() error { return comm.AllReduce(g, comm.Sum, xs...) }},
				{"float8_e4m3", func() error { return comm.AllReduceQuantized(g, comm.Sum, xs, nil) }},
				{"int8", func() error {
					return comm.AllReduceQuantized(g, comm.Sum, xs, &comm.QuantizedConfig{Format: memory.Int8})
				}},
				{"float8_e4m3+errors", func() error {
					return comm.AllReduceQuantized(g, comm.Sum, xs, &comm.QuantizedConfig{Errors: errs})
				}},
			}
			for _, step := range steps {
				b.Run(fmt.Sprintf("bytes=%d/%s/%s", bytes, s, step.name), func(b *testing.B) { benchmarkGraph(b, g, 20, step.do) })
			}
			require.NoError(b, errors.Join(xs.Close(), errs.Close(), g.Close()))
		}
	}
}
