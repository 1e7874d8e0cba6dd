package rng

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The sources use CUDA's instructions for these functions.
const (
	hostFunctions = `
struct Half;
static Half half_of(float);
static float wide(Half);
static float fast_rsqrt(float x) { return (float)(1 / sqrt((double)x)); }
static float fast_exp2(float x) { return (float)exp2((double)x); }
static float fast_log2(float x) { return (float)log2((double)x); }
static float fast_reciprocal(float x) { return 1 / x; }
`
	hostHalf = `
static Half half_of(float x) { return Half{half_bits(x)}; }
static float wide(Half h) { return half_value(h.bits); }
`
)

// onTheHost compiles a source for the host, or skips the test if there is no compiler.
func onTheHost(t *testing.T, src *kernel.Source) *testgpu.HostKernels {
	t.Helper()
	var names []string
	for _, k := range src.Kernels {
		names = append(names, k.Name)
	}
	return testgpu.CompileForHost(t, hostFunctions+src.CUDA+hostHalf, src.Options, names...)
}

// A bench runs the same launches on the host and on a virtual device.
type bench struct {
	t *testing.T
	h *testgpu.HostKernels
	s *stream.Stream
	l launcher
}

func newBench[T memory.Element](t *testing.T, kind moduleKind) *bench {
	h := onTheHost(t, sourceOf[T](kind))
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	l, err := launcherOf[T]("rng: test", s, kind)
	require.NoError(t, err)
	return &bench{t, h, s, l}
}

// run launches a kernel on both and returns the memory of its pointers, first from the host. An
// argument is a slice, which is copied, nil for a null pointer, or a number.
func (b *bench) run(name string, blocks, threads int, args ...any) (fromHost, fromGo [][]byte) {
	args = slices.Clone(args)
	var passed []kernel.Arg
	var memories []memory.Slice[uint8]
	for i, a := range args {
		raw, arg := rawOf(a)
		if raw != nil {
			x, err := memory.MakeFrom(b.s, raw)
			require.NoError(b.t, err)
			memories = append(memories, x)
			raw = bytes.Clone(raw)
			args[i], arg, fromHost = raw, kernel.Address(x.Ptr()), append(fromHost, raw)
		}
		passed = append(passed, arg)
	}
	b.h.Run(name, blocks, threads, args...)
	require.NoError(b.t, b.l.launch(name, blocks, threads, passed...))
	for _, x := range memories {
		got := make([]byte, x.Len())
		require.NoError(b.t, x.CopyTo(b.s, got))
		require.NoError(b.t, x.Close())
		fromGo = append(fromGo, got)
	}
	require.NoError(b.t, b.s.Sync(context.Background()))
	return fromHost, fromGo
}

// same requires equal results and returns them.
func (b *bench) same(name string, blocks, threads int, args ...any) [][]byte {
	b.t.Helper()
	want, got := b.run(name, blocks, threads, args...)
	for i := range want {
		require.True(b.t, bytes.Equal(want[i], got[i]), "%s: the memory of pointer %d differs between C++ and Go", name, i)
	}
	return got
}

// few requires results of which at most a share differs: approximations move some.
func (b *bench) few(share float64, size int, name string, blocks, threads int, args ...any) {
	b.t.Helper()
	want, got := b.run(name, blocks, threads, args...)
	differ, n := 0, len(want[0])/size
	for i := range n {
		if !bytes.Equal(want[0][i*size:(i+1)*size], got[0][i*size:(i+1)*size]) {
			differ++
		}
	}
	require.LessOrEqual(b.t, float64(differ), share*float64(n), "%s: %d of %d elements differ between C++ and Go", name, differ, n)
}

// rawOf returns the memory of a slice, or the argument of a number or of nil.
func rawOf(a any) ([]byte, kernel.Arg) {
	switch a := a.(type) {
	case []uint64:
		return as[uint8](a), kernel.Arg{}
	case []int64:
		return as[uint8](a), kernel.Arg{}
	case []uint32:
		return as[uint8](a), kernel.Arg{}
	case []byte:
		return a, kernel.Arg{}
	case uint64:
		return nil, kernel.Scalar(a)
	case uint32:
		return nil, kernel.Scalar(a)
	case int32:
		return nil, kernel.Scalar(a)
	case float64:
		return nil, kernel.Scalar(a)
	}
	return nil, kernel.Address(0)
}

