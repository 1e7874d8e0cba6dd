package kernel_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func elementwise(t *testing.T, code string, cfg *kernel.ElementwiseConfig) *kernel.Elementwise {
	t.Helper()
	e, err := kernel.NewElementwise(code, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func newStream(t *testing.T, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func put[T memory.Element](t *testing.T, s *stream.Stream, v ...T) memory.Slice[T] {
	t.Helper()
	x, err := memory.MakeFrom(s, v)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

func get[T memory.Element](t *testing.T, s *stream.Stream, x memory.Slice[T]) []T {
	t.Helper()
	v := make([]T, x.Len())
	require.NoError(t, x.CopyTo(s, v))
	return v
}

const axpyCode = `template <typename T> T axpy(T x, T y, T a) { return a * x + y; }`

func axpyConfig() *kernel.ElementwiseConfig {
	return &kernel.ElementwiseConfig{
		Defaults: []kernel.Operand{kernel.Set("a", 2)},
		Floats:   func(in, out []float64) { out[0] = in[2]*in[0] + in[1] },
		Ints:     func(in, out []int64) { out[0] = in[2]*in[0] + in[1] },
	}
}

// Every element is computed, whatever the length leaves over for the last block.
func TestElementwiseLengths(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, axpyCode, axpyConfig())
		for _, n := range []int{0, 1, 2, 255, 256, 257, 1023, 1024, 1025, 2048, 10_007} {
			a, b := make([]float32, n), make([]float32, n)
			for i := range a {
				a[i], b[i] = float32(i%1000), float32(i%7)
			}
			x, y, z := put(t, s, a...), put(t, s, b...), put(t, s, make([]float32, n+1)...)
			require.NoError(t, e.Launch(s, kernel.Out(z.Slice(0, n)), kernel.In(x), kernel.In(y)))
			got := get(t, s, z)
			for i := range n {
				require.Equal(t, 2*a[i]+b[i], got[i], "element %d of %d", i, n)
			}
			require.Zero(t, got[n], "what is behind the output stays")
		}
	})
}

// A column is a slice of some type with the numbers 0, 1, 2, 3 of that type,
// which all types have, and how to read it again.
type column struct {
	dtype   memory.DType
	in, out kernel.Operand
	read    func() []float64
}

func columns(t *testing.T, s *stream.Stream) []column {
	t.Helper()
	return []column{
		columnOf(t, s, func(v float64) bool { return v != 0 }, func(v bool) float64 {
			if v {
				return 1
			}
			return 0
		}),
		numbers[int8](t, s), numbers[uint8](t, s), numbers[int16](t, s), numbers[uint16](t, s), numbers[int32](t, s),
		numbers[uint32](t, s), numbers[int64](t, s), numbers[uint64](t, s), numbers[float32](t, s), numbers[float64](t, s),
		columnOf(t, s, func(v float64) memory.Float16Bits { return memory.Float16Of(float32(v)) },
			func(v memory.Float16Bits) float64 { return float64(v.Float32()) }),
		columnOf(t, s, func(v float64) memory.BFloat16Bits { return memory.BFloat16Of(float32(v)) },
			func(v memory.BFloat16Bits) float64 { return float64(v.Float32()) }),
	}
}

func numbers[T int8 | uint8 | int16 | uint16 | int32 | uint32 | int64 | uint64 | float32 | float64](t *testing.T, s *stream.Stream) column {
	t.Helper()
	return columnOf(t, s, func(v float64) T { return T(v) }, func(v T) float64 { return float64(v) })
}

func columnOf[T memory.Element](t *testing.T, s *stream.Stream, of func(float64) T, value func(T) float64) column {
	t.Helper()
	x := put(t, s, of(0), of(1), of(2), of(3))
	y := put(t, s, of(1), of(1), of(0), of(0))
	return column{dtype: x.DType(), in: kernel.In(x), out: kernel.Out(y), read: func() []float64 {
		var v []float64
		for _, e := range get(t, s, y) {
			v = append(v, value(e))
		}
		return v
	}}
}

// Whatever types go in and come out, small whole numbers are exact, and only a
// sum of bools is a bool.
func TestElementwiseTypes(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, axpyCode, axpyConfig())
		cols := columns(t, s)
		launched := 0
		thin := 1
		if devs[0].System().Backend() == "cuda" {
			thin = 3 // each trio is a compilation
		}
		for i, a := range cols {
			for j, b := range cols {
				for k, c := range cols {
					if c.dtype != memory.Float64 && b.dtype != memory.Int16 || (i+j+k)%thin != 0 {
						continue
					}
					err := e.Launch(s, c.out, a.in, b.in)
					if err != nil {
						require.Regexp(t, `torch has no type for the numbers|cannot be cast to`, err.Error())
						continue
					}
					launched++
					want := []float64{0, 3, 6, 9}
					switch {
					case a.dtype == memory.Bool && b.dtype == memory.Bool:
						want = []float64{0, 1, 1, 1}
					case a.dtype == memory.Bool:
						want = []float64{0, 3, 4, 5}
					case b.dtype == memory.Bool:
						want = []float64{0, 3, 5, 7}
					}
					require.Equal(t, want, c.read(), "%s and %s to %s", a.dtype, b.dtype, c.dtype)
				}
			}
		}
		require.Greater(t, launched, 150/thin)
	})
}

