package tensor_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// sumTypes are the types whose rows can be added and compared.
var sumTypes = []memory.DType{memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Int32, memory.Int64}

// drawn returns a device tensor of random small numbers, and its elements in row-major order. Some tensors are views
// with gaps.
func drawn(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType, shape ...int) (tensor.Tensor, []dtype.Value) {
	whole := append([]int{}, shape...)
	last := len(whole) - 1
	gap := r.IntN(3) == 0 && last >= 0
	if gap {
		whole[last] += 1 + r.IntN(3)
	}
	host, err := tensor.MakeHost(d, whole...)
	require.NoError(t, err)
	x, err := tensor.Make(s, d, whole...)
	require.NoError(t, err)
	owner := x
	t.Cleanup(func() { require.NoError(t, owner.Close()) })
	raw := bytesOf(t, host)
	for i := range host.Len() {
		if dtype.Of(d).IsFloat() {
			dtype.Of(d).Store(raw, i, dtype.FloatValue(float64(r.IntN(65)-32)/8))
		} else {
			dtype.Of(d).Store(raw, i, dtype.IntValue(int64(r.IntN(65)-32)))
		}
	}
	require.NoError(t, tensor.Copy(s, x, host))
	if gap {
		x, err = x.Narrow(last, 1, shape[last])
		require.NoError(t, err)
	}
	return x, elementsOf(t, s, x)
}

func bytesOf(t *testing.T, host tensor.Tensor) []byte {
	flat, err := host.ViewDType(memory.Uint8)
	require.NoError(t, err)
	raw, err := tensor.Data[uint8](flat)
	require.NoError(t, err)
	return raw
}

// elementsOf returns the elements in row-major order.
func elementsOf(t *testing.T, s *stream.Stream, x tensor.Tensor) []dtype.Value {
	host, err := tensor.MakeHost(x.DType(), x.Shape()...)
	require.NoError(t, err)
	require.NoError(t, tensor.Copy(s, host, x))
	list := make([]dtype.Value, host.Len())
	raw := bytesOf(t, host)
	for i := range list {
		list[i] = dtype.Of(x.DType()).Load(raw, i)
	}
	return list
}

// indexTo returns an index of n entries that name rows.
func indexTo(t *testing.T, s *stream.Stream, r *rand.Rand, n, rows int) (tensor.Tensor, []int) {
	d := []memory.DType{memory.Int32, memory.Int64}[r.IntN(2)]
	host, err := tensor.MakeHost(d, n)
	require.NoError(t, err)
	x, err := tensor.Make(s, d, n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	index := make([]int, n)
	for i := range index {
		index[i] = r.IntN(rows)
		dtype.Of(d).Store(bytesOf(t, host), i, dtype.IntValue(int64(index[i])))
	}
	require.NoError(t, tensor.Copy(s, x, host))
	return x, index
}

// eachType runs fn on each backend for each type.
func eachType(t *testing.T, types []memory.DType, fn func(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType)) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		for _, d := range types {
			t.Run(d.String(), func(t *testing.T) { fn(t, s, r, d) })
		}
	})
}

func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Log("seed", seed)
	return rand.New(rand.NewPCG(seed, 41))
}

// rowShapes are rows of one element, of several, of none, and of more than a block.
var rowShapes = [][]int{{3, 5}, {}, {2100}, {1}, {0}, {64}}

func TestIndexSelect(t *testing.T) {
	var all []memory.DType
	for d := memory.Bool; d <= memory.Float8E5M2; d++ {
		all = append(all, d)
	}
	eachType(t, all, func(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType) {
		for _, row := range rowShapes {
			rows, n := 1+r.IntN(9), r.IntN(12)
			src, from := drawn(t, s, r, d, append([]int{rows}, row...)...)
			dst, _ := drawn(t, s, r, d, append([]int{n}, row...)...)
			index, at := indexTo(t, s, r, n, rows)
			require.NoError(t, tensor.IndexSelect(s, dst, src, index))
			width := len(from) / rows
			want := make([]dtype.Value, 0, n*width)
			for _, i := range at {
				want = append(want, from[i*width:(i+1)*width]...)
			}
			require.Equal(t, want, elementsOf(t, s, dst), "%s: rows %v of %v", d, at, src)
		}
	})
}