// as returns the memory of x as elements of another type.
func as[U, T any](x []T) []U {
	var t T
	var u U
	if len(x) == 0 {
		return []U{}
	}
	return unsafe.Slice((*U)(unsafe.Pointer(&x[0])), len(x)*int(unsafe.Sizeof(t))/int(unsafe.Sizeof(u)))
}

// encoded returns the memory of numbers of type T.
func encoded[T memory.Element](xs []float64) []byte {
	of, out := caster[T](), make([]T, len(xs))
	for i, x := range xs {
		out[i] = of(x)
	}
	return as[uint8](out)
}

// sort.cu and its Go functions sort alike, and correctly: equal keys keep their order.
func TestSortSourceAgreesWithGo(t *testing.T) {
	testhost.Serial(t)
	t.Parallel()
	b := newBench[int16](t, sortModule)
	random := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ n, part, bits int }{{1, 4096, 8}, {31, 4096, 16}, {4097, 4096, 8}, {20_000, 8192, 24}} {
		n, blocks := c.n, (c.n+c.part-1)/c.part
		keys := make([]uint64, n)
		for i := range keys {
			keys[i] = random.Uint64N(1 << c.bits)
		}
		sorted := slices.Clone(keys)
		slices.Sort(sorted)
		first, values := keys, []uint32(nil)
		for shift := 0; shift < c.bits; shift += digitBits {
			s, sizes := uint32(shift), []any{uint64(n), uint64(c.part), uint32(shift)}
			out := b.same("sort_count", blocks, digits, append([]any{keys, make([]uint32, digits*blocks)}, sizes...)...)
			out = b.same("sort_scan", digits, digits, as[uint32](out[1]), make([]uint32, digits), uint32(blocks))
			counts, totals := as[uint32](out[0]), as[uint32](out[1])
			var given any
			if values != nil {
				given = values
			}
			out = b.same("sort_scatter", blocks, digits, keys, given, make([]uint64, n), make([]uint32, n), counts, totals, uint64(n), uint64(c.part), s)
			if given == nil {
				out = slices.Insert(out, 1, nil)
			}
			keys, values = as[uint64](out[2]), as[uint32](out[3])
		}
		require.Equal(t, sorted, keys)
		for i, v := range values {
			require.Equal(t, keys[i], first[v])
			require.False(t, i > 0 && keys[i] == keys[i-1] && values[i-1] > v, "equal keys have lost their order")
		}
		b.same("permutation_ties", 2, block, keys, values, uint64(n), uint64(7), uint64(1<<34), nil)
		b.same("permutation_ties", 2, block, keys, values, uint64(n), uint64(0), uint64(4), []uint64{7, 8})
		b.same("permutation_keys", 2, block, first, nil, uint64(n), uint64(1<<40-1))
		b.same("permutation_keys", 2, block, first, make([]uint32, n), uint64(n), uint64(1<<32-1))
		b.same("permutation_store", 2, block, make([]byte, 2*n), values, uint64(n))
	}
}

// samples.cu and its Go functions have the same bits, because every sum is rounded alike.
func TestSamplesSourceAgreesWithGo(t *testing.T) {
	testhost.Serial(t)
	t.Run("float32", func(t *testing.T) { samplesAgree[float32](t) })
	t.Run("float16", func(t *testing.T) { samplesAgree[memory.Float16Bits](t) })
	t.Run("float64", func(t *testing.T) { samplesAgree[float64](t) })
}

