package quant

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Log("seed", seed)
	return rand.New(rand.NewPCG(seed, 7))
}

// each runs fn for each type and format.
func each(t *testing.T, fn func(t *testing.T, r *rand.Rand, f *format)) {
	for i := range elements {
		for j := range codes {
			f := &format{&elements[i], &codes[j]}
			t.Run(fmt.Sprint(f.element.dtype, "/", f.code.dtype), func(t *testing.T) { fn(t, seeded(t), f) })
		}
	}
}

// drawn returns elements of which each few have another magnitude: also zeros, subnormal numbers,
// the largest ones, infinities and NaN.
func drawn(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	size, wild := 0, 0
	for i := range v {
		if i%24 == 0 {
			size, wild = r.IntN(300)-160, r.IntN(12)
		}
		v[i] = float32(math.Ldexp(2*r.Float64()-1, size))
		switch {
		case wild == 0 && r.IntN(9) == 0:
			v[i] = []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}[r.IntN(3)]
		case wild == 1:
			v[i] *= 0
		case wild == 2 && r.IntN(5) == 0:
			v[i] = float32(math.Copysign(math.MaxFloat32, float64(v[i])))
		case wild == 3:
			v[i] = float32(math.Ldexp(float64(v[i]), -r.IntN(30)))
		case wild == 4:
			v[i] = float32(r.IntN(255)-127) / 4
		}
	}
	return v
}

// bytesOf returns elements in the type.
func (e *element) bytesOf(v []float32) []byte {
	b := make([]byte, len(v)*e.dtype.Size())
	for i, x := range v {
		e.narrow(b[i*e.dtype.Size():], x)
	}
	return b
}

// as returns the elements as the slice of the host that kernel.Verify wants.
func (e *element) as(v []float32) any {
	switch b := e.bytesOf(v); e.dtype {
	case memory.Float16:
		return hostOf[memory.Float16Bits](b)
	case memory.BFloat16:
		return hostOf[memory.BFloat16Bits](b)
	}
	return v
}

func hostOf[T ~uint16](b []byte) []T {
	out := make([]T, len(b)/2)
	for i := range out {
		out[i] = T(b[2*i]) | T(b[2*i+1])<<8
	}
	return out
}

// finite returns v without what is not finite, which may differ by the sign of NaN.
func finite(v []float32) []float32 {
	for i, x := range v {
		if x-x != 0 {
			v[i] = 0
		}
	}
	return v
}

// The kernels, compiled for the host, and the functions for virtual devices give the same bits, and
// write nothing else.
func TestSourceAgreesWithGo(t *testing.T) {
	sampled := testgpu.Sample(t, 3)
	each(t, func(t *testing.T, r *rand.Rand, f *format) {
		if !sampled() && (f.element.dtype != memory.BFloat16 || f.code.dtype != memory.Float8E4M3) {
			return // each takes seconds to compile
		}
		var trials []kernel.Trial
		for range testhost.Rounds(2, 4) {
			n, ranks := 1+r.IntN(3000), 2+r.IntN(7)
			share, mine := ShareLen(n, ranks), r.IntN(ranks)
			tag := r.Uint64()
			chunks := func(count int) []uint8 { // one may have another tag
				out, wrong := make([]uint8, count*TaggedBytes(share)), r.IntN(2*count)
				for i := range count {
					its := tag
					if i == wrong {
						its ^= 1 << r.IntN(64)
					}
					f.encode(sealed(out, i, share, its), drawn(r, share), infinite, math.MaxFloat32)
				}
				return out
			}
			var errs any
			if r.IntN(3) > 0 {
				errs = finite(drawn(r, n))
			}
			aligned, x := uint32(r.IntN(2)), f.element.as(drawn(r, n))
			one, others := grid(share, 1), grid(share, ranks-1)
			trials = append(trials,
				kernel.Trial{Kernel: "quantize", Grid: others, Outputs: []string{"out"},
					Args: []any{x, errs, make([]uint8, (ranks-1)*TaggedBytes(share)), uint64(n), uint64(share), uint32(mine), aligned, tag}},
				kernel.Trial{Kernel: "reduce", Grid: one, Outputs: []string{"out"},
					Args: []any{x, errs, chunks(ranks - 1), make([]uint8, TaggedBytes(share)), uint64(n), uint64(share), uint32(mine), uint32(ranks), uint32(r.IntN(2)), aligned, tag}},
				kernel.Trial{Kernel: "dequantize", Grid: others,
					Args: []any{x, chunks(ranks), uint64(n), uint64(share), uint32(mine), aligned, tag}})
		}
		err := kernel.Verify(t.Context(), sourceOf(f.element.dtype, f.code.dtype), trials, &kernel.VerifyConfig{Host: true})
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip("no g++")
		}
		require.NoError(t, err)
		t.Run("cuda", func(t *testing.T) {
			dev := testgpu.CUDA(t, 1)[0]
			require.NoError(t, kernel.Verify(t.Context(), sourceOf(f.element.dtype, f.code.dtype), trials, &kernel.VerifyConfig{Device: dev}))
		})
	})
}

