package rng_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// What torch refuses is refused, before the generator moves.
func TestInvalidParameters(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, g := newStream(t, devs[0]), rng.New(devs[0], 1)
	x, err := memory.Make[float32](s, 8)
	require.NoError(t, err)
	h, err := memory.Make[memory.Float16Bits](s, 8)
	require.NoError(t, err)
	b, err := memory.Make[int8](s, 8)
	require.NoError(t, err)
	u, err := memory.Make[uint64](s, 8)
	require.NoError(t, err)
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		err  error
		want string
	}{
		{rng.Uniform(g, s, x, 2, 1), "rng: uniform: from = 2, to = 1: want from <= to"},
		{rng.Uniform(g, s, x, nan, 1), "from = NaN is out of bounds for float32"},
		{rng.Uniform(g, s, x, 0, inf), "to = +Inf is out of bounds for float32"},
		{rng.Uniform(g, s, x, -3e38, 3e38), "float32 cannot hold the difference"},
		{rng.Uniform(g, s, h, 0, 70000), "to = 70000 is out of bounds for float16"},
		{rng.Normal(g, s, x, 0, -1), "rng: normal: std = -1: want >= 0"},
		{rng.Normal(g, s, x, 0, nan), "std = NaN"},
		{rng.LogNormal(g, s, x, 0, 0), "rng: log-normal: std = 0: want > 0"},
		{rng.Exponential(g, s, x, 0), "rng: exponential: lambda = 0: want > 0"},
		{rng.Exponential(g, s, x, -1), "lambda = -1: want > 0"},
		{rng.Bernoulli(g, s, x, -0.1), "rng: bernoulli: p = -0.1: want 0 <= p <= 1"},
		{rng.Bernoulli(g, s, x, 1.5), "p = 1.5: want 0 <= p <= 1"},
		{rng.Bernoulli(g, s, x, nan), "p = NaN"},
		{rng.Geometric(g, s, x, 0), "rng: geometric: p = 0: want 0 < p < 1"},
		{rng.Geometric(g, s, x, 1), "p = 1: want 0 < p < 1"},
		{rng.RandomFromTo(g, s, b, 5, 5), "rng: random: from = 5, to = 5: want from < to"},
		{rng.RandomFromTo(g, s, b, 5, 4), "want from < to"},
		{rng.RandomFromTo(g, s, b, -129, 4), "from = -129 is out of bounds for int8"},
		{rng.RandomFromTo(g, s, b, 0, 129), "to - 1 = 128 is out of bounds for int8"},
		{rng.RandomFromTo(g, s, u, -1, 4), "from = -1 is out of bounds for uint64"},
		{rng.RandomFromTo(g, s, h, 0, 65506), "to - 1 = 65505 is out of bounds for float16"},
		{rng.Uniform(g, nil, x, 0, 1), "rng: uniform: no stream given"},
		{rng.Uniform(rng.New(devs[1], 1), s, x, 0, 1), "the generator belongs to virtual:1, the stream to virtual:0"},
		{rng.Uniform(rng.Default(nil), s, x, 0, 1), "the generator belongs to no device"},
		{rng.Uniform(nil, newStream(t, devs[1]), x, 0, 1), "the buffer is of virtual:0, the operation runs on virtual:1"},
	} {
		require.ErrorContains(t, c.err, c.want)
	}
	for _, y := range []interface{ Close() error }{x, h, b, u} {
		require.NoError(t, y.Close())
	}
	require.ErrorIs(t, rng.Normal(g, s, x, 0, 1), device.ErrClosed)
	require.Zero(t, g.Offset())
}

// The edges that torch takes.
func TestEdges(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, g := newStream(t, devs[0]), rng.New(devs[0], 1)
		for _, v := range fetch(t, s, 1000, func(x memory.Slice[float32]) error { return rng.Uniform(g, s, x, 3, 3) }) {
			require.Equal(t, float32(3), v)
		}
		for _, v := range fetch(t, s, 1000, func(x memory.Slice[float64]) error { return rng.Normal(g, s, x, -2, 0) }) {
			require.Equal(t, -2.0, v)
		}
		// A draw of 1 gives false, but there is none among these.
		for _, v := range fetch(t, s, 1000, func(x memory.Slice[bool]) error { return rng.Bernoulli(g, s, x, 1) }) {
			require.True(t, v)
		}
		for _, v := range fetch(t, s, 1000, func(x memory.Slice[int64]) error { return rng.Bernoulli(g, s, x, 0) }) {
			require.Zero(t, v)
		}
		for _, v := range fetch(t, s, 1000, func(x memory.Slice[int8]) error { return rng.RandomFromTo(g, s, x, -128, -127) }) {
			require.Equal(t, int8(-128), v)
		}
		for _, v := range fetch(t, s, 1000, func(x memory.Slice[memory.Float16Bits]) error { return rng.Exponential(g, s, x, 1) }) {
			require.Less(t, v, memory.Float16Bits(0x7c00), "finite and not negative")
		}
		require.EqualValues(t, 6*4, g.Offset())
	})
}

