package comm_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// BenchmarkAllReduceQuantized measures graphs of all-reduces of bfloat16: of NCCL, and in blocks of 8-bit numbers, which
// NCCL or Chorus kernels move. A tuned group has more scratch memory than one with OwnKernels, and larger chunks.
func BenchmarkAllReduceQuantized(b *testing.B) {
	const ops = 20 // in a graph
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
				b.Run(fmt.Sprintf("bytes=%d/%s/%s", bytes, s, step.name), func(b *testing.B) {
					require.NoError(b, errors.Join(step.do(), g.Wait(ctx)))
					exec, err := graph.Capture(g.Streams(), func() error {
						for range ops {
							if err := step.do(); err != nil {
								return err
							}
						}
						return nil
					}, nil)
					require.NoError(b, err)
					defer exec.Close()
					b.ResetTimer()
					for range b.N {
						require.NoError(b, exec.Launch(g.Stream(0)))
					}
					require.NoError(b, g.Wait(ctx))
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/float64(b.N*ops), "µs/op")
					b.ReportMetric(0, "ns/op")
				})
			}
			require.NoError(b, errors.Join(xs.Close(), errs.Close(), g.Close()))
		}
	}
}