// The 16-bit floats are computed in float and rounded once.
func TestElementwiseRounding(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, axpyCode, axpyConfig())
		var hx, hy []memory.Float16Bits
		var bx, by []memory.BFloat16Bits
		for i := range 2000 {
			x, y := float32(math.Sin(float64(i))*100), float32(math.Exp(float64(i%9-4)))
			hx, hy = append(hx, memory.Float16Of(x)), append(hy, memory.Float16Of(y))
			bx, by = append(bx, memory.BFloat16Of(x)), append(by, memory.BFloat16Of(y))
		}
		const a = 0.75 // a product with it is exact in float
		x, y, z := put(t, s, hx...), put(t, s, hy...), put(t, s, make([]memory.Float16Bits, len(hx))...)
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(x), kernel.In(y), kernel.Set("a", a)))
		for i, v := range get(t, s, z) {
			require.Equal(t, memory.Float16Of(a*hx[i].Float32()+hy[i].Float32()), v, "element %d", i)
		}
		p, q, r := put(t, s, bx...), put(t, s, by...), put(t, s, make([]memory.BFloat16Bits, len(bx))...)
		require.NoError(t, e.Launch(s, kernel.Out(r), kernel.In(p), kernel.In(q), kernel.Set("a", a)))
		for i, v := range get(t, s, r) {
			require.Equal(t, memory.BFloat16Of(a*bx[i].Float32()+by[i].Float32()), v, "element %d", i)
		}
	})
}

func TestElementwiseIntegersWrap(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, axpyCode, axpyConfig())
		a, b := []int64{math.MaxInt64, math.MinInt64, -5, 1 << 62}, []int64{7, -9, 1 << 60, 3}
		x, y, z := put(t, s, a...), put(t, s, b...), put(t, s, make([]int64, 4)...)
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(x), kernel.In(y), kernel.Set("a", 3)))
		for i, v := range get(t, s, z) {
			require.Equal(t, 3*a[i]+b[i], v)
		}
		narrow := put(t, s, int8(0), 0, 0, 0)
		require.NoError(t, e.Launch(s, kernel.Out(narrow), kernel.In(x), kernel.In(y), kernel.Set("a", 3)))
		for i, v := range get(t, s, narrow) {
			require.Equal(t, int8(3*a[i]+b[i]), v)
		}
	})
}

// The largest numbers of a uint64 are no negative ones.
func TestElementwiseUnsigned(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, axpyCode, axpyConfig())
		x, y := put(t, s, uint64(math.MaxUint64), 1<<63), put(t, s, uint64(0), 1)
		f, d, h := put(t, s, float32(0), 0), put(t, s, 0.0, 0), put(t, s, memory.Float16Bits(0), 0)
		require.NoError(t, e.Launch(s, kernel.Out(f), kernel.In(x), kernel.In(y), kernel.Set("a", 1)))
		require.Equal(t, []float32{1 << 64, 1 << 63}, get(t, s, f))
		require.NoError(t, e.Launch(s, kernel.Out(h), kernel.In(x), kernel.In(y), kernel.Set("a", 1)))
		require.Equal(t, []memory.Float16Bits{0x7c00, 0x7c00}, get(t, s, h))
		require.NoError(t, e.Launch(s, kernel.Out(d), kernel.In(x), kernel.In(d), kernel.Set("a", 1)), "in float64")
		require.Equal(t, []float64{1 << 64, 1 << 63}, get(t, s, d))
	})
}

