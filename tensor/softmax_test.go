package tensor_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var floatTypes = sumTypes[:4]

// rounding is the distance that results of a type may have: a unit in the last place of the greatest
// result, and the error of a float32 sum.
func rounding(d memory.DType) float64 {
	return map[memory.DType]float64{memory.Float16: 0x1p-10, memory.BFloat16: 0x1p-7, memory.Float32: 0x1p-20, memory.Float64: 0x1p-48}[d]
}

// softmaxOf returns softmax of a row, and its gradient if the result has the gradient grad.
func softmaxOf(x []float64) (out []float64) {
	most, sum := math.Inf(-1), 0.
	for _, v := range x {
		most = max(most, v)
	}
	for _, v := range x {
		out = append(out, math.Exp(v-most))
		sum += out[len(out)-1]
	}
	for i := range out {
		out[i] /= sum
	}
	return out
}

func numbers(x []dtype.Value) (out []float64) {
	for _, v := range x {
		out = append(out, v.Float64())
	}
	return out
}

func TestSoftmax(t *testing.T) {
	eachType(t, floatTypes, func(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType) {
		for _, n := range []int{1, 2, 7, 64, 700, 9000} {
			rows := 1 + r.IntN(5)
			src, from := drawn(t, s, r, d, rows, 1, n)
			dst, _ := drawn(t, s, r, d, rows, 1, n)
			grad, g := drawn(t, s, r, d, rows, 1, n)
			back, _ := drawn(t, s, r, d, rows, 1, n)
			require.NoError(t, tensor.Softmax(s, dst, src))
			require.NoError(t, tensor.SoftmaxGrad(s, back, grad, dst))
			out, got := numbers(elementsOf(t, s, dst)), numbers(elementsOf(t, s, back))
			for row := range rows {
				want := softmaxOf(numbers(from[row*n : (row+1)*n]))
				sum := 0.
				for i, x := range want {
					require.InDelta(t, x, out[row*n+i], rounding(d), "%s: element %d of %d", d, i, n)
					sum += g[row*n+i].Float64() * out[row*n+i]
				}
				for i := range want {
					at := row*n + i
					require.InDelta(t, (g[at].Float64()-sum)*out[at], got[at], 8*rounding(d), "%s: gradient %d of %d", d, i, n)
				}
			}
		}
		empty, _ := drawn(t, s, r, d, 3, 0)
		other, _ := drawn(t, s, r, d, 3, 0)
		require.NoError(t, tensor.Softmax(s, empty, other))
	})
}

// The gradient is the slope of a sum of results with weights.
func TestSoftmaxGradIsTheSlope(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		x, w := make([]float64, 6), make([]float64, 6)
		for i := range x {
			x[i], w[i] = r.NormFloat64(), r.NormFloat64()
		}
		loss := func(x []float64) (sum float64) {
			for i, y := range softmaxOf(x) {
				sum += w[i] * y
			}
			return sum
		}
		src, grad, out, back := fromSlice(t, s, x, 6), fromSlice(t, s, w, 6), fromSlice(t, s, x, 6), fromSlice(t, s, x, 6)
		require.NoError(t, tensor.Softmax(s, out, src))
		require.NoError(t, tensor.SoftmaxGrad(s, back, grad, out))
		for i, got := range elementsOf(t, s, back) {
			const h = 1e-5
			up, down := append([]float64{}, x...), append([]float64{}, x...)
			up[i] += h
			down[i] -= h
			require.InDelta(t, (loss(up)-loss(down))/(2*h), got.Float64(), 1e-8)
		}
	})
}

func TestScatterAdd(t *testing.T) {
	eachType(t, floatTypes, func(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType) {
		for range 5 {
			rows, n, k := 1+r.IntN(700), 1+r.IntN(9), r.IntN(7)
			dst, want := drawn(t, s, r, d, rows, n)
			src, from := drawn(t, s, r, d, rows, k)
			index, _ := drawn(t, s, r, []memory.DType{memory.Int32, memory.Int64}[r.IntN(2)], rows, k)
			places := make([]int64, rows*k)
			for i := range places {
				places[i] = int64(r.IntN(n))
			}
			require.NoError(t, tensor.Copy(s, index, fromSlice(t, s, append(places, 0)[:rows*k], rows, k)))
			require.NoError(t, tensor.ScatterAdd(s, dst, src, index))
			for i, at := range places { // sums of these numbers are exact in all types but bfloat16
				to := i/k*n + int(at)
				want[to] = dtype.FloatValue(dtype.Of(d).Round(dtype.FloatValue(want[to].Float64() + from[i].Float64())))
			}
			require.Equal(t, numbers(want), numbers(elementsOf(t, s, dst)))
		}
	})
}

