package dtype

import (
	"math"
	"unsafe"
)

// A Format is a floating-point format that Go does not have. Its methods are safe for
// concurrent use.
//
// Every number of these formats is a float32, so decoding is exact. Encoding rounds to
// nearest, ties to even. They differ in what becomes of a number that is too large, and of a
// NaN:
//   - Encode follows torch's casts: infinity, or NaN in float8_e4m3fn, which has no infinity. A
//     NaN keeps its sign.
//   - EncodeSaturated follows the conversions of CUDA and NCCL to 8 bits: the largest finite
//     number, also for infinity.
//   - EncodeDevice follows CUDA's conversions to 16 bits: Encode, but every NaN is the same.
type Format struct {
	bytes    int
	mantissa uint32 // bits
	bias     int32
	largest  uint32 // the largest finite number
	overflow uint32 // torch's result for larger numbers
	infinity uint32 // 0 if the format has none
	nan      uint32

	table *[256]float32 // decoded values of an 8-bit format
}

// The formats. They are exported for loops over one of them; Type.Format has them by type.
var (
	Half   = &Format{bytes: 2, mantissa: 10, bias: 15, largest: 0x7bff, overflow: 0x7c00, infinity: 0x7c00, nan: 0x7fff}
	BFloat = &Format{bytes: 2, mantissa: 7, bias: 127, largest: 0x7f7f, overflow: 0x7f80, infinity: 0x7f80, nan: 0x7fff}
	E4M3   = tabled(&Format{bytes: 1, mantissa: 3, bias: 7, largest: 0x7e, overflow: 0x7f, nan: 0x7f}) // float8_e4m3fn
	E5M2   = tabled(&Format{bytes: 1, mantissa: 2, bias: 15, largest: 0x7b, overflow: 0x7c, infinity: 0x7c, nan: 0x7f})
)

func tabled(f *Format) *Format {
	var t [256]float32
	for q := range uint32(len(t)) {
		t[q] = f.withSign(f.magnitude(q&0x7f), q)
	}
	f.table = &t
	return f
}

// Bytes returns the size of a number.
func (f *Format) Bytes() int { return f.bytes }

// signBit returns the mask of the sign bit.
func (f *Format) signBit() uint32 { return 1 << (8*uint(f.bytes) - 1) }

func (f *Format) withSign(x float32, q uint32) float32 {
	return math.Float32frombits(math.Float32bits(x) | q&f.signBit()<<(32-8*uint(f.bytes)))
}

// Decode returns the number with the bits q.
func (f *Format) Decode(q uint16) float32 {
	switch {
	case f.table != nil:
		return f.table[uint8(q)]
	case f == BFloat:
		return math.Float32frombits(uint32(q) << 16)
	}
	return f.withSign(f.magnitude(uint32(q)&^f.signBit()), uint32(q))
}

// magnitude decodes a number without its sign.
func (f *Format) magnitude(q uint32) float32 {
	switch {
	case q > f.largest && q == f.infinity:
		return float32(math.Inf(1))
	case q > f.largest:
		return float32(math.NaN())
	}
	exponent, fraction := int32(q>>f.mantissa), q&(1<<f.mantissa-1)
	if exponent == 0 {
		return float32(math.Ldexp(float64(fraction), int(1-f.bias)-int(f.mantissa)))
	}
	return math.Float32frombits(uint32(exponent-f.bias+127)<<23 | fraction<<(23-f.mantissa))
}

// Encode rounds x. If x is too large, it returns infinity, or NaN for E4M3.
func (f *Format) Encode(x float32) uint16 { return f.encode(x, f.overflow) }

// EncodeDevice is Encode with the NaN of the GPU's conversions, which has no sign.
func (f *Format) EncodeDevice(x float32) uint16 {
	if x != x {
		return uint16(f.nan)
	}
	return f.encode(x, f.overflow)
}

// EncodeSaturated rounds x. If x is too large, it returns the largest finite number.
func (f *Format) EncodeSaturated(x float32) uint16 { return f.encode(x, f.largest) }

func (f *Format) encode(x float32, overflow uint32) uint16 {
	bits := math.Float32bits(x)
	return uint16(f.round(bits&^(1<<31), overflow) | bits>>31<<(8*uint(f.bytes)-1))
}