func TestElementwiseBroadcasts(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, axpyCode, axpyConfig())
		x, one, z := put(t, s, float32(1), 2, 3), put(t, s, float32(10)), put(t, s, float32(0), 0, 0)
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(x), kernel.In(one)))
		require.Equal(t, []float32{12, 14, 16}, get(t, s, z))
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(one), kernel.In(x)))
		require.Equal(t, []float32{21, 22, 23}, get(t, s, z))
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(one), kernel.In(one)))
		require.Equal(t, []float32{30, 30, 30}, get(t, s, z))
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(x), kernel.Number(0.5), kernel.Set("a", float32(-1))))
		require.Equal(t, []float32{-0.5, -1.5, -2.5}, get(t, s, z))
		require.NoError(t, e.Launch(s, kernel.Out(x), kernel.In(x), kernel.In(x)), "in place")
		require.Equal(t, []float32{3, 6, 9}, get(t, s, x))

		// Parts of a slice that touch do not overlap.
		parts := put(t, s, float32(1), 2, 3, 4, 5, 6)
		require.NoError(t, e.Launch(s, kernel.Out(parts.Slice(2, 4)), kernel.In(parts.Slice(0, 2)), kernel.In(parts.Slice(4, 6))))
		require.Equal(t, []float32{1, 2, 7, 10, 5, 6}, get(t, s, parts))

		// Numbers decide the type only by their category.
		i, f := put(t, s, int32(1), 2, 3), put(t, s, float32(0), 0, 0)
		require.NoError(t, e.Launch(s, kernel.Out(f), kernel.In(i), kernel.Number(0.5)))
		require.Equal(t, []float32{2.5, 4.5, 6.5}, get(t, s, f))
		k := put(t, s, uint8(100), 101, 102)
		require.NoError(t, e.Launch(s, kernel.Out(f), kernel.In(k), kernel.Number(56)), "in uint8")
		require.Equal(t, []float32{0, 2, 4}, get(t, s, f))
		require.NoError(t, e.Launch(s, kernel.Out(f), kernel.In(k), kernel.Number(true)))
		require.Equal(t, []float32{201, 203, 205}, get(t, s, f))
	})
}

func TestElementwiseOutputs(t *testing.T) {
	const code = `template <typename T> T whole_of(T x) { return (T)(long long)x; }
// The parts of a number.
template <typename T> void split(T x, T& whole, T& rest, T scale) {
	whole = whole_of(x * scale);
	rest = x * scale - whole;
}`
	cfg := &kernel.ElementwiseConfig{
		Defaults: []kernel.Operand{kernel.Set("scale", 1)},
		Floats: func(in, out []float64) {
			out[0] = math.Trunc(in[0] * in[1])
			out[1] = in[0]*in[1] - out[0]
		},
	}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, code, cfg)
		x, w, r := put(t, s, float32(1.25), -2.5, 100), put(t, s, 0.0, 0, 0), put(t, s, float32(0), 0, 0)
		require.NoError(t, e.Launch(s, kernel.Out(w), kernel.Out(r), kernel.In(x)))
		require.Equal(t, []float64{1, -2, 100}, get(t, s, w))
		require.Equal(t, []float32{0.25, -0.5, 0}, get(t, s, r))
		require.NoError(t, e.Launch(s, kernel.In(x), kernel.Set("scale", 3), kernel.Out(w), kernel.Out(x)), "the rest in place")
		require.Equal(t, []float64{3, -7, 300}, get(t, s, w))
		require.Equal(t, []float32{0.75, -0.5, 0}, get(t, s, x))
	})
}

