package rng

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// A trial is one fill that both rng.cu, compiled for the host, and the Go
// functions carry out.
type trial struct {
	d    dist
	f    *format
	c    call
	fill func(call) []byte // in Go
}

// kernel returns the name of a kernel with the fill.
func (tr *trial) kernel() string { return templates[tr.d] + "_" + tr.f.Short }

// The fill that the macros name is that of fill_kernel, which gets the numbers in halves.
const macroDist, macroType = randomFar, memory.Int64

// run runs the fill on the host. In a graph, as with an odd seed, the seed and the offset are in memory.
func (tr *trial) run(h *testgpu.HostKernels) []byte {
	c, out := tr.c, bytes.Repeat([]byte{0xa5}, (tr.c.n+1)*tr.f.dtype.Size()) // the last one shows a write too far
	if tr.d != macroDist || tr.f.dtype != macroType {
		h.Run(tr.kernel(), c.threads/block, block, out, uint32(c.n), c.seed, c.offset, c.a, c.b, c.c)
		return out
	}
	args, place := []any{out, int32(c.n)}, any(nil)
	numbers := []uint64{c.seed, c.offset, c.a, c.b, c.c}
	if c.seed&1 != 0 {
		numbers[0], numbers[1], place = 7<<32|7, 4, []uint64{c.seed, c.offset - 4}
	}
	for _, v := range numbers {
		args = append(args, int32(uint32(v)), int32(uint32(v>>32)))
	}
	h.Run("fill_kernel", c.threads/block, block, append(args, place)...)
	return out
}

// fillsOnTheHost compiles rng.cu with a kernel for each of the trials.
func fillsOnTheHost(t *testing.T, all []*trial) *testgpu.HostKernels {
	t.Helper()
	src := &kernel.Source{Options: macros(macroDist, formatOf[int64]()), Kernels: []kernel.Def{{Name: "fill_kernel"}}}
	var code strings.Builder
	for _, tr := range all {
		if d := (kernel.Def{Name: tr.kernel()}); !slices.ContainsFunc(src.Kernels, func(k kernel.Def) bool { return k.Name == d.Name }) {
			src.Kernels = append(src.Kernels, d)
			fmt.Fprintf(&code, `static void %s(%s* out, u32 n, u64 seed, u64 offset, u64 a, u64 b, u64 c) {
	fill<%s<%[2]s>>(out, n, (u32)seed, (u32)(seed >> 32), offset, Params{{a, b, c}});
}
`, d.Name, tr.f.Short, templates[tr.d])
		}
	}
	src.CUDA = source + code.String()
	return onTheHost(t, src)
}

func newTrial[T memory.Element](d dist, a, b, c uint64) *trial {
	f := formatOf[T]()
	return &trial{d: d, f: f, c: call{a: a, b: b, c: c},
		fill: func(c call) []byte {
			var z T
			out := make([]T, c.n+1)
			raw := unsafe.Slice((*byte)(unsafe.Pointer(&out[0])), len(out)*int(unsafe.Sizeof(z)))
			for i := range raw {
				raw[i] = 0xa5
			}
			onHost[T](d, f)(c, out[:c.n])
			return raw
		},
	}
}

func floats(ts []*trial, d dist, a, b, c float64) []*trial {
	x, y, z := number(a), number(b), number(c)
	return append(ts, newTrial[memory.Float16Bits](d, x, y, z), newTrial[memory.BFloat16Bits](d, x, y, z),
		newTrial[float32](d, x, y, z), newTrial[float64](d, x, y, z))
}

func numbers(ts []*trial, d dist, a float64) []*trial {
	x := number(a)
	return append(floats(ts, d, a, 0, 0), newTrial[int8](d, x, 0, 0), newTrial[uint8](d, x, 0, 0),
		newTrial[int16](d, x, 0, 0), newTrial[int32](d, x, 0, 0), newTrial[int64](d, x, 0, 0))
}

func wholes(ts []*trial, d dist, width uint64, base int64) []*trial {
	x, y := width, uint64(base)
	return append(ts, newTrial[memory.Float16Bits](d, x, y, 0), newTrial[memory.BFloat16Bits](d, x, y, 0),
		newTrial[float32](d, x, y, 0), newTrial[float64](d, x, y, 0), newTrial[int8](d, x, y, 0),
		newTrial[uint8](d, x, y, 0), newTrial[int16](d, x, y, 0), newTrial[int32](d, x, y, 0), newTrial[int64](d, x, y, 0),
		newTrial[bool](d, x, y, 0), newTrial[uint16](d, x, y, 0), newTrial[uint32](d, x, y, 0))
}