// bound returns how much a number of a block can change, if most is its largest element.
func (f *format) bound(most float64) float64 {
	if f.code.dtype == memory.Int8 {
		return max(most/127, math.Ldexp(1, -127)/2) // half of a step, which is at most 2/127 of the largest element
	}
	return max(most/17, math.Ldexp(1, -137))
}

// A block is within the documented bound, whatever its elements, and the bound is tight.
func TestBlockBound(t *testing.T) {
	for j := range codes {
		f := &format{&elements[2], &codes[j]}
		r := seeded(t)
		worst := 0.0
		for range 20000 {
			block, q, y := make([]float32, BlockLen), make([]byte, BlockLen), make([]float32, BlockLen)
			size := r.IntN(270) - 145
			most := 0.0
			for i := range block {
				block[i] = float32(math.Ldexp(1+r.Float64(), size-r.IntN(1+r.IntN(30))))
				if r.IntN(2) == 0 {
					block[i] = -block[i]
				}
				most = max(most, math.Abs(float64(block[i])))
			}
			e := f.exponentOf(block, infinite)
			f.write(q, block, e)
			f.read(q, e, math.MaxFloat32, y)
			for i := range block {
				change := math.Abs(float64(block[i]) - float64(y[i]))
				require.LessOrEqual(t, change, f.bound(most), "%s: %g in a block up to %g", f.code.dtype, block[i], most)
				worst = max(worst, change/f.bound(most))
			}
		}
		require.Greater(t, worst, 0.95, "%s: no block comes near the bound", f.code.dtype)
	}
}

// Sums of normally distributed elements have the typical errors that comm.AllReduceQuantized documents.
func TestTypicalError(t *testing.T) {
	r := seeded(t)
	for j, want := range []float64{0.016, 0.005} {
		f := &format{&elements[2], &codes[j]}
		for _, ranks := range []int{2, 8} {
			squares, count := 0.0, 0
			for range 5000 {
				sum, exact := make([]float32, BlockLen), make([]float64, BlockLen)
				for rank := range ranks {
					v := make([]float32, BlockLen)
					for i := range v {
						v[i] = float32(r.NormFloat64())
						exact[i] += float64(v[i])
					}
					if rank > 0 { // the owner has its elements
						v = f.encode(make([]byte, ChunkBytes(BlockLen)), v, infinite, math.MaxFloat32)
					}
					for i := range sum {
						sum[i] += v[i]
					}
				}
				most := 0.0
				for _, x := range exact {
					most = max(most, math.Abs(x))
				}
				for i, x := range f.encode(make([]byte, ChunkBytes(BlockLen)), sum, infinite, math.MaxFloat32) {
					squares += math.Pow((float64(x)-exact[i])/most, 2)
					count++
				}
			}
			require.InDelta(t, want, math.Sqrt(squares/float64(count)), 0.2*want, "%s, %d ranks", f.code.dtype, ranks)
		}
	}
}

// Numbers of the format, times a power of two, are not changed: alone, and beside larger ones.
func TestBlockIsExact(t *testing.T) {
	for j := range codes {
		f := &format{&elements[2], &codes[j]}
		for exponent := -120; exponent <= 110; exponent += 23 {
			for _, most := range []int{1, 3, 15, 100, 127} {
				var block []float32
				for q := range 256 {
					if x := f.code.value(byte(q)); x == x && (f.code.dtype != memory.Int8 || math.Abs(float64(x)) <= float64(most)) {
						block = append(block, float32(math.Ldexp(float64(x), exponent)))
					}
				}
				for len(block)%BlockLen != 0 {
					block = append(block, 0)
				}
				for i := 0; i < len(block); i += BlockLen {
					part, q, y := block[i:i+BlockLen], make([]byte, BlockLen), make([]float32, BlockLen)
					e := f.exponentOf(part, infinite)
					f.write(q, part, e)
					f.read(q, e, math.MaxFloat32, y)
					require.Equal(t, part, y, "%s times 2^%d", f.code.dtype, exponent)
				}
			}
		}
	}
}

// The Go functions round as torch's conversions do: every pair of 8-bit floats and their middle.
func TestCodesRoundToEven(t *testing.T) {
	for q := range 126 {
		a, b := codes[0].value(byte(q)), codes[0].value(byte(q+1))
		even := byte(q + q%2)
		require.Equal(t, even, codes[0].bits((a+b)/2))
		require.Equal(t, byte(dtype.E4M3.Encode(a)), codes[0].bits(a))
	}
	require.Equal(t, byte(2), codes[1].bits(2.5))
	require.Equal(t, byte(4), codes[1].bits(3.5))
	require.Equal(t, byte(0xfe), codes[1].bits(-2.5))
}

// Every element has one place in one chunk.
func TestShares(t *testing.T) {
	for _, n := range []int{1, 511, 512, 513, 1 << 20, 3*1<<20 + 5} {
		for ranks := 2; ranks <= 8; ranks++ {
			share := ShareLen(n, ranks)
			require.Zero(t, share%WarpLen, "a warp has units of one share, and vectors of 16 bytes have the same alignment")
			require.Zero(t, ChunkBytes(share)%16)
			require.GreaterOrEqual(t, share*ranks, n)
			require.Less(t, (share-WarpLen)*ranks, n)
		}
	}
}
