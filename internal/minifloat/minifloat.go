// Package minifloat converts the floating-point formats that Go lacks to
// float32 and back: float16, bfloat16 and the two of 8 bits.
//
// Every number of a format is a float32, so decoding is exact. Encoding rounds
// to nearest, ties to even. A NaN becomes a NaN, with its sign.
//
// What is too large has two answers. Encode gives what torch's casts give:
// infinity, and NaN in float8_e4m3fn, which has no infinity. EncodeSaturated
// gives the largest finite number instead, for infinity too, which is what
// CUDA's and so NCCL's conversions to 8 bits do.
package minifloat

import (
	"math"
	"unsafe"
)

// A Format is one of the formats of this package. Its methods may be called
// from any goroutine.
type Format struct {
	bytes    int
	mantissa uint32 // bits
	bias     int32
	largest  uint32 // the largest finite number
	overflow uint32 // what torch makes of greater ones
	infinity uint32 // 0 when there is none
	nan      uint32

	table *[256]float32 // of the numbers of 8 bits
}

// The formats, under the names of their types in torch.
var (
	Float16    = &Format{bytes: 2, mantissa: 10, bias: 15, largest: 0x7bff, overflow: 0x7c00, infinity: 0x7c00, nan: 0x7fff}
	BFloat16   = &Format{bytes: 2, mantissa: 7, bias: 127, largest: 0x7f7f, overflow: 0x7f80, infinity: 0x7f80, nan: 0x7fff}
	Float8E4M3 = tabled(&Format{bytes: 1, mantissa: 3, bias: 7, largest: 0x7e, overflow: 0x7f, nan: 0x7f}) // float8_e4m3fn
	Float8E5M2 = tabled(&Format{bytes: 1, mantissa: 2, bias: 15, largest: 0x7b, overflow: 0x7c, infinity: 0x7c, nan: 0x7f})
)

func tabled(f *Format) *Format {
	var t [256]float32
	for q := range uint32(len(t)) {
		t[q] = f.withSign(f.magnitude(q&0x7f), q)
	}
	f.table = &t
	return f
}

// Bytes is the width of a number.
func (f *Format) Bytes() int { return f.bytes }

// signBit is the place of the sign.
func (f *Format) signBit() uint32 { return 1 << (8*uint(f.bytes) - 1) }

func (f *Format) withSign(x float32, q uint32) float32 {
	return math.Float32frombits(math.Float32bits(x) | q&f.signBit()<<(32-8*uint(f.bytes)))
}

// Decode is the number of the bits q.
func (f *Format) Decode(q uint16) float32 {
	switch {
	case f.table != nil:
		return f.table[uint8(q)]
	case f == BFloat16:
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

// Encode rounds x. Beyond the largest number it gives infinity, or NaN in
// Float8E4M3.
func (f *Format) Encode(x float32) uint16 { return f.encode(x, f.overflow) }

// EncodeSaturated rounds x. Beyond the largest number it gives the largest.
func (f *Format) EncodeSaturated(x float32) uint16 { return f.encode(x, f.largest) }

func (f *Format) encode(x float32, overflow uint32) uint16 {
	bits := math.Float32bits(x)
	return uint16(f.round(bits&^(1<<31), overflow) | bits>>31<<(8*uint(f.bytes)-1))
}

// round encodes the bits of a float32 that is not negative.
func (f *Format) round(bits, overflow uint32) uint32 {
	if bits > 0x7f800000 {
		return f.nan
	}
	if f.bias == 127 { // the range of float32, whose subnormal numbers need no shift
		if q := (bits + 0x7fff + bits>>16&1) >> 16; q <= f.largest {
			return q
		}
		return overflow
	}
	exponent := int32(bits>>23) - 127 + f.bias
	shift := 23 - f.mantissa
	if exponent <= 0 { // below the normal numbers
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

// DecodeBytes decodes src, numbers as they lie in memory, to as many elements
// of dst. Those of 16 bits begin at an even address.
func (f *Format) DecodeBytes(dst []float32, src []byte) {
	switch dst = dst[:len(src)/f.bytes]; {
	case f.table != nil:
		for i, q := range src {
			dst[i] = f.table[q]
		}
	case f == BFloat16:
		for i, q := range words(src)[:len(dst)] {
			dst[i] = math.Float32frombits(uint32(q) << 16)
		}
	default:
		decodeHalfs(dst, src)
	}
}

// EncodeBytes is Encode of all of src to dst, numbers as they lie in memory.
func (f *Format) EncodeBytes(dst []byte, src []float32) {
	switch {
	case f == Float16:
		encodeHalfs(dst, src)
	case f == BFloat16:
		encodeBFloats(dst, src)
	default:
		f.encodeBytes(dst, src, f.overflow)
	}
}

// EncodeBytesSaturated is EncodeSaturated of all of src to dst.
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

// words looks at bytes as numbers of 16 bits.
func words(p []byte) []uint16 {
	return unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/2)
}

// Moving a half's bits to their places in a float32 leaves the exponent too
// small by the difference of the biases, for subnormal halfs too.
func decodeHalfs(dst []float32, src []byte) {
	for i, q := range words(src)[:len(dst)] {
		h := uint32(q)
		if h&0x7c00 == 0x7c00 {
			dst[i] = Float16.Decode(q)
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
		out[i] = Float16.Encode(x)
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