// Parameters are rounded before anything is computed with them.
func TestExponentialRoundsLambda(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		for i := range 50 {
			lambda := 0.1 + 0.03*float64(i)
			draw := func(lambda float64) []float32 {
				g := rng.New(devs[0], 1)
				return fetch(t, s, 10, func(x memory.Slice[float32]) error { return rng.Exponential(g, s, x, lambda) })
			}
			require.Equal(t, draw(float64(float32(lambda))), draw(lambda), "%g", lambda)
		}
	})
}

// From 2^28 numbers on torch draws 64 bits for each.
func TestWideRange(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualMultiprocessors: 1})[0]
	for width, offset := range map[int64]uint64{1<<28 - 1: 4, 1 << 28: 8} {
		s, g := newStream(t, dev), rng.New(dev, 1)
		fetch(t, s, 2048*4, func(x memory.Slice[int32]) error { return rng.RandomFromTo(g, s, x, -5, width-5) })
		require.Equal(t, offset, g.Offset(), "%d", width)
	}
}

// The first draw of one seed is 1 and that of another the value below. They are
// rare, and the distributions have rules for them.
func TestRareDraws(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		one, below := uint64(16390493), uint64(27283984)
		for _, c := range []struct {
			seed uint64
			fill func(g *rng.Generator, x memory.Slice[float32]) error
			want float32
		}{
			{one, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Uniform(g, s, x, 0, 1) }, 0},
			{below, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Uniform(g, s, x, 0, 1) }, 1 - 0x1p-24},
			{one, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Uniform(g, s, x, -2, 3) }, -2},
			{one, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Exponential(g, s, x, 0.5) }, 0x1p-23},
			{below, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Exponential(g, s, x, 0.5) }, 0x1p-23},
			{one, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Bernoulli(g, s, x, 1) }, 0},
			{below, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Bernoulli(g, s, x, 1) }, 1},
			{one, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Normal(g, s, x, 5, 1) }, 5},
			{one, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Geometric(g, s, x, 0.5) }, 0},
		} {
			got := fetch(t, s, 1, func(x memory.Slice[float32]) error { return c.fill(rng.New(devs[0], c.seed), x) })
			require.InDelta(t, c.want, got[0], 0)
		}
	})
}

// An empty slice leaves the generator as it is, even one without memory.
func TestEmpty(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, g := newStream(t, devs[0]), rng.New(devs[0], 1)
		x, err := memory.Make[float32](s, 0)
		require.NoError(t, err)
		require.NoError(t, rng.Uniform(g, s, x, 0, 1))
		require.NoError(t, rng.Random(g, s, x))
		require.NoError(t, rng.Normal(g, s, memory.Slice[float64]{}, 0, 1))
		require.ErrorContains(t, rng.Bernoulli(g, s, x, 2), "p = 2", "parameters count all the same")
		require.NoError(t, x.Close())
		require.Zero(t, g.Offset())
	})
}

// A fill writes its slice and nothing beside it, at any alignment.
func TestParts(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		whole := fetch(t, s, 501, func(x memory.Slice[uint8]) error { return rng.Random(rng.New(devs[0], 6), s, x) })
		for _, at := range []int{0, 1, 3} {
			got := fetch(t, s, 600, func(x memory.Slice[uint8]) error {
				return rng.Random(rng.New(devs[0], 6), s, x.Slice(at, at+501))
			})
			require.Equal(t, whole, got[at:at+501])
			for i, v := range got {
				if i < at || i >= at+501 {
					require.EqualValues(t, 1, v, "element %d was written", i)
				}
			}
		}
	})
}

