package rng_test

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
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
