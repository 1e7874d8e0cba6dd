package dtype

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

var formats = map[string]*Format{"float16": Half, "bfloat16": BFloat, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2}

// values has the finite numbers of a format that are not negative, by their
// bits, computed from the definition of the format alone.
func values(f *Format) []float64 {
	v := make([]float64, f.largest+1)
	for q := range v {
		m, e := float64(q&(1<<f.mantissa-1)), q>>f.mantissa
		if e == 0 {
			v[q] = math.Ldexp(m, 1-int(f.bias)-int(f.mantissa))
		} else {
			v[q] = math.Ldexp(m+float64(int(1)<<f.mantissa), e-int(f.bias)-int(f.mantissa))
		}
	}
	return v
}

func TestKnownNumbers(t *testing.T) {
	for _, x := range []struct {
		f    *Format
		x    float32
		want uint16
	}{
		{Half, 1, 0x3c00}, {Half, -2, 0xc000}, {Half, 65504, 0x7bff}, {Half, 0x1p-24, 1},
		{BFloat, 1, 0x3f80}, {BFloat, 1.00390625, 0x3f80}, {BFloat, 1.01171875, 0x3f82}, {BFloat, 3e38, 0x7f62},
		{E4M3, 1, 0x38}, {E4M3, -448, 0xfe}, {E4M3, 464, 0x7e}, {E4M3, 0x1p-9, 1},
		{E5M2, 1, 0x3c}, {E5M2, 57344, 0x7b}, {E5M2, 0x1p-16, 1},
	} {
		require.Equal(t, x.want, x.f.Encode(x.x), "%g", x.x)
	}
}

// TestEveryPattern decodes all bit patterns, which come back when encoded.
func TestEveryPattern(t *testing.T) {
	for name, f := range formats {
		t.Run(name, func(t *testing.T) {
			want := values(f)
			for q := range 1 << (8 * f.bytes) {
				sign, size := uint32(q)&f.signBit(), uint32(q)&^f.signBit()
				x, back := f.Decode(uint16(q)), uint32(f.Encode(f.Decode(uint16(q))))
				if math.Signbit(float64(x)) != (sign != 0) {
					t.Fatalf("%#x decodes to %g, which has the wrong sign", q, x)
				}
				switch {
				case size <= f.largest:
					if math.Abs(float64(x)) != want[size] || back != uint32(q) {
						t.Fatalf("%#x decodes to %g, want %g, and encodes to %#x", q, x, want[size], back)
					}
					if saturated := f.EncodeSaturated(x); saturated != uint16(q) {
						t.Fatalf("%#x decodes to %g and saturates to %#x", q, x, saturated)
					}
				case size == f.infinity:
					if !math.IsInf(float64(x), 0) || back != uint32(q) || uint32(f.EncodeSaturated(x)) != sign|f.largest {
						t.Fatalf("%#x decodes to %g and encodes to %#x", q, x, back)
					}
				default:
					if x == x || back != sign|f.nan || uint32(f.EncodeSaturated(x)) != sign|f.nan {
						t.Fatalf("%#x decodes to %g and encodes to %#x", q, x, back)
					}
				}
			}
		})
	}
}

// TestNearestEven looks at each pair of neighbours: what lies between them goes
// to the nearer one, and from the middle to the even one.
func TestNearestEven(t *testing.T) {
	for name, f := range formats {
		t.Run(name, func(t *testing.T) {
			v := values(f)
			// The first number too large would be the next one, had the format
			// one more.
			top := v[f.largest]
			v = append(v, 2*top-v[f.largest-1])
			result := func(q int) uint16 {
				if uint32(q) > f.largest {
					return uint16(f.overflow)
				}
				return uint16(q)
			}
			for q := range f.largest + 1 {
				low, high := v[q], v[q+1]
				middle := (low + high) / 2
				even := int(q + q&1)
				for _, x := range []struct {
					x    float64
					want int
				}{
					{low + (high-low)/4, int(q)}, {low + (high-low)*0.75, int(q + 1)}, {middle, even},
					{below(middle), int(q)}, {above(middle), int(q + 1)},
				} {
					narrow := float32(x.x)
					if float64(narrow) != x.x { // among the smallest bfloat16s
						continue
					}
					got, minus := f.Encode(narrow), f.Encode(-narrow)
					if got != result(x.want) || uint32(minus) != uint32(got)|f.signBit() {
						t.Fatalf("%g between %g and %g encodes to %#x and its negative to %#x, want %#x", x.x, low, high, got, minus, result(x.want))
					}
					if got := f.EncodeSaturated(narrow); uint32(got) != min(uint32(x.want), f.largest) {
						t.Fatalf("%g saturates to %#x", x.x, got)
					}
				}
			}
		})
	}
}

// below and above are the neighbours of a float32.
func below(x float64) float64 { return float64(math.Nextafter32(float32(x), -1)) }
func above(x float64) float64 {
	return float64(math.Nextafter32(float32(x), float32(math.Inf(1))))
}

func TestTooLarge(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, x := range []float32{math.MaxFloat32, inf} {
		require.Equal(t, []uint16{0x7c00, 0x7f80, 0x7f, 0x7c},
			[]uint16{Half.Encode(x), BFloat.Encode(x), E4M3.Encode(x), E5M2.Encode(x)})
		require.Equal(t, []uint16{0xfbff, 0xff7f, 0xfe, 0xfb},
			[]uint16{Half.EncodeSaturated(-x), BFloat.EncodeSaturated(-x), E4M3.EncodeSaturated(-x), E5M2.EncodeSaturated(-x)})
	}
}

// TestBytes compares the conversions of many with those of one.
func TestBytes(t *testing.T) {
	for name, f := range formats {
		t.Run(name, func(t *testing.T) {
			var all []byte
			for q := range 1 << (8 * f.bytes) {
				all = binary.LittleEndian.AppendUint16(all, uint16(q))[:(q+1)*f.bytes]
			}
			at := func(p []byte, i int) uint16 {
				if f.bytes == 1 {
					return uint16(p[i])
				}
				return binary.LittleEndian.Uint16(p[2*i:])
			}
			wide := make([]float32, len(all)/f.bytes)
			f.DecodeBytes(wide, all)
			for q, x := range wide {
				if math.Float32bits(x) != math.Float32bits(f.Decode(uint16(q))) && x == x {
					t.Fatalf("%#x decodes to %g, want %g", q, x, f.Decode(uint16(q)))
				}
			}
			seed := rand.Uint64()
			rng := rand.New(rand.NewPCG(seed, 0))
			for _, factor := range []float32{1, 1.0004883, 1.0001, 0.9997, 0.99951172, 1.03125, 1e-5, 1e5} {
				near := append([]float32(nil), wide...)
				for i := range near {
					near[i] *= factor
				}
				for range 10000 {
					near = append(near, math.Float32frombits(rng.Uint32()))
				}
				got, saturated := make([]byte, len(near)*f.bytes), make([]byte, len(near)*f.bytes)
				f.EncodeBytes(got, near)
				f.EncodeBytesSaturated(saturated, near)
				for i, x := range near {
					if at(got, i) != f.Encode(x) || at(saturated, i) != f.EncodeSaturated(x) {
						t.Fatalf("%g encodes to %#x and %#x, want %#x and %#x (seed %#x)", x, at(got, i), at(saturated, i), f.Encode(x), f.EncodeSaturated(x), seed)
					}
				}
			}
		})
	}
}