// What torch fills in halves, because 31 bits cannot address it, is filled so
// here: each half with its own numbers, after those that the whole takes in vain.
func TestHuge(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	p, err := devs[0].Properties()
	require.NoError(t, err)
	if p.TotalMemory < 8<<30 {
		t.Skipf("needs a GPU with 8 GiB, this has %d bytes", p.TotalMemory)
	}
	s, g := newStream(t, devs[0]), rng.New(devs[0], 21)
	const n = 1<<31 + 1000
	x, err := memory.Make[uint8](s, n)
	require.NoError(t, err)
	defer x.Close()
	require.NoError(t, rng.Random(g, s, x))
	threads := uint64(p.Multiprocessors * (p.ThreadsPerMultiproc / 256) * 256)
	skip, part := ((n-1)/(threads*4)+1)*4, ((n/2-1)/(threads*4)+1)*4
	require.Equal(t, skip+2*part, g.Offset())
	for i := range 2 {
		require.NoError(t, g.SetOffset(skip+uint64(i)*part))
		y, err := memory.Make[uint8](s, n/2)
		require.NoError(t, err)
		require.NoError(t, rng.Random(g, s, y))
		half := x.Slice(i*n/2, (i+1)*n/2)
		for _, at := range []int{0, n/4 - 5, n/2 - 1000} {
			got, want := make([]uint8, 1000), make([]uint8, 1000)
			require.NoError(t, half.Slice(at, at+1000).CopyTo(s, got))
			require.NoError(t, y.Slice(at, at+1000).CopyTo(s, want))
			require.Equal(t, want, got, "half %d at %d", i, at)
		}
		require.NoError(t, y.Close())
	}
}

// A fill costs no allocation on CUDA once its kernel is compiled.
func TestFillsAllocateNothing(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	s, g := newStream(t, devs[0]), rng.New(devs[0], 1)
	x, err := memory.Make[float32](s, 1<<20)
	require.NoError(t, err)
	defer x.Close()
	for name, fill := range map[string]func() error{
		"uniform": func() error { return rng.Uniform(g, s, x, 0, 1) },
		"normal":  func() error { return rng.Normal(nil, s, x, 0, 1) },
		"random":  func() error { return rng.RandomFromTo(g, s, x, 0, 100) },
	} {
		require.NoError(t, fill())
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if err := fill(); err != nil {
				t.Fatal(err)
			}
		}), name)
	}
	require.NoError(t, s.Sync(testgpu.Context(t)))
}

// BenchmarkFill measures fills of a GiB.
func BenchmarkFill(b *testing.B) {
	devs := testgpu.CUDA(b, 1)
	s, g := newStream(b, devs[0]), rng.New(devs[0], 1)
	x, err := memory.Make[float32](s, 1<<28)
	require.NoError(b, err)
	defer x.Close()
	for _, f := range []struct {
		name string
		fill func() error
	}{
		{"uniform", func() error { return rng.Uniform(g, s, x, 0, 1) }},
		{"normal", func() error { return rng.Normal(g, s, x, 0, 1) }},
		{"exponential", func() error { return rng.Exponential(g, s, x, 1) }},
		{"bernoulli", func() error { return rng.Bernoulli(g, s, x, 0.5) }},
		{"random_from_to", func() error { return rng.RandomFromTo(g, s, x, 0, 100) }},
	} {
		b.Run(fmt.Sprintf("%s-f32-2^28", f.name), func(b *testing.B) {
			require.NoError(b, f.fill())
			require.NoError(b, s.Sync(testgpu.Context(b)))
			b.SetBytes(int64(x.Bytes()))
			b.ResetTimer()
			for range b.N { // not b.Loop, which would leave the wait out of the time
				if err := f.fill(); err != nil {
					b.Fatal(err)
				}
			}
			require.NoError(b, s.Sync(context.Background()))
		})
	}
}