func TestIndexAdd(t *testing.T) {
	eachType(t, sumTypes, func(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType) {
		for _, row := range rowShapes {
			for weighted := range 3 {
				if weighted > 0 && !dtype.Of(d).IsFloat() {
					continue
				}
				rows, n := 1+r.IntN(9), r.IntN(20)
				src, from := drawn(t, s, r, d, append([]int{n}, row...)...)
				dst, sums := drawn(t, s, r, d, append([]int{rows}, row...)...)
				index, at := indexTo(t, s, r, n, rows)
				var weights tensor.Tensor
				w := make([]dtype.Value, n)
				for i := range w {
					w[i] = dtype.FloatValue(1)
				}
				switch weighted {
				case 1:
					weights, w = drawn(t, s, r, memory.Float32, n)
				case 2:
					weights, w = drawn(t, s, r, d, n)
				}
				require.NoError(t, tensor.IndexAdd(s, dst, src, index, weights))
				// The numbers are multiples of 1/64 below 2^12, so float64 and float32 have their sums exactly.
				width := len(sums) / rows
				want := make([]float64, len(sums))
				for i := range sums {
					want[i] = sums[i].Float64()
				}
				for i, row := range at {
					for c := range width {
						want[row*width+c] += w[i].Float64() * from[i*width+c].Float64()
					}
				}
				for i, got := range elementsOf(t, s, dst) {
					require.Equal(t, dtype.Of(d).Round(dtype.FloatValue(want[i])), got.Float64(), "%s: element %d of %v, index %v, weights %v", d, i, dst, at, weights)
				}
			}
		}
	})
}

// A sum that is rounded after each row would differ: in float16, 2048 + 1 is 2048.
func TestIndexAddRoundsOnce(t *testing.T) {
	eachType(t, []memory.DType{memory.Float16}, func(t *testing.T, s *stream.Stream, _ *rand.Rand, _ memory.DType) {
		half := memory.Float16Of
		dst, src := fromSlice(t, s, []memory.Float16Bits{half(2048)}, 1, 1), fromSlice(t, s, []memory.Float16Bits{half(1), half(1), half(1)}, 3, 1)
		require.NoError(t, tensor.IndexAdd(s, dst, src, fromSlice(t, s, []int32{0, 0, 0}, 3), tensor.Tensor{}))
		require.Equal(t, 2052.0, elementsOf(t, s, dst)[0].Float64(), "2051 rounded to even")
		// Rows without an entry keep their bits, also those of a NaN.
		nan := fromSlice(t, s, []float32{math.Float32frombits(0x7fc12345), 1}, 2, 1)
		require.NoError(t, tensor.IndexAdd(s, nan, fromSlice(t, s, []float32{2}, 1, 1), fromSlice(t, s, []int64{1}, 1), tensor.Tensor{}))
		got := make([]float32, 2)
		x, err := tensor.Slice[float32](nan)
		require.NoError(t, err)
		require.NoError(t, x.CopyTo(s, got))
		require.Equal(t, []uint32{0x7fc12345, math.Float32bits(3)}, []uint32{math.Float32bits(got[0]), math.Float32bits(got[1])})
	})
}

func fromSlice[T memory.Element](t *testing.T, s *stream.Stream, x []T, shape ...int) tensor.Tensor {
	m, err := memory.MakeFrom(s, x)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	v, err := tensor.Of(m, shape...)
	require.NoError(t, err)
	return v
}

func TestTopK(t *testing.T) {
	eachType(t, sumTypes, func(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType) {
		for _, n := range []int{1, 7, 64, 700, 9000} {
			rows, k := 1+r.IntN(5), 1+r.IntN(min(n, 9))
			if n == 7 {
				k = n
			}
			src, from := drawn(t, s, r, d, rows, 1, n)
			values, _ := drawn(t, s, r, d, rows, 1, k)
			indexes, _ := drawn(t, s, r, []memory.DType{memory.Int32, memory.Int64}[r.IntN(2)], rows, 1, k)
			require.NoError(t, tensor.TopK(s, values, indexes, src))
			got, places := elementsOf(t, s, values), elementsOf(t, s, indexes)
			for row := range rows {
				all := from[row*n : (row+1)*n]
				taken := make([]bool, n)
				for j := range k {
					best := -1 // many elements are equal: the first one is wanted
					for i := range all {
						if !taken[i] && (best < 0 || all[i].Float64() > all[best].Float64()) {
							best = i
						}
					}
					taken[best] = true
					require.Equal(t, int64(best), places[row*k+j].Int64(), "%s: %d of %d, row %d", d, j, k, row)
					require.Equal(t, all[best], got[row*k+j])
				}
			}
		}
	})
}