func samplesAgree[T Float](t *testing.T) {
	t.Parallel()
	b := newBench[T](t, samplesModule)
	random := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct{ rows, columns, samples int }{{1, 1, 1}, {3, 7, 5}, {2, 1500, 40}, {5, 33, 33}} {
		n, rows, columns, samples := c.rows*c.columns, uint64(c.rows), uint64(c.columns), uint64(c.samples)
		weights, waits := make([]float64, n), make([]float64, n)
		for i := range weights {
			weights[i], waits[i] = float64(random.IntN(5))*random.Float64(), random.ExpFloat64()
		}
		weights[0] = 1
		if c.rows > 2 {
			weights[c.columns] = -1
			clear(weights[2*c.columns : 3*c.columns])
		}
		w, q := encoded[T](weights), encoded[T](waits)
		out := b.same("weight_sums", c.rows, min((c.columns+31)/32*32, 1024), w, make([]byte, len(w)), make([]uint32, c.rows), rows, columns)
		parts, bad := out[1], as[uint32](out[2])
		require.Equal(t, c.rows > 2, slices.Contains(bad, 1))
		sums := b.same("weight_scan", c.rows, scanThreads(c.rows, c.columns), parts, make([]byte, len(w)), rows, columns)[1]
		picked := b.same("sample_rows", 1, block, make([]int64, c.rows*c.samples), sums, parts, bad, rows, columns, samples, uint64(128), uint64(5), uint64(8), nil)
		for i, at := range as[int64](picked[0]) {
			require.Equal(t, bad[i/c.samples] != 0, at < 0)
			require.True(t, at < 0 || weights[i/c.samples*c.columns+int(at)] > 0, "category %d has weight 0", at)
		}
		b.same("sample_best", c.rows, block, make([]int64, c.rows), w, q, bad, rows, columns)
		b.same("sample_keys", 2, block, make([]uint64, n), w, q, uint64(n))
		values := make([]uint32, n)
		for i := range values {
			values[i] = uint32(n - 1 - i)
		}
		b.same("sample_row_keys", 2, block, make([]uint64, n), values, uint64(n), columns)
		b.same("sample_first", 2, block, make([]int64, c.rows*c.samples), values, bad, rows, columns, samples)
	}
}

// draws.cu and its Go functions draw alike, but for some values next to a bound.
func TestDrawsSourceAgreesWithGo(t *testing.T) {
	testhost.Serial(t)
	t.Run("float32", func(t *testing.T) { drawsAgree[float32](t) })
	t.Run("bfloat16", func(t *testing.T) { drawsAgree[memory.BFloat16Bits](t) })
	t.Run("float64", func(t *testing.T) { drawsAgree[float64](t) })
}

func drawsAgree[T Float](t *testing.T) {
	t.Parallel()
	b := newBench[T](t, drawsModule)
	const n = 4001
	size := formatOf[T]().dtype.Size()
	table := func(xs ...float64) []float64 {
		all := make([]float64, n)
		for i := range all {
			all[i] = xs[i%len(xs)]
		}
		return all
	}
	out := make([]byte, n*size)
	draw := func(place any, p ...any) []any {
		return append([]any{out, uint64(n), uint64(1<<60 + 3), uint64(12), place}, p...)
	}
	chances := table(0, 0.25, 1, 0.5, 0.875, -1, 2)
	rates := table(0, 0.5, 3, 60, 64, 100, 4000, 5000, 1e12, -1)
	f64, bf16, f32 := int32(memory.Float64), int32(memory.BFloat16), int32(memory.Float32)
	b.same("bernoulli_kernel", 3, block, draw(nil, encoded[float32](chances), 0., f32, int32(1))...)
	b.same("bernoulli_kernel", 3, block, draw([]uint64{9, 4}, encoded[float64](chances), 0., f64, int32(1))...)
	b.same("bernoulli_kernel", 3, block, draw(nil, nil, 0.375, int32(0), int32(0))...)
	b.few(0.01, size, "poisson_kernel", 3, block, draw(nil, encoded[memory.BFloat16Bits](rates), 0., bf16, int32(1))...)
	b.few(0.01, size, "poisson_kernel", 3, block, draw([]uint64{9, 4}, nil, 17.5, int32(0), int32(0))...)
	z := encoded[T](table(0.5, -1.25, 3, 0.015625, 1e-3))
	mean, std := encoded[float64](table(1, -2.1, 100)), encoded[float32](table(0.1, 1, 7, 0))
	b.same("normal_kernel", 3, block, z, uint64(n), mean, 0., f64, int32(1), std, 0., f32, int32(1))
	b.same("normal_kernel", 3, block, z, uint64(n), nil, 0.25, int32(0), int32(0), std, 0., f32, int32(0))
	b.same("normal_kernel", 3, block, z, uint64(n), std, 0., f32, int32(1), nil, 2., int32(0), int32(0))
	half := func(v uint64) []any { return []any{int32(uint32(v)), int32(uint32(v >> 32))} }
	args := slices.Concat([]any{out, int32(n)}, half(77), half(8), half(number(-2)), half(number(0.5)), half(0), []any{nil})
	b.few(0.2, size, "cauchy_kernel", 3, block, args...)
}