func trials() []*trial {
	var ts []*trial
	ts = floats(ts, uniform, 0, 1, 1)
	ts = floats(ts, uniform, -2, 3, 5)
	ts = floats(ts, uniform, 1000, 1001, 1) // many of float16 and bfloat16 round to the upper bound
	ts = floats(ts, normal, 0, 1, 0)
	ts = floats(ts, normal, -3.25, 0.5, 0)
	ts = floats(ts, logNormal, 0.5, 0.25, 0)
	ts = floats(ts, exponential, -1/1.5, 0, 0)
	ts = append(numbers(ts, bernoulli, 0.3), newTrial[bool](bernoulli, number(0.3), 0, 0))
	ts = numbers(ts, geometric, 0.25)
	ts = wholes(ts, random, 0, 0)
	ts = wholes(ts, randomNear, 95, 5)
	ts = wholes(ts, randomNear, 5000, -100) // many lie in the middle between float16s or bfloat16s
	ts = wholes(ts, randomNear, 1<<27+3, -1000)
	ts = wholes(ts, randomFar, 1<<40, 0)
	ts = wholes(ts, randomFar, math.MaxUint64, math.MinInt64)
	return append(ts, newTrial[uint64](randomNear, 95, 5, 0), newTrial[uint64](randomFar, 1<<62+1, 12, 0))
}

// rng.cu, compiled as C++, and the Go functions give the same bytes where the
// result is exact, and else the same within the bounds that hold for recordings.
func TestSourceAgreesWithGo(t *testing.T) {
	testhost.Serial(t)
	t.Parallel()
	h := fillsOnTheHost(t, trials())
	random := rand.New(rand.NewPCG(1, 2))
	for _, shape := range []struct {
		n, blocks int
		seed      uint64
	}{{257, 2, 0}, {5003, 2, 0}, {1, 1, 16390493}, {1, 1, 27283984}, {1, 1, 12121362}} {
		for _, tr := range trials() {
			tr.c.n, tr.c.threads, tr.c.seed = shape.n, shape.blocks*block, shape.seed
			if shape.seed == 0 { // the others have a first draw that is 1, or next to it, or next to 0
				tr.c.seed, tr.c.offset = random.Uint64(), random.Uint64()>>random.IntN(60)&^3
			}
			compareTrial(t, tr, tr.run(h), tr.fill(tr.c))
			if t.Failed() {
				return
			}
		}
	}
}

func compareTrial(t *testing.T, tr *trial, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	size := tr.f.dtype.Size()
	exact := tr.d != normal && tr.d != logNormal && tr.d != exponential
	for i := 0; i < len(want); i += size {
		a, b := value(tr.f, got[i:]), value(tr.f, want[i:])
		bound := math.Abs(b) * math.Ldexp(1, 1-tr.f.Digits) // a unit in the last place, or two
		switch {
		case exact:
			bound = 0
		case tr.f.wide:
			bound = 1e-12 * max(1, math.Abs(b))
		case tr.d == exponential:
			bound = max(bound, math.Abs(b)*1e-5, 0x1p-25) // the smallest values are next to each other
		default:
			bound = max(bound, 1e-5*max(1, math.Abs(b)))
		}
		if !(math.Abs(a-b) <= bound) || exact && !bytes.Equal(got[i:i+size], want[i:i+size]) {
			t.Errorf("%s of %s, %+v: element %d is %v (% x) in C++ and %v (% x) in Go",
				templates[tr.d], tr.f.dtype, tr.c, i/size, a, got[i:i+size], b, want[i:i+size])
			return
		}
	}
}

// value reads a floating-point element, or 0 of another type.
func value(f *format, b []byte) float64 {
	switch f.dtype {
	case memory.Float16:
		return fromHalf(*(*memory.Float16Bits)(unsafe.Pointer(&b[0])))
	case memory.BFloat16:
		return fromBFloat(*(*memory.BFloat16Bits)(unsafe.Pointer(&b[0])))
	case memory.Float32:
		return float64(*(*float32)(unsafe.Pointer(&b[0])))
	case memory.Float64:
		return *(*float64)(unsafe.Pointer(&b[0]))
	}
	return 0
}