// upload copies numbers to a slice that the test closes.
func upload[T memory.Element](t testing.TB, s *stream.Stream, xs ...T) memory.Slice[T] {
	t.Helper()
	x, err := memory.MakeFrom(s, xs)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// repeated returns samples elements that repeat the given ones.
func repeated[T any](xs ...T) []T {
	all := make([]T, samples)
	for i := range all {
		all[i] = xs[i%len(xs)]
	}
	return all
}

// every returns each kth element from the first on.
func every(xs []float64, first, k int) (out []float64) {
	for i := first; i < len(xs); i += k {
		out = append(out, xs[i])
	}
	return out
}

// The draws of draws.cu have the distributions that their names say.
func TestDrawDistributions(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		t.Run("cauchy", func(t *testing.T) {
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Cauchy(g, s, x, 1, 2) })
			shape(t, xs, 1e-5, func(x float64) float64 { return 0.5 + math.Atan((x-1)/2)/math.Pi })
			xs = draw(t, s, func(g *rng.Generator, x memory.Slice[float64]) error { return rng.Cauchy(g, s, x, -3, 0.5) })
			shape(t, xs, 1e-12, func(x float64) float64 { return 0.5 + math.Atan((x+3)/0.5)/math.Pi })
		})
		t.Run("poisson", func(t *testing.T) {
			rates := []float64{0.5, 12, 63, 64, 500, 4000, 4001, 1e5}
			r := upload(t, s, repeated(rates...)...)
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[float64]) error { return rng.Poisson(g, s, x, r) })
			for i, rate := range rates {
				moments(t, every(xs, i, len(rates)), rate, rate, 3+1/rate)
			}
			one := draw(t, s, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Poisson(g, s, x, 3) })
			moments(t, one, 3, 3, 3+1./3)
		})
		t.Run("bernoulli", func(t *testing.T) {
			ps := []float32{0.25, 0.5, 0.9, 0.01, 0.75}
			p := upload(t, s, repeated(ps...)...)
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[bool]) error { return rng.Bernoulli(g, s, x, p) })
			for i, p := range ps {
				v := float64(p) * (1 - float64(p))
				moments(t, every(xs, i, len(ps)), float64(p), v, (1-3*v)/v)
			}
		})
		t.Run("normal", func(t *testing.T) {
			means, stds := []float64{0, -3, 100}, []float32{1, 0.5, 4, 2}
			mean, std := upload(t, s, repeated(means...)...), upload(t, s, repeated(stds...)...)
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Normal(g, s, x, mean, std) })
			for i := range 12 {
				sd := float64(stds[i%4])
				moments(t, every(xs, i, 12), means[i%3], sd*sd, 3)
			}
			one := upload(t, s, 0.25)
			xs = draw(t, s, func(g *rng.Generator, x memory.Slice[float32]) error { return rng.Normal(g, s, x, one, 3) })
			moments(t, xs, 0.25, 9, 3)
		})
	})
}

// The numbers of a slice that torch refuses have the documented results.
func TestNumbersOfSlices(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, g := newStream(t, devs[0]), rng.New(devs[0], 3)
		p := upload(t, s, -1, math.NaN(), 2, math.Inf(1), 1, 0)
		require.Equal(t, []float32{0, 0, 1, 1, 1, 0}, fetch(t, s, 6, func(x memory.Slice[float32]) error { return rng.Bernoulli(g, s, x, p) }))
		rates := upload(t, s, -1, math.NaN(), 0, 1e12)
		got := fetch(t, s, 4, func(x memory.Slice[float64]) error { return rng.Poisson(g, s, x, rates) })
		require.True(t, math.IsNaN(got[0]) && math.IsNaN(got[1]), "%v", got)
		require.Equal(t, []float64{0, math.MaxUint32}, got[2:])
		require.EqualValues(t, 12+20, g.Offset(), "torch's advances")
	})
}

