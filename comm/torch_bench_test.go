package comm_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The sizes of torch.cuda.comm's benchmark.
func BenchmarkTorchComm(b *testing.B) {
	for _, n := range []int{2, 8} {
		b.Run(fmt.Sprint("gpus=", n), func(b *testing.B) {
			devs := testgpu.CUDA(b, n)
			g, err := comm.Local(testgpu.Context(b), devs...)
			require.NoError(b, err)
			defer g.Close()
			for _, bytes := range []int{4096, 1 << 20, 64 << 20, 512 << 20} {
				benchmarkTorch(b, g, bytes)
			}
			benchmarkCoalesced(b, g)
		})
	}
}

func benchmarkTorch(b *testing.B, g *comm.Group, bytes int) {
	x := zeros(b, g.Stream(0), bytes/4)
	xs := []tensor.Tensor{}
	for i := range g.Locals() {
		xs = append(xs, zeros(b, g.Stream(i), bytes/4))
	}
	parts, err := comm.Scatter(g, x, nil)
	require.NoError(b, err)
	defer closing(b, parts...)
	rows, err := x.View(64, -1)
	require.NoError(b, err)
	columns, err := comm.Scatter(g, rows, &comm.ScatterConfig{Dim: 1})
	require.NoError(b, err)
	defer closing(b, columns...)
	one := func(y tensor.Tensor, err error) ([]tensor.Tensor, error) { return []tensor.Tensor{y}, err }
	for _, c := range []struct {
		name string
		f    func() ([]tensor.Tensor, error)
	}{
		{"broadcast", func() ([]tensor.Tensor, error) { return comm.Broadcast(g, x, nil) }},
		{"scatter", func() ([]tensor.Tensor, error) { return comm.Scatter(g, x, nil) }},
		{"gather", func() ([]tensor.Tensor, error) { return one(comm.Gather(g, parts, nil)) }},
		{"reduce_add", func() ([]tensor.Tensor, error) { return one(comm.ReduceAdd(g, xs, nil)) }},
		{"scatter dim1", func() ([]tensor.Tensor, error) { return comm.Scatter(g, rows, &comm.ScatterConfig{Dim: 1}) }},
		{"gather dim1", func() ([]tensor.Tensor, error) { return one(comm.Gather(g, columns, &comm.GatherConfig{Dim: 1})) }},
	} {
		b.Run(fmt.Sprintf("%s/bytes=%d", c.name, bytes), func(b *testing.B) { timed(b, g, c.f) })
	}
}

// 300 small tensors.
func benchmarkCoalesced(b *testing.B, g *comm.Group) {
	xs := make([][]tensor.Tensor, g.Locals())
	for i := range xs {
		for k := range 300 {
			xs[i] = append(xs[i], zeros(b, g.Stream(i), 1000+k))
		}
	}
	b.Run("broadcast_coalesced", func(b *testing.B) {
		timed(b, g, func() (all []tensor.Tensor, err error) {
			ys, err := comm.BroadcastCoalesced(g, xs[0], nil)
			for _, l := range ys {
				all = append(all, l...)
			}
			return all, err
		})
	})
	b.Run("reduce_add_coalesced", func(b *testing.B) {
		timed(b, g, func() ([]tensor.Tensor, error) { return comm.ReduceAddCoalesced(g, xs, nil) })
	})
}

// timed repeats f and the closing of its results.
func timed(b *testing.B, g *comm.Group, f func() ([]tensor.Tensor, error)) {
	again := func() {
		ys, err := f()
		if err != nil {
			b.Fatal(err)
		}
		for _, y := range ys {
			if err := y.Close(); err != nil {
				b.Fatal(err)
			}
		}
	}
	again()
	require.NoError(b, g.Wait(testgpu.Context(b)))
	b.ResetTimer()
	for range b.N { // not b.Loop, which would leave the wait out of the time
		again()
	}
	require.NoError(b, g.Wait(testgpu.Context(b)))
}

func zeros(b *testing.B, s *stream.Stream, n int) tensor.Tensor {
	b.Helper()
	x, err := tensor.Make(s, memory.Float32, n)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, x.Close()) })
	raw, err := tensor.Slice[float32](x)
	require.NoError(b, err)
	require.NoError(b, raw.Zero(s))
	return x
}