// The order of special floats is torch's, and whole numbers that a float64 cannot tell apart are ordered.
func TestTopKOfSpecialNumbers(t *testing.T) {
	eachType(t, sumTypes[:4], func(t *testing.T, s *stream.Stream, _ *rand.Rand, d memory.DType) {
		inf, nan, zero := math.Inf(1), math.NaN(), math.Copysign(0, -1)
		x, err := tensor.Make(s, d, 8)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, x, fromSlice(t, s, []float64{-inf, zero, 0, nan, -1, inf, 2, -nan}, 8)))
		order, places := fromSlice(t, s, make([]float64, 8), 8), fromSlice(t, s, make([]int32, 8), 8)
		values, err := tensor.MakeLike(s, x, d)
		require.NoError(t, err)
		require.NoError(t, tensor.TopK(s, values, places, x))
		require.NoError(t, tensor.Copy(s, order, values))
		var list []int64
		for _, at := range elementsOf(t, s, places) {
			list = append(list, at.Int64())
		}
		require.Equal(t, []int64{3, 7, 5, 6, 1, 2, 4, 0}, list, "%s: %v", d, elementsOf(t, s, order))
		require.NoError(t, x.Close())
		require.NoError(t, values.Close())
		big, places := fromSlice(t, s, []int64{math.MaxInt64 - 1, math.MinInt64, math.MaxInt64, -1}, 4), fromSlice(t, s, make([]int64, 4), 4)
		require.NoError(t, tensor.TopK(s, fromSlice(t, s, make([]int64, 4), 4), places, big))
		require.Equal(t, []dtype.Value{dtype.IntValue(2), dtype.IntValue(0), dtype.IntValue(3), dtype.IntValue(1)}, elementsOf(t, s, places))
	})
}

func TestRowsRefuse(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, far := newStream(t, devs[0]), newStream(t, devs[1])
	x, y, index := fromSlice(t, s, make([]float32, 12), 4, 3), fromSlice(t, s, make([]float32, 6), 2, 3), fromSlice(t, s, []int32{0, 3}, 2)
	host, err := tensor.OfHost(make([]float32, 6), 2, 3)
	require.NoError(t, err)
	none := tensor.Tensor{}
	floats, bools := fromSlice(t, s, make([]float32, 2), 2), fromSlice(t, s, make([]bool, 6), 2, 3)
	bools4 := fromSlice(t, s, make([]bool, 12), 4, 3)
	two, err := x.Narrow(0, 1, 2)
	require.NoError(t, err)
	wide, err := fromSlice(t, s, make([]float32, 3), 1, 3).Expand(2, 3)
	require.NoError(t, err)
	deep := fromSlice(t, s, make([]float32, 48), 48)
	scalar := fromSlice(t, s, []float32{1})
	parts := func(from, rows int) tensor.Tensor { // of five dimensions, which overlap only in the two inner ones
		part, err := deep.Narrow(0, from, rows*16)
		require.NoError(t, err)
		part, err = part.View(rows, 2, 2, 2, 2)
		require.NoError(t, err)
		return part
	}
	exported, err := tensor.Make(s, memory.Float32, 4, 3)
	require.NoError(t, err)
	pack, err := exported.ToDLPack(s, false)
	require.NoError(t, err)
	again, err := tensor.FromDLPack(s, pack) // another buffer with the same memory
	require.NoError(t, err)
	rest, err := again.Narrow(0, 1, 2)
	require.NoError(t, err)
	for name, row := range map[string]struct {
		err  error
		want string
	}{
		"no stream":           {tensor.IndexSelect(nil, y, x, index), "stream"},
		"no tensor":           {tensor.IndexSelect(s, none, x, index), "no tensor given"},
		"another device":      {tensor.IndexSelect(far, y, x, index), "the tensor is on virtual:0"},
		"host memory":         {tensor.IndexSelect(s, host, x, index), "the tensor is on the host"},
		"no rows":             {tensor.IndexSelect(s, scalar, x, index), "want at least one dimension"},
		"types":               {tensor.IndexSelect(s, bools, x, index), "want the same type"},
		"shapes of rows":      {tensor.IndexSelect(s, floats, x, index), "want rows of the same shape"},
		"type of the index":   {tensor.IndexSelect(s, y, x, floats), "want int32 or int64"},
		"length of the index": {tensor.IndexSelect(s, y, x, fromSlice(t, s, []int32{1}, 1)), "an entry for each row"},
		"shared memory":       {tensor.IndexSelect(s, two, x, index), "shares memory with the source"},
		"shared inner rows":   {tensor.IndexSelect(s, parts(30, 1), parts(0, 2), fromSlice(t, s, []int32{0}, 1)), "shares memory with the source"},
		"shared buffers":      {tensor.IndexSelect(s, rest, exported, index), "shares memory with the source"},
		"repeated elements":   {tensor.IndexSelect(s, wide, x, index), "have one place"},
		"no sums":             {tensor.IndexAdd(s, bools4, bools, index, none), "elements of bool are not supported"},
		"sums shape":          {tensor.IndexAdd(s, x, y, fromSlice(t, s, []int64{1}, 1), none), "an entry for each row"},
		"weights":             {tensor.IndexAdd(s, x, y, index, index), "weights of int32"},
		"shape of weights":    {tensor.IndexAdd(s, x, y, index, y), "weights of shape [2 3]"},
		"whole weights":       {tensor.IndexAdd(s, fromSlice(t, s, make([]int32, 2), 2), fromSlice(t, s, make([]int32, 2), 2), index, floats), "want none"},
		"k":                   {tensor.TopK(s, x, fromSlice(t, s, make([]int32, 12), 4, 3), fromSlice(t, s, make([]float32, 8), 4, 2)), "at most as many"},
		"top of bools":        {tensor.TopK(s, bools, bools, bools), "elements of bool are not supported"},
		"type of indexes":     {tensor.TopK(s, y, y, y), "indexes of float32"},
		"rows of top":         {tensor.TopK(s, y, fromSlice(t, s, make([]int32, 6), 2, 3), x), "the same dimensions but the last one"},
	} {
		require.ErrorContains(t, row.err, row.want, name)
	}
	require.NoError(t, tensor.IndexSelect(s, parts(32, 1), parts(0, 2), fromSlice(t, s, []int32{0}, 1)))
	require.NoError(t, again.Close())
	require.NoError(t, exported.Close())
	require.NoError(t, s.Sync(t.Context()))
}

