package comm_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
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