func TestElementwiseExpression(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e := elementwise(t, "x > cut ? x * y : -x // comments do no harm", &kernel.ElementwiseConfig{
			Inputs:   []string{"x", "y"},
			Defaults: []kernel.Operand{kernel.Set("cut", 0.5)},
			Floats: func(in, out []float64) {
				if out[0] = -in[0]; in[0] > in[2] {
					out[0] = in[0] * in[1]
				}
			},
		})
		x, y, z := put(t, s, 0.25, 0.75, 2), put(t, s, 10.0, 20, 30), put(t, s, 0.0, 0, 0)
		require.NoError(t, e.Launch(s, kernel.Out(z), kernel.In(x), kernel.In(y)))
		require.Equal(t, []float64{-0.25, 15, 60}, get(t, s, z))
	})
}

// A mistake is found before anything is enqueued.
func TestElementwiseRefuses(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s, other := newStream(t, devs[0]), newStream(t, devs[1])
		e := elementwise(t, axpyCode, axpyConfig())
		x, y, z := put(t, s, float32(1), 2, 3, 4), put(t, s, float32(1), 2, 3, 4), put(t, s, float32(9), 9, 9, 9)
		i, b, u, w := put(t, s, int32(1), 2, 3, 4), put(t, s, false, true, true, true), put(t, s, uint32(1), 2, 3, 4), put(t, s, uint64(1), 2, 3, 4)
		f8 := put(t, s, memory.Float8E4M3Bits(1), 2, 3, 4)
		far := put(t, other, float32(1), 2, 3, 4)
		d := put(t, s, 1.0, 2)
		in, out := kernel.In[float32], kernel.Out[float32]
		for want, ops := range map[string][]kernel.Operand{
			"1 inputs: want 2: x, y":                                                {out(z), in(x)},
			"3 inputs: want 2: x, y":                                                {out(z), in(x), in(y), kernel.Number(1)},
			"0 outputs: want 1":                                                     {in(x), in(y)},
			"2 outputs: want 1":                                                     {out(z), out(y), in(x), in(y)},
			`no parameter "b" with a default: there are ["a"]`:                      {out(z), in(x), in(y), kernel.Set("b", 1)},
			`no parameter "x" with a default`:                                       {out(z), in(x), in(y), kernel.Set("x", 1)},
			`the parameter "a" is set twice`:                                        {out(z), in(x), in(y), kernel.Set("a", 1), kernel.Set("a", 2)},
			"operand 2 has 2 elements, the output 4: want as many":                  {out(z), in(x), in(y.Slice(0, 2))},
			"operand 1 has 0 elements, the output 4: want as many":                  {out(z), in(memory.Slice[float32]{}), in(y)},
			"operand 2 is memory of":                                                {out(z), in(x), in(far)},
			"the result is of float32 and cannot be cast to the int32 of operand 0": {kernel.Out(i), in(x), in(y)},
			"the result is of int32 and cannot be cast to the bool of operand 0":    {kernel.Out(b), kernel.In(i), kernel.In(i)},
			"torch has no type for the numbers of both uint32 and uint64":           {out(z), kernel.In(u), kernel.In(w)},
			"operand 1 is of float8_e4m3fn":                                         {out(z), kernel.In(f8), in(y)},
			"operand 1 overlaps the output that is operand 0":                       {out(x.Slice(0, 3)), in(x.Slice(1, 4)), in(y.Slice(0, 3))},
			"operand 2 overlaps the output that is operand 0":                       {out(x), in(y), in(x.Slice(0, 1))},
			"overlaps the output that is operand":                                   {kernel.Out(d), in(y.Slice(0, 2)), kernel.In(halfOf(t, d))},
		} {
			err := e.Launch(s, ops...)
			require.ErrorContains(t, err, "kernel: launch axpy: ")
			require.ErrorContains(t, err, want)
		}
		require.Equal(t, []float32{9, 9, 9, 9}, get(t, s, z))
		require.Error(t, e.Launch(nil, out(z), in(x), in(y)))
		gone, err := memory.Make[float32](s, 4)
		require.NoError(t, err)
		require.NoError(t, gone.Close())
		require.ErrorIs(t, e.Launch(s, out(z), in(gone), in(y)), device.ErrClosed)
		require.NoError(t, e.Close())
		require.NoError(t, e.Close())
		require.ErrorIs(t, e.Launch(s, out(z), in(x), in(y)), device.ErrClosed)
		var none *kernel.Elementwise
		require.NoError(t, none.Close())
	})
}