// Parameters in device memory are validated before the generator moves.
func TestInvalidSlices(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, g := newStream(t, devs[0]), rng.New(devs[0], 1)
	x, b := upload(t, s, make([]float32, 8)...), upload(t, s, make([]int8, 200)...)
	out := upload(t, s, make([]int64, 8)...)
	three := upload(t, s, 1., 2., 3.)
	far := upload(t, newStream(t, devs[1]), 1.)
	for _, c := range []struct {
		err  error
		want string
	}{
		{rng.Poisson(g, s, x, three), "rng: poisson: rate has 3 elements: want 1, or 8 as the result"},
		{rng.Poisson(g, s, x, -1), "rate = -1: want >= 0"},
		{rng.Bernoulli(g, s, x, three), "rng: bernoulli: p has 3 elements"},
		{rng.Bernoulli(g, s, b, b), "rng: bernoulli: p is a slice of int8: want a slice of floating-point numbers"},
		{rng.Bernoulli(g, s, x, far), "the buffer is of virtual:1, the operation runs on virtual:0"},
		{rng.Normal(g, s, x, three, 1), "rng: normal: mean has 3 elements"},
		{rng.Normal(g, s, x, 0, three), "rng: normal: std has 3 elements"},
		{rng.Cauchy(g, s, x, 0, 0), "rng: cauchy: sigma = 0: want > 0"},
		{rng.Permutation(g, s, b), "rng: permutation: 200 elements: int8 does not represent all numbers below"},
		{rng.Multinomial(g, s, out, x, 3, true), "rng: multinomial: 3 categories in 8 weights"},
		{rng.Multinomial(g, s, out, x, 0, true), "0 categories"},
		{rng.Multinomial(g, s, out.Slice(0, 7), x, 4, true), "7 samples of 2 distributions"},
		{rng.Multinomial(g, s, out, x.Slice(0, 4), 4, false), "8 samples of 4 categories without replacement"},
	} {
		require.ErrorContains(t, c.err, c.want)
	}
	require.NoError(t, rng.Permutation(g, s, memory.Slice[int64]{}))
	require.Zero(t, g.Offset())
}

// A permutation has each number once, in every element type that can hold them.
func TestPermutation(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, g := newStream(t, devs[0]), rng.New(devs[0], 5)
		for _, n := range []int{1, 2, 3, 257, 30_083, 30_084, 200_003} {
			before := g.Offset()
			xs := fetch(t, s, n, func(x memory.Slice[int32]) error { return rng.Permutation(g, s, x) })
			ordered := slices.IsSorted(xs)
			slices.Sort(xs)
			for i, x := range xs {
				require.EqualValues(t, i, x)
			}
			require.False(t, ordered && n > 3, "%d elements in order", n)
			p, err := devs[0].Properties()
			require.NoError(t, err)
			threads := min((n+255)/256, p.Multiprocessors*(p.ThreadsPerMultiproc/256)) * 256
			require.EqualValues(t, ((n-1)/(2*threads)+1)*4+(n+3)/4*4, g.Offset()-before, "the advance for %d", n)
		}
		again := func() []memory.Float16Bits {
			return fetch(t, s, 2048, func(x memory.Slice[memory.Float16Bits]) error { return rng.Permutation(rng.New(devs[0], 9), s, x) })
		}
		require.Equal(t, again(), again())
		wide := fetch(t, s, 2048, func(x memory.Slice[int64]) error { return rng.Permutation(rng.New(devs[0], 9), s, x) })
		for i, v := range again() {
			require.EqualValues(t, wide[i], rng.FromHalf(v), "the permutation depends on the type")
		}
	})
}

// All permutations of few elements are equally frequent, although their keys are often equal.
func TestPermutationsAreUniform(t *testing.T) {
	testhost.Serial(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, g := newStream(t, devs[0]), rng.New(devs[0], 11)
	x := upload(t, s, make([]uint8, 3)...)
	const rounds = 3000
	count, got := map[[3]uint8]float64{}, make([]uint8, 3)
	for range rounds {
		require.NoError(t, rng.Permutation(g, s, x))
		require.NoError(t, x.CopyTo(s, got))
		count[[3]uint8(got)]++
	}
	chi := 0.0 // its mean is 5 and its variance 10
	for _, c := range count {
		chi += (c - rounds/6.) * (c - rounds/6.) / (rounds / 6.)
	}
	require.Len(t, count, 6)
	require.Less(t, chi, 5+sigmas*math.Sqrt(10))
}

// weightsOf returns rows of weights that differ between the rows.
func weightsOf(rows, columns int) []float64 {
	w := make([]float64, rows*columns)
	for i := range w {
		w[i] = float64((i*7 + i/columns) % 5) // some are 0
	}
	return w
}

// Samples with replacement, and single samples, are as frequent as the weights say.
func TestMultinomialFrequencies(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, g := newStream(t, devs[0]), rng.New(devs[0], 21)
		const rows, columns, n = 3, 11, 20_000
		w := weightsOf(rows, columns)
		weights := upload(t, s, w...)
		many := fetch(t, s, rows*n, func(x memory.Slice[int64]) error { return rng.Multinomial(g, s, x, weights, columns, true) })
		var repeatedRows []float64
		for row := range rows {
			frequent(t, many[row*n:(row+1)*n], w[row*columns:(row+1)*columns])
		}
		for range n {
			repeatedRows = append(repeatedRows, w[:columns]...)
		}
		single := upload(t, s, repeatedRows...)
		frequent(t, fetch(t, s, n, func(x memory.Slice[int64]) error { return rng.Multinomial(g, s, x, single, columns, false) }), w[:columns])
	})
}

