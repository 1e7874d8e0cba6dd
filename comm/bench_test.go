package comm_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// The cost on the host of an all-reduce of one rank. A wait every 256 operations keeps the
// stream from filling up, and is outside of the time.
func BenchmarkAllReduceOfOneRank(b *testing.B) {
	g, err := comm.Local(testgpu.Context(b), testgpu.CUDA(b, 1), nil)
	require.NoError(b, err)
	defer g.Close()
	xs, err := comm.Make[float32](g, 1024)
	require.NoError(b, err)
	defer xs.Close()
	b.ReportAllocs()
	for i := range b.N {
		if i%256 == 0 {
			b.StopTimer()
			require.NoError(b, g.Wait(testgpu.Context(b)))
			b.StartTimer()
		}
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	require.NoError(b, g.Wait(testgpu.Context(b)))
}

// The cost on the host of an all-reduce of two ranks in one process, on virtual devices: the
// part of Chorus, and a virtual driver and NCCL below it.
func BenchmarkEnqueueOfTwoRanks(b *testing.B) {
	for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		b.Run(string(strategy), func(b *testing.B) {
			devs := testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 2})
			g, err := comm.Local(testgpu.Context(b), devs, &comm.Config{Strategy: strategy})
			require.NoError(b, err)
			defer g.Close()
			xs, err := comm.Make[float32](g, 256)
			require.NoError(b, err)
			defer xs.Close()
			for i := range xs {
				require.NoError(b, xs[i].Zero(g.Stream(i)))
			}
			b.ReportAllocs()
			for i := range b.N {
				if i%64 == 0 {
					b.StopTimer()
					require.NoError(b, g.Wait(testgpu.Context(b)))
					b.StartTimer()
				}
				if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			require.NoError(b, g.Wait(testgpu.Context(b)))
		})
	}
}

// benchmarkGraph captures so many operations in a graph, and measures the time of one in b.N launches.
func benchmarkGraph(b *testing.B, g *comm.Group, ops int, issue func() error) {
	ctx := testgpu.Context(b)
	require.NoError(b, errors.Join(issue(), g.Wait(ctx)))
	exec, err := graph.Capture(g.Streams(), func() (err error) {
		for i := 0; i < ops && err == nil; i++ {
			err = issue()
		}
		return err
	}, nil)
	require.NoError(b, err)
	defer exec.Close()
	b.ResetTimer()
	for range b.N {
		require.NoError(b, exec.Launch(g.Stream(0)))
	}
	require.NoError(b, g.Wait(ctx))
	reportMicroseconds(b, b.N*ops)
}

// reportMicroseconds reports the time of each of n operations.
func reportMicroseconds(b *testing.B, n int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/float64(n), "µs/op")
	b.ReportMetric(0, "ns/op")
}

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