func TestZeroAndMakeFrom(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		x, err := tensor.MakeFrom(s, []int32{1, 2, 3, 4, 5, 6}, 2, 3)
		require.NoError(t, err)
		defer x.Close()
		row, err := x.Select(0, 1)
		require.NoError(t, err)
		require.NoError(t, row.Zero(s))
		require.Equal(t, []float64{1, 2, 3, 0, 0, 0}, numbers(elementsOf(t, s, x)))
		require.ErrorContains(t, x.T().Zero(s), "has gaps between its elements: want contiguous memory")
		require.ErrorContains(t, x.Zero(nil), "no stream given")
		_, err = tensor.MakeFrom(s, []int32{1}, 2)
		require.Error(t, err)
		none, err := x.Narrow(0, 0, 0)
		require.NoError(t, err)
		require.NoError(t, none.Zero(s))
	})
}

func TestSoftmaxRefuses(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	x, y := fromSlice(t, s, make([]float32, 6), 2, 3), fromSlice(t, s, make([]float32, 6), 2, 3)
	ints, wide := fromSlice(t, s, make([]int32, 6), 2, 3), fromSlice(t, s, make([]float64, 6), 2, 3)
	flat, one := fromSlice(t, s, make([]float32, 6), 6), fromSlice(t, s, make([]float32, 1))
	require.ErrorContains(t, tensor.Softmax(nil, x, y), "no stream given")
	require.ErrorContains(t, tensor.Softmax(s, x, wide), "want the same type")
	require.ErrorContains(t, tensor.Softmax(s, ints, ints), "elements of int32 are not supported: want float16")
	require.ErrorContains(t, tensor.Softmax(s, x, flat), "shape [2 3] from shape [6]: want the same")
	require.ErrorContains(t, tensor.Softmax(s, one, one), "want at least one dimension")
	require.ErrorContains(t, tensor.Softmax(s, x, x), "shares memory with the source")
	require.ErrorContains(t, tensor.SoftmaxGrad(s, x, y, x), "softmax gradient: the destination shares memory with the source")
	require.ErrorContains(t, tensor.ScatterAdd(s, x, y, wide), "an index of float64: want int32 or int64")
	require.ErrorContains(t, tensor.ScatterAdd(s, x, flat, ints), "a source of shape [6] and an index of shape [2 3]: want the same")
	more, err := y.View(3, 2)
	require.NoError(t, err)
	index, err := ints.View(3, 2)
	require.NoError(t, err)
	require.ErrorContains(t, tensor.ScatterAdd(s, x, more, index), "shape [2 3] from shape [3 2]: want the same dimensions but the last one")
}

// The CUDA source has the results of the Go functions: those of sums in float32 but for their rounding.
func TestSoftmaxAgreesWithSource(t *testing.T) {
	run := sourceOnTheHost(t)
	s, r := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]), seeded(t)
	for i, name := range []string{"f16", "bf16", "f32", "f64"} {
		d := floatTypes[i]
		for _, n := range []int{1, 2, 33, 1200} {
			const rows = 3
			draw := func(width int) (tensor.Tensor, []byte) {
				values := make([]float64, rows*width)
				for i := range values {
					values[i] = r.NormFloat64()
				}
				x, err := tensor.Make(s, d, rows, width)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, x.Close()) })
				require.NoError(t, tensor.Copy(s, x, fromSlice(t, s, values, rows, width)))
				host, err := tensor.MakeHost(d, rows, width)
				require.NoError(t, err)
				require.NoError(t, tensor.Copy(s, host, x))
				return x, bytesOf(t, host)
			}
			check := func(got []byte, want tensor.Tensor, what string) {
				for i, x := range elementsOf(t, s, want) {
					require.InDelta(t, x.Float64(), dtype.Of(d).Load(got, i).Float64(), 8*rounding(d), "%s: %s: element %d of rows of %d", d, what, i, n)
				}
			}
			x, from := draw(n)
			y, out := draw(n)
			z, back := draw(n)
			g, grad := draw(n)
			require.NoError(t, tensor.Softmax(s, y, x))
			run("softmax_"+name, tensor.GridOfTop(rows, n), out, from, uint64(rows), uint32(n))
			check(out, y, "softmax")
			require.NoError(t, tensor.SoftmaxGrad(s, z, g, y))
			run("softmax_grad_"+name, tensor.GridOfTop(rows, n), back, grad, out, uint64(rows), uint32(n))
			check(back, z, "gradient")
			k := 1 + r.IntN(4)
			a, add := draw(k)
			places, index := make([]int64, rows*k), []byte(nil)
			for i := range places {
				places[i] = int64(r.IntN(n))
				index = append(index, make([]byte, 8)...)
				dtype.Of(memory.Int64).Store(index, i, dtype.IntValue(places[i]))
			}
			sums, to := draw(n)
			require.NoError(t, tensor.ScatterAdd(s, sums, a, fromSlice(t, s, places, rows, k)))
			run("scatter_add_"+name, tensor.GridOf(rows), to, add, index, uint64(rows), uint32(n), uint32(k), uint32(1))
			for i, x := range elementsOf(t, s, sums) {
				require.Equal(t, x.Float64(), dtype.Of(d).Load(to, i).Float64())
			}
		}
	}
}
