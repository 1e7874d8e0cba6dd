package virtual

import (
	"math"
	"testing"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

// nearest finds the number of a format that is nearest to x by looking at all
// of them, an even one in a tie, and saturates.
func nearest(values []float64, x float64) int {
	best := 0
	for q, v := range values {
		d, e := math.Abs(v-x), math.Abs(values[best]-x)
		if d < e || d == e && q%2 == 0 {
			best = q
		}
	}
	return best
}

func TestSmallFloatsRoundToNearestEven(t *testing.T) {
	for name, f := range map[string]struct {
		format
		exponent int
	}{"e4m3": {e4m3, 4}, "e5m2": {e5m2, 5}, "half": {half, 5}} {
		values := make([]float64, f.largest+1)
		for q := range values {
			m, e := q&(1<<f.mantissa-1), q>>f.mantissa
			if e == 0 {
				values[q] = math.Ldexp(float64(m), 1-int(f.bias)-int(f.mantissa))
			} else {
				values[q] = math.Ldexp(float64(m+1<<f.mantissa), e-int(f.bias)-int(f.mantissa))
			}
			require.Equal(t, float32(values[q]), f.decode(uint32(q)), name)
			require.Equal(t, uint32(q), f.encode(float32(values[q])), name)
		}
		step := 1
		if name == "half" {
			step = 997
		}
		for q := 0; q+1 < len(values); q += step {
			low, high := values[q], values[q+1]
			for _, x := range []float64{low + (high-low)/4, (low + high) / 2, low + (high-low)*0.75} {
				near := values[max(0, q-2):min(len(values), q+3)]
				want := nearest(near, x) + max(0, q-2)
				if max(0, q-2)%2 == 1 { // parity of the slice is that of the format
					want = nearest(append([]float64{math.Inf(-1)}, near...), x) + q - 3
				}
				require.Equal(t, uint32(want), f.encode(float32(x)), "%s %g", name, x)
			}
		}
		require.Equal(t, f.overflow, f.encode(1e30), name)
		require.Equal(t, f.overflow, f.encode(float32(math.Inf(1))), name)
		require.Equal(t, f.nan, f.encode(float32(math.NaN())), name)
		require.Zero(t, f.encode(1e-30), name)
		require.True(t, math.IsNaN(float64(f.decode(f.nan))), name)
	}
}

func TestBFloat16(t *testing.T) {
	c := codecs[ncclapi.BFloat16]
	for x, want := range map[float32]uint16{1: 0x3f80, -2: 0xc000, 1.00390625: 0x3f80, 1.01171875: 0x3f82, 3e38: 0x7f62} {
		got := make([]byte, 2)
		c.encode(got, []float32{x})
		require.Equal(t, want, view[uint16](got)[0], "%g", x)
	}
}

// TestHalfs compares the short way of the codec with the long one.
func TestHalfs(t *testing.T) {
	all := make([]byte, 2<<16)
	for q := range view[uint16](all) {
		view[uint16](all)[q] = uint16(q)
	}
	wide, back := make([]float32, 1<<16), make([]byte, 2<<16)
	codecs[ncclapi.Float16].decode(wide, all)
	for q, x := range wide {
		want := half.decode(uint32(q & 0x7fff))
		if q >= 0x8000 {
			want = -want
		}
		if x != want && !(x != x && want != want) {
			t.Fatalf("%#x decodes to %g, want %g", q, x, want)
		}
	}
	for _, factor := range []float32{1, 1.0004883, 1.0001, 0.9997, 0.99951172} {
		near := make([]float32, len(wide))
		for i, x := range wide {
			near[i] = x * factor
		}
		codecs[ncclapi.Float16].encode(back, near)
		for i, x := range near {
			want := uint16(half.encode(x) | math.Float32bits(x)>>16&0x8000)
			if got := view[uint16](back)[i]; got != want {
				t.Fatalf("%g encodes to %#x, want %#x", x, got, want)
			}
		}
	}
}

func BenchmarkSumFloat32(b *testing.B) {
	x, y := make([]byte, sliceBytes), make([]byte, sliceBytes)
	f := combinerOf(ncclapi.Float32, ncclapi.Sum)
	b.SetBytes(sliceBytes)
	for b.Loop() {
		f(x, x, y)
	}
}

func BenchmarkSumFloat16(b *testing.B) {
	x, y := make([]byte, sliceBytes), make([]byte, sliceBytes)
	f := combinerOf(ncclapi.Float16, ncclapi.Sum)
	b.SetBytes(sliceBytes)
	for b.Loop() {
		f(x, x, y)
	}
}
