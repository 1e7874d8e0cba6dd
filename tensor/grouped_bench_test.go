package tensor_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// BenchmarkGroupedMatMul measures products of groups whose sizes are on the device (at, inner), and of a product of
// cuBLASLt for each group, with sizes on the host, eager and in a graph. Results are compared. The peer is
// internal/bench/testdata/grouped.py.
func BenchmarkGroupedMatMul(b *testing.B) {
	s, err := stream.New(testgpu.CUDA(b, 1)[0], nil)
	require.NoError(b, err)
	defer s.Close()
	for _, x := range []struct {
		groups, rows, k, n int
		ragged, turned     bool // sizes are random; b is a transposed view, as weights are
	}{
		{64, 4096, 7168, 2048, false, false},
		{64, 4096, 7168, 2048, true, false},
		{64, 4096, 7168, 2048, true, true},
		{8, 8192, 4096, 4096, false, false},
		{8, 8192, 4096, 4096, true, true},
	} {
		name := fmt.Sprintf("%dx%dx%dx%d,ragged=%v,turned=%v", x.groups, x.rows, x.k, x.n, x.ragged, x.turned)
		sizes, ends := groupSizes(x.groups, x.rows, x.ragged)
		var open []tensor.Tensor
		made := func(t tensor.Tensor, err error) tensor.Tensor {
			require.NoError(b, err)
			open = append(open, t)
			return t
		}
		at := made(tensor.MakeFrom(s, ends, x.groups))
		random := func(shape ...int) tensor.Tensor { // the matrices of a batch are equal
			n := shape[len(shape)-2] * shape[len(shape)-1]
			host := make([]float32, n)
			for i := range host {
				host[i] = 2*rand.Float32() - 1
			}
			one, err := tensor.OfHost(host, shape[len(shape)-2:]...)
			require.NoError(b, err)
			device := made(tensor.Make(s, bf16, one.Shape()...))
			require.NoError(b, tensor.Copy(s, device, one))
			if len(shape) == 2 {
				return device
			}
			all, err := device.Expand(shape...)
			require.NoError(b, err)
			batch := made(tensor.Make(s, bf16, shape...))
			require.NoError(b, tensor.Copy(s, batch, all))
			return batch
		}
		a := random(x.rows, x.k)
		var w tensor.Tensor
		if x.turned {
			w = random(x.groups, x.n, x.k).T()
		} else {
			w = random(x.groups, x.k, x.n)
		}
		c, want := made(tensor.Make(s, bf16, x.rows, x.n)), made(tensor.Make(s, bf16, x.rows, x.n))
		flop := 2 * float64(x.rows) * float64(x.k) * float64(x.n)
		host := func() error { return tensor.GroupedMatMul(s, want, a, w, sizes, nil) }
		benchmarkProduct(b, s, name+"/host", flop, host)
		benchmarkProduct(b, s, name+"/host,graph", flop, captured(b, s, host))
		benchmarkProduct(b, s, name+"/at", flop, func() error { return tensor.GroupedMatMulAt(s, c, a, w, at, nil) })
		requireSame(b, s, want, c)

		// The gradient of the weights: groups of the inner dimension.
		dy := random(x.rows, x.n)
		dw, each := made(tensor.Make(s, bf16, x.groups, x.k, x.n)), made(tensor.Make(s, bf16, x.groups, x.k, x.n))
		host = func() error {
			for i, n := range sizes {
				one, err := each.Select(0, i)
				require.NoError(b, err)
				rows, err := a.Narrow(0, int(ends[i])-n, n)
				require.NoError(b, err)
				cols, err := dy.Narrow(0, int(ends[i])-n, n)
				require.NoError(b, err)
				if err := tensor.MatMul(s, one, rows.T(), cols, nil); err != nil {
					return err
				}
			}
			return nil
		}
		benchmarkProduct(b, s, name+"/gradient,host", flop, host)
		benchmarkProduct(b, s, name+"/gradient,host,graph", flop, captured(b, s, host))
		benchmarkProduct(b, s, name+"/gradient,inner", flop, func() error { return tensor.GroupedMatMulInner(s, dw, a.T(), dy, at, nil) })
		requireSame(b, s, each, dw)
		require.NoError(b, s.Sync(testgpu.Context(b)))
		for _, t := range open {
			require.NoError(b, t.Close())
		}
	}
}

// groupSizes returns numbers of rows that sum up to all rows, and their cumulative sums: equal, or the same random ones in
// each run, as grouped.py has them.
func groupSizes(groups, rows int, ragged bool) (sizes []int, ends []int32) {
	sizes = make([]int, groups)
	for i := range rows {
		g := i % groups
		if ragged {
			g = i * i % 8191 * groups / 8191
		}
		sizes[g]++
	}
	end := 0
	for _, n := range sizes {
		end += n
		ends = append(ends, int32(end))
	}
	return sizes, ends
}

// captured returns a launch of a graph of fn.
func captured(b *testing.B, s *stream.Stream, fn func() error) func() error {
	require.NoError(b, fn())
	g, err := graph.Capture([]*stream.Stream{s}, fn, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, g.Close()) })
	return func() error { return g.Launch(s) }
}

// benchmarkProduct measures fn on the device, by turns of 10.
func benchmarkProduct(b *testing.B, s *stream.Stream, name string, flop float64, fn func() error) {
	b.Run(name, func(b *testing.B) {
		require.NoError(b, fn())
		require.NoError(b, s.Sync(testgpu.Context(b)))
		n := 0
		for b.Loop() {
			for range 10 {
				if err := fn(); err != nil {
					b.Fatal(err)
				}
			}
			require.NoError(b, s.Sync(testgpu.Context(b)))
			n += 10
		}
		each := b.Elapsed().Seconds() / float64(n)
		b.ReportMetric(each*1e6, "µs/product")
		b.ReportMetric(flop/each/1e12, "TFLOP/s")
	})
}

// requireSame compares the first, middle and last matrix or row of two results of bfloat16.
func requireSame(b *testing.B, s *stream.Stream, want, got tensor.Tensor) {
	for _, i := range []int{0, want.Size(0) / 2, want.Size(0) - 1} {
		var v [2][]float32
		for j, t := range []tensor.Tensor{want, got} {
			row, err := t.Select(0, i)
			require.NoError(b, err)
			v[j] = make([]float32, row.Len())
			host, err := tensor.OfHost(v[j], row.Shape()...)
			require.NoError(b, err)
			require.NoError(b, tensor.Copy(s, host, row))
		}
		for j := range v[0] {
			if d := v[0][j] - v[1][j]; !(max(d, -d) <= 0.02*max(v[0][j], -v[0][j])+0.25) {
				b.Fatalf("element %d of part %d is %v: cuBLASLt has %v", j, i, v[1][j], v[0][j])
			}
		}
	}
}