// round encodes the bits of a non-negative float32.
func (f *Format) round(bits, overflow uint32) uint32 {
	if bits > 0x7f800000 {
		return f.nan
	}
	if f.bias == 127 { // the exponent range of float32: subnormal numbers need no shift
		if q := (bits + 0x7fff + bits>>16&1) >> 16; q <= f.largest {
			return q
		}
		return overflow
	}
	exponent := int32(bits>>23) - 127 + f.bias
	shift := 23 - f.mantissa
	if exponent <= 0 { // subnormal
		shift += uint32(1 - exponent)
		exponent = 1
	}
	if shift > 24 {
		return 0
	}
	m := bits&0x7fffff | 0x800000
	q := m >> shift
	rest, tie := m&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > tie || rest == tie && q&1 == 1 {
		q++
	}
	// The leading one of a normal number carries into the exponent.
	q += uint32(exponent-1) << f.mantissa
	if q > f.largest {
		return overflow
	}
	return q
}

// DecodeBytes decodes the numbers in src to the elements of dst. 16-bit numbers
// must start at an even address.
func (f *Format) DecodeBytes(dst []float32, src []byte) {
	switch dst = dst[:len(src)/f.bytes]; {
	case f.table != nil:
		for i, q := range src {
			dst[i] = f.table[q]
		}
	case f == BFloat:
		for i, q := range words(src)[:len(dst)] {
			dst[i] = math.Float32frombits(uint32(q) << 16)
		}
	default:
		decodeHalfs(dst, src)
	}
}

// EncodeBytes encodes all of src to dst with Encode.
func (f *Format) EncodeBytes(dst []byte, src []float32) {
	switch {
	case f == Half:
		encodeHalfs(dst, src)
	case f == BFloat:
		encodeBFloats(dst, src)
	default:
		f.encodeBytes(dst, src, f.overflow)
	}
}

// EncodeBytesSaturated encodes all of src to dst with EncodeSaturated.
func (f *Format) EncodeBytesSaturated(dst []byte, src []float32) { f.encodeBytes(dst, src, f.largest) }

func (f *Format) encodeBytes(dst []byte, src []float32, overflow uint32) {
	if f.bytes == 1 {
		for i, x := range src {
			dst[i] = byte(f.encode(x, overflow))
		}
		return
	}
	out := words(dst)[:len(src)]
	for i, x := range src {
		out[i] = f.encode(x, overflow)
	}
}

// words converts bytes to 16-bit numbers without a copy.
func words(p []byte) []uint16 {
	return unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/2)
}

// Shifting a half's bits to their positions in a float32 leaves the exponent too
// small by the difference of the biases, also for subnormal halfs. A
// multiplication corrects it.
func decodeHalfs(dst []float32, src []byte) {
	for i, q := range words(src)[:len(dst)] {
		h := uint32(q)
		if h&0x7c00 == 0x7c00 {
			dst[i] = Half.Decode(q)
			continue
		}
		x := math.Float32frombits(h&0x7fff<<13) * 0x1p112
		dst[i] = math.Float32frombits(math.Float32bits(x) | h&0x8000<<16)
	}
}

func encodeHalfs(dst []byte, src []float32) {
	const (
		smallest = 0x38800000 // the smallest normal half, as a float32
		beyond   = 0x477ff000 // rounds to infinity
	)
	out := words(dst)[:len(src)]
	for i, x := range src {
		bits := math.Float32bits(x)
		sign, size := bits>>16&0x8000, bits&^(1<<31)
		if size >= smallest && size < beyond {
			out[i] = uint16(sign | (size-(127-15)<<23+0xfff+size>>13&1)>>13)
			continue
		}
		out[i] = Half.Encode(x)
	}
}

func encodeBFloats(dst []byte, src []float32) {
	out := words(dst)[:len(src)]
	for i, x := range src {
		bits := math.Float32bits(x)
		if x != x {
			out[i] = uint16(bits>>16 | 0x7fff)
			continue
		}
		out[i] = uint16((bits + 0x7fff + bits>>16&1) >> 16)
	}
}