// An entry that names no row stops the kernel, as an assertion of torch does.
func TestNoSuchRow(t *testing.T) {
	for _, entry := range []int32{-1, 4} {
		for i := range 2 {
			sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
			require.NoError(t, err)
			s := newStream(t, sys.Devices()[0])
			x, y, index := fromSlice(t, s, make([]float32, 12), 4, 3), fromSlice(t, s, make([]float32, 6), 2, 3), fromSlice(t, s, []int32{0, entry}, 2)
			if i == 0 {
				require.NoError(t, tensor.IndexSelect(s, y, x, index))
			} else {
				require.NoError(t, tensor.IndexAdd(s, x, y, index, tensor.Tensor{}))
			}
			require.ErrorContains(t, s.Sync(t.Context()), fmt.Sprintf("entry 1 of the index names row %d: want 0 to 3", entry))
		}
	}
}

// The kernels, compiled as C++, and the functions that stand in for them give the same bytes.
func TestRowsAgreeWithSource(t *testing.T) {
	run := sourceOnTheHost(t)
	short := map[memory.DType]string{memory.Float16: "f16", memory.BFloat16: "bf16", memory.Float32: "f32", memory.Float64: "f64", memory.Int32: "i32", memory.Int64: "i64"}
	s, r := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]), seeded(t)
	raw := func(x tensor.Tensor) []byte {
		host, err := tensor.MakeHost(x.DType(), x.Shape()...)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, host, x))
		return bytesOf(t, host)
	}
	device := func(d memory.DType, b []byte, shape ...int) tensor.Tensor {
		x, err := fromSlice(t, s, b, len(b)).ViewDType(d)
		require.NoError(t, err)
		x, err = x.View(shape...)
		require.NoError(t, err)
		return x
	}
	for d, name := range short {
		rows, n, width := 1+r.IntN(5), 2+r.IntN(15), []int{2, 7, 40}[r.IntN(3)]
		wide := uint32(r.IntN(2))
		i := []memory.DType{memory.Int32, memory.Int64}[wide]
		src, dst, index := make([]byte, n*width*d.Size()), make([]byte, rows*width*d.Size()), make([]byte, n*i.Size())
		for _, b := range [][]byte{src, dst} { // all bits, so that there are NaN, infinities and subnormal numbers
			for k := range b {
				b[k] = byte(r.Uint32())
			}
		}
		for k := range n {
			dtype.Of(i).Store(index, k, dtype.IntValue(int64(r.IntN(rows))))
		}
		var weights []byte
		w, of := tensor.Tensor{}, memory.DType(0)
		if r.IntN(3) > 0 && dtype.Of(d).IsFloat() {
			of = []memory.DType{memory.Float32, d}[r.IntN(2)]
			weights = make([]byte, n*of.Size())
			for k := range n {
				dtype.Of(of).Store(weights, k, dtype.FloatValue(r.NormFloat64()))
			}
			w = device(of, weights, n)
		}
		from, to, at := device(d, src, n, width), device(d, dst, rows, width), device(i, index, n)
		require.NoError(t, tensor.IndexAdd(s, to, from, at, w))
		first, last, next := make([]byte, 4*rows), make([]byte, 4*rows), make([]byte, 4*n)
		g := tensor.GridOf(n)
		run("none", tensor.GridOf(rows), first, uint64(rows))
		run("none", tensor.GridOf(rows), last, uint64(rows))
		run("ends", g, first, last, index, uint64(n), uint64(rows), wide)
		run("chain", g, next, last, index, uint64(n), uint64(rows), wide)
		run("add_"+name, tensor.GridOfRows(rows, width), dst, src, first, next, weights, uint64(rows), uint64(width), uint32(of))
		requireNumbers(t, d, dst, raw(to), "sums")

		row := len(dst) / rows
		part := []int{1, min(16, row&-row)}[r.IntN(2)]
		out := make([]byte, n*row)
		run(fmt.Sprint("select", part), tensor.GridOfRows(n, row/part), out, dst, index, uint64(n), uint64(row/part), uint64(rows), wide)
		back := device(d, make([]byte, len(out)), n, width)
		require.NoError(t, tensor.IndexSelect(s, back, device(d, dst, rows, width), at))
		require.Equal(t, raw(back), out, "parts of %d bytes", part)

		k := 1 + r.IntN(width)
		values, places := make([]byte, n*k*d.Size()), make([]byte, n*k*i.Size())
		for _, x := range []float64{0, math.Copysign(0, -1)} {
			dtype.Of(d).Store(src, r.IntN(n*width), dtype.FloatValue(x))
		}
		for range 3 { // some elements are equal
			copy(src[r.IntN(n*width)*d.Size():][:d.Size()], src[r.IntN(n*width)*d.Size():][:d.Size()])
		}
		top, where := device(d, values, n, k), device(i, places, n, k)
		require.NoError(t, tensor.TopK(s, top, where, device(d, src, n, width)))
		run("top", tensor.GridOfTop(n, width), values, places, src, uint64(n), uint32(width), uint32(k), uint32(d), wide)
		require.Equal(t, raw(where), places, "%s: positions of %d of %d", d, k, width)
		require.Equal(t, raw(top), values)
	}
}

