package comm_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The sizes of torch.cuda.comm's benchmark, and torch.cuda.nccl's all_reduce by one goroutine.
func BenchmarkTorchComm(b *testing.B) {
	onGroups(b, func(b *testing.B, g *comm.Group) {
		for _, bytes := range []int{4096, 1 << 20, 64 << 20, 512 << 20} {
			benchmarkTorch(b, g, bytes)
		}
		for _, shape := range [][]int{{16, 64}, {4096, 8192}} {
			benchmarkColumns(b, g, shape[0], shape[1])
		}
		benchmarkCoalesced(b, g)
	})
}

// Where one kernel and each copy by itself, or NCCL, cross.
func BenchmarkTorchCommDirect(b *testing.B) {
	onGroups(b, func(b *testing.B, g *comm.Group) {
		for name, most := range map[string]int{"one kernel": math.MaxInt, "each by itself": -1} {
			b.Run(name, func(b *testing.B) {
				comm.SetDirectBytes(b, most)
				comm.SetPairBytes(b, most)
				for bytes := 4 << 10; bytes <= 256<<20; bytes *= 4 {
					benchmarkTorch(b, g, bytes)
				}
				benchmarkColumns(b, g, 4096, 8192)
				benchmarkCoalesced(b, g)
			})
		}
	})
}

// onGroups runs a benchmark on 2, 4 and 8 GPUs.
func onGroups(b *testing.B, f func(b *testing.B, g *comm.Group)) {
	for _, n := range []int{2, 4, 8} {
		b.Run(fmt.Sprint("gpus=", n), func(b *testing.B) {
			devs := testgpu.CUDA(b, n)
			traced := handle.Trace.Swap(false) // which programs do not do
			defer handle.Trace.Store(traced)
			g, err := comm.Local(testgpu.Context(b), devs, nil)
			require.NoError(b, err)
			defer g.Close()
			f(b, g)
		})
	}
}

// An operation returns what is to be closed.
type operation struct {
	name string
	f    func() ([][]tensor.Tensor, error)
}

func one(y tensor.Tensor, err error) ([][]tensor.Tensor, error) {
	return [][]tensor.Tensor{{y}}, err
}
func some(ys []tensor.Tensor, err error) ([][]tensor.Tensor, error) {
	return [][]tensor.Tensor{ys}, err
}

func benchmarkTorch(b *testing.B, g *comm.Group, bytes int) {
	x := zeros(b, g.Stream(0), bytes/4)
	var xs []tensor.Tensor
	var raw []memory.Slice[float32]
	for i := range g.Locals() {
		xs = append(xs, zeros(b, g.Stream(i), bytes/4))
		r, err := tensor.Slice[float32](xs[i])
		require.NoError(b, err)
		raw = append(raw, r)
	}
	defer closing(b, append(xs, x)...)
	parts, err := comm.Scatter(g, x, nil)
	require.NoError(b, err)
	defer closing(b, parts...)
	for _, c := range []operation{
		{"broadcast", func() ([][]tensor.Tensor, error) { return some(comm.Broadcast(g, x, nil)) }},
		{"scatter", func() ([][]tensor.Tensor, error) { return some(comm.Scatter(g, x, nil)) }},
		{"gather", func() ([][]tensor.Tensor, error) { return one(comm.Gather(g, parts, nil)) }},
		{"reduce_add", func() ([][]tensor.Tensor, error) { return one(comm.ReduceAdd(g, xs, nil)) }},
		{"nccl.all_reduce", func() ([][]tensor.Tensor, error) { return nil, comm.AllReduce(g, comm.Sum, raw...) }},
	} {
		b.Run(fmt.Sprintf("%s/bytes=%d", c.name, bytes), func(b *testing.B) { timed(b, g, c.f) })
	}
}

// Matrices are divided between their columns.
func benchmarkColumns(b *testing.B, g *comm.Group, rows, columns int) {
	x := zeros(b, g.Stream(0), rows*columns)
	defer closing(b, x)
	whole, err := x.View(rows, columns)
	require.NoError(b, err)
	parts, err := comm.Scatter(g, whole, &comm.ScatterConfig{Dim: 1})
	require.NoError(b, err)
	defer closing(b, parts...)
	for _, c := range []operation{
		{"scatter dim1", func() ([][]tensor.Tensor, error) { return some(comm.Scatter(g, whole, &comm.ScatterConfig{Dim: 1})) }},
		{"gather dim1", func() ([][]tensor.Tensor, error) { return one(comm.Gather(g, parts, &comm.GatherConfig{Dim: 1})) }},
	} {
		b.Run(fmt.Sprintf("%s/bytes=%d", c.name, 4*rows*columns), func(b *testing.B) { timed(b, g, c.f) })
	}
}

// 300 small tensors.
func benchmarkCoalesced(b *testing.B, g *comm.Group) {
	xs := make([][]tensor.Tensor, g.Locals())
	for i := range xs {
		for k := range 300 {
			xs[i] = append(xs[i], zeros(b, g.Stream(i), 1000+k))
		}
		defer closing(b, xs[i]...)
	}
	b.Run("broadcast_coalesced", func(b *testing.B) {
		timed(b, g, func() ([][]tensor.Tensor, error) { return comm.BroadcastCoalesced(g, xs[0], nil) })
	})
	b.Run("reduce_add_coalesced", func(b *testing.B) {
		timed(b, g, func() ([][]tensor.Tensor, error) { return some(comm.ReduceAddCoalesced(g, xs, nil)) })
	})
}

// timed repeats f and the closing of its results.
func timed(b *testing.B, g *comm.Group, f func() ([][]tensor.Tensor, error)) {
	again := func() {
		all, err := f()
		if err != nil {
			b.Fatal(err)
		}
		for _, ys := range all {
			for i := range ys {
				if err := ys[i].Close(); err != nil {
					b.Fatal(err)
				}
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

func zeros(b testing.TB, s *stream.Stream, n int) tensor.Tensor {
	b.Helper()
	x, err := tensor.Make(s, memory.Float32, n)
	require.NoError(b, err)
	raw, err := tensor.Slice[float32](x)
	require.NoError(b, err)
	require.NoError(b, raw.Zero(s))
	return x
}
