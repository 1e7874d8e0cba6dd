package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The cost on the host of a launch of a graph of 100 kernels. A wait every 16 launches keeps
// the stream from filling up, and is outside of the time.
func BenchmarkLaunchOf100Kernels(b *testing.B) {
	s, err := stream.New(testgpu.CUDA(b, 1)[0], nil)
	require.NoError(b, err)
	defer s.Close()
	e, err := kernel.NewElementwise("2 * x", &kernel.ElementwiseConfig{Inputs: []string{"x"}})
	require.NoError(b, err)
	defer e.Close()
	x, err := memory.Make[float32](s, 256)
	require.NoError(b, err)
	defer x.Close()
	require.NoError(b, e.Launch(s, kernel.Out(x), kernel.In(x)))
	g, err := graph.Capture([]*stream.Stream{s}, func() error {
		for range 100 {
			if err := e.Launch(s, kernel.Out(x), kernel.In(x)); err != nil {
				return err
			}
		}
		return nil
	}, nil)
	require.NoError(b, err)
	defer g.Close()
	b.ReportAllocs()
	for i := range b.N {
		if i%16 == 0 {
			b.StopTimer()
			require.NoError(b, s.Sync(testgpu.Context(b)))
			b.StartTimer()
		}
		if err := g.Launch(s); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	require.NoError(b, s.Sync(testgpu.Context(b)))
}