// sourceOnTheHost returns a function that runs a kernel of rows.cu on the host.
func sourceOnTheHost(t *testing.T) func(name string, g kernel.Grid, args ...any) {
	var names []string
	for _, d := range tensor.RowSource().Kernels {
		names = append(names, d.Name)
	}
	h := testgpu.CompileForHost(t, tensor.RowSource().CUDA, nil, names...)
	return func(name string, g kernel.Grid, args ...any) {
		h.Run(name, int(g.Blocks[0]), int(g.Threads[0]), args...)
	}
}

// requireNumbers compares bits, but those of NaN.
func requireNumbers(t *testing.T, d memory.DType, want, got []byte, what string) {
	for i := range len(want) / d.Size() {
		if x, y := dtype.Of(d).Load(want, i), dtype.Of(d).Load(got, i); x.Float64() == x.Float64() || y.Float64() == y.Float64() {
			require.Equal(t, want[i*d.Size():(i+1)*d.Size()], got[i*d.Size():(i+1)*d.Size()], "%s of %s: element %d: %v and %v", what, d, i, x, y)
		}
	}
}

// A sum of which one kernel cannot be launched changes nothing: the kernels after it would read what it has not written.
func TestIndexAddWithoutAKernel(t *testing.T) {
	for n := 1; n <= 4; n++ {
		dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fmt.Sprintf("cuLaunchKernel#%d=CUDA_ERROR_OUT_OF_MEMORY", n)})[0]
		s := newStream(t, dev)
		dst, src := fromSlice(t, s, []float32{1, 2, 3}, 3, 1), fromSlice(t, s, []float32{10, 20}, 2, 1)
		err := tensor.IndexAdd(s, dst, src, fromSlice(t, s, []int32{2, 2}, 2), tensor.Tensor{})
		require.ErrorContains(t, err, "CUDA_ERROR_OUT_OF_MEMORY")
		require.Equal(t, 1, strings.Count(err.Error(), "tensor: index add"), err)
		require.NoError(t, s.Sync(t.Context()))
		got := elementsOf(t, s, dst)
		require.Equal(t, []float64{1, 2, 3}, []float64{got[0].Float64(), got[1].Float64(), got[2].Float64()}, "kernel %d", n)
	}
}