// halfOf looks at the memory of some float64s as float32s.
func halfOf(t *testing.T, d memory.Slice[float64]) memory.Slice[float32] {
	t.Helper()
	x, err := memory.View[float32](d.Buffer(), 4, d.Len())
	require.NoError(t, err)
	return x
}

func TestNewElementwiseRefuses(t *testing.T) {
	set := kernel.Set[float64]
	for want, c := range map[string]struct {
		code string
		cfg  *kernel.ElementwiseConfig
	}{
		"there is no function template":                               {"x + y", nil},
		`a default for "b": axpy has the parameters x, y, a`:          {axpyCode, &kernel.ElementwiseConfig{Defaults: []kernel.Operand{set("b", 1)}}},
		`two defaults for "a"`:                                        {axpyCode, &kernel.ElementwiseConfig{Defaults: []kernel.Operand{set("a", 1), set("a", 1)}}},
		`a default for "": axpy has`:                                  {axpyCode, &kernel.ElementwiseConfig{Defaults: []kernel.Operand{kernel.Number(1)}}},
		"f has 0 inputs and 1 outputs: want 1 to 8":                   {"template <typename T> T f(T x) { return x; }", &kernel.ElementwiseConfig{Defaults: []kernel.Operand{set("x", 1)}}},
		"f has 9 inputs and 1 outputs":                                {"template <typename T> T f(T a, T b, T c, T d, T e, T f, T g, T h, T i) { return a; }", nil},
		`"x y" is not a name of an input`:                             {"x", &kernel.ElementwiseConfig{Inputs: []string{"x y"}}},
		`"x" is not a name of an input or parameter, or occurs twice`: {"x", &kernel.ElementwiseConfig{Inputs: []string{"x", "x"}}},
	} {
		_, err := kernel.NewElementwise(c.code, c.cfg)
		require.ErrorContains(t, err, "kernel: new element-wise function: ", want)
		require.ErrorContains(t, err, want)
	}
}

func TestElementwiseWithoutStandIn(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s := newStream(t, devs[0])
	e := elementwise(t, axpyCode, &kernel.ElementwiseConfig{Defaults: []kernel.Operand{kernel.Set("a", 1)}, Ints: axpyConfig().Ints})
	x, i := put(t, s, float32(1)), put(t, s, int16(1))
	err := e.Launch(s, kernel.Out(x), kernel.In(x), kernel.In(x))
	require.ErrorContains(t, err, "virtual:0 is a virtual device and there is no Go function for float32 to stand in: give ElementwiseConfig.Floats")
	require.NoError(t, e.Launch(s, kernel.Out(i), kernel.In(i), kernel.In(i)))
	require.Equal(t, []int16{2}, get(t, s, i))
}

// A mistake in the code is told with its line, and the device goes on.
func TestElementwiseDoesNotCompile(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	s := newStream(t, devs[0])
	e := elementwise(t, "template <typename T> T f(T x) {\n\treturn x +\n\t\tnothing;\n}", nil)
	x := put(t, s, float32(1))
	for range 2 {
		err := e.Launch(s, kernel.Out(x), kernel.In(x))
		var ce *kernel.CompileError
		require.ErrorAs(t, err, &ce)
		require.Equal(t, 3, ce.Line, ce.Log)
		require.Contains(t, ce.Log, "f.cu(3): error")
	}
	require.Equal(t, []float32{1}, get(t, s, x))
	require.NoError(t, elementwise(t, axpyCode, axpyConfig()).Launch(s, kernel.Out(x), kernel.In(x), kernel.In(x)))
	require.Equal(t, []float32{3}, get(t, s, x))
}

func TestElementwiseLaunchAllocatesNothing(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	s := newStream(t, devs[0])
	e := elementwise(t, axpyCode, axpyConfig())
	x := put(t, s, make([]float32, 1000)...)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := e.Launch(s, kernel.Out(x), kernel.In(x), kernel.In(x), kernel.Set("a", 0.5)); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, s.Sync(testgpu.Context(t)))
}