// frequent compares the samples with the weights by a chi-squared test.
func frequent(t *testing.T, samples []int64, weights []float64) {
	t.Helper()
	count, sum := make([]float64, len(weights)), 0.0
	for _, at := range samples {
		count[at]++
	}
	for _, w := range weights {
		sum += w
	}
	chi, free := 0.0, -1.0
	for i, w := range weights {
		if w == 0 {
			require.Zero(t, count[i], "category %d has weight 0", i)
			continue
		}
		want := w / sum * float64(len(samples))
		chi += (count[i] - want) * (count[i] - want) / want
		free++
	}
	require.Less(t, chi, free+sigmas*math.Sqrt(2*free))
}

// Without replacement the samples of a row differ, and the first has the weights' frequencies.
// Rows that are not a distribution give -1.
func TestMultinomialWithoutReplacement(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, g := newStream(t, devs[0]), rng.New(devs[0], 22)
		const rows, columns, k = 4000, 6, 3
		row := []float32{1, 0, 2, 5, 0.5, 3}
		w := slices.Concat(slices.Repeat(row, rows), []float32{1, -1, 1, 1, 1, 1}, make([]float32, columns),
			[]float32{1, 1, float32(math.NaN()), 1, 1, 1}, []float32{1, 1, 1, float32(math.Inf(1)), 1, 1})
		weights := upload(t, s, w...)
		got := fetch(t, s, (rows+4)*k, func(x memory.Slice[int64]) error { return rng.Multinomial(g, s, x, weights, columns, false) })
		var first []int64
		for r := range rows {
			some := got[r*k : (r+1)*k]
			first = append(first, some[0])
			require.True(t, some[0] != some[1] && some[1] != some[2] && some[0] != some[2], "%v", some)
		}
		frequent(t, first, []float64{1, 0, 2, 5, 0.5, 3})
		for _, v := range got[rows*k:] {
			require.EqualValues(t, -1, v)
		}
		for _, v := range fetch(t, s, (rows+4)*2, func(x memory.Slice[int64]) error { return rng.Multinomial(g, s, x, weights, columns, true) })[rows*2:] {
			require.EqualValues(t, -1, v)
		}
	})
}

// Each launch of a graph draws what the same calls draw without a graph.
func TestDrawsInGraphs(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		const n = 300
		rates, w := upload(t, s, 3.5), upload(t, s, weightsOf(3, 100)...)
		x, p, k := upload(t, s, make([]float32, n)...), upload(t, s, make([]int32, n)...), upload(t, s, make([]int64, 30)...)
		calls := func(g *rng.Generator) error {
			for _, call := range []func() error{
				func() error { return rng.Poisson(g, s, x, rates) },
				func() error { return rng.Permutation(g, s, p) },
				func() error { return rng.Multinomial(g, s, k, w, 100, true) },
				func() error { return rng.Multinomial(g, s, k.Slice(0, 15), w, 100, false) },
			} {
				if err := call(); err != nil {
					return err
				}
			}
			return rng.Bernoulli(g, s, x.Slice(0, 100), rates)
		}
		read := func() ([]float32, []int32, []int64) {
			a, b, c := make([]float32, n), make([]int32, n), make([]int64, 30)
			require.NoError(t, x.CopyTo(s, a))
			require.NoError(t, p.CopyTo(s, b))
			require.NoError(t, k.CopyTo(s, c))
			return a, b, c
		}
		plain, captured := rng.New(devs[0], 5), rng.New(devs[0], 5)
		require.NoError(t, calls(plain)) // loads the kernels
		require.NoError(t, plain.SetOffset(0))
		g := capture(t, func() error { return calls(captured) }, s)
		for range 3 {
			require.NoError(t, calls(plain))
			a, b, c := read()
			require.NoError(t, g.Launch(s))
			a2, b2, c2 := read()
			require.Equal(t, a, a2)
			require.Equal(t, b, b2)
			require.Equal(t, c, c2)
			require.Equal(t, plain.State(), captured.State())
		}
	})
}
