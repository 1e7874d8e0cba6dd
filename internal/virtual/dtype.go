package virtual

import (
	"math"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// A codec converts elements that Go has no type for to float32 and back,
// rounding to nearest, ties to even.
type codec struct {
	decode func(dst []float32, src []byte)
	encode func(dst []byte, src []float32)
}

var codecs = map[ncclapi.DType]codec{
	ncclapi.Float16:    {decodeHalfs, encodeHalfs},
	ncclapi.BFloat16:   {decodeBFloats, encodeBFloats},
	ncclapi.Float8E4M3: {decodeBytes(e4m3), encodeBytes(e4m3)},
	ncclapi.Float8E5M2: {decodeBytes(e5m2), encodeBytes(e5m2)},
}

// A format is a small binary floating-point format.
type format struct {
	mantissa uint32 // bits
	bias     int32
	largest  uint32 // the largest finite number
	overflow uint32 // what greater numbers become
	infinity uint32 // 0 when the format has none
	nan      uint32
}

// The 8-bit formats saturate, as CUDA's conversions to them do.
var (
	half = format{mantissa: 10, bias: 15, largest: 0x7bff, overflow: 0x7c00, infinity: 0x7c00, nan: 0x7fff}
	e4m3 = format{mantissa: 3, bias: 7, largest: 0x7e, overflow: 0x7e, nan: 0x7f}
	e5m2 = format{mantissa: 2, bias: 15, largest: 0x7b, overflow: 0x7b, infinity: 0x7c, nan: 0x7f}
)

// encode rounds a float32 to the format, leaving out the sign.
func (f *format) encode(x float32) uint32 {
	bits := math.Float32bits(x) &^ (1 << 31)
	if bits > 0x7f800000 {
		return f.nan
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
		return f.overflow
	}
	return q
}

// decode is the value of a number without its sign.
func (f *format) decode(q uint32) float32 {
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

// Moving a half's bits to their places in a float32 leaves the exponent too
// small by the difference of the biases, for subnormal halfs too.
func decodeHalfs(dst []float32, src []byte) {
	for i, h := range view[uint16](src) {
		x := math.Float32frombits(uint32(h&0x7fff)<<13) * 0x1p112
		if h&0x7c00 == 0x7c00 {
			x = half.decode(uint32(h & 0x7fff))
		}
		if h&0x8000 != 0 {
			x = -x
		}
		dst[i] = x
	}
}

func encodeHalfs(dst []byte, src []float32) {
	const (
		smallest = 0x38800000 // the smallest normal half, as a float32
		beyond   = 0x477ff000 // rounds to infinity
	)
	out := view[uint16](dst)
	for i, x := range src {
		bits := math.Float32bits(x)
		sign, size := bits>>16&0x8000, bits&^(1<<31)
		if size >= smallest && size < beyond {
			out[i] = uint16(sign | (size-(127-15)<<23+0xfff+size>>13&1)>>13)
			continue
		}
		out[i] = uint16(sign | half.encode(x))
	}
}

func decodeBFloats(dst []float32, src []byte) {
	for i, b := range view[uint16](src) {
		dst[i] = math.Float32frombits(uint32(b) << 16)
	}
}

func encodeBFloats(dst []byte, src []float32) {
	out := view[uint16](dst)
	for i, x := range src {
		bits := math.Float32bits(x)
		if x != x {
			out[i] = uint16(bits>>16 | 0x7fff)
			continue
		}
		out[i] = uint16((bits + 0x7fff + bits>>16&1) >> 16)
	}
}

func decodeBytes(f format) func([]float32, []byte) {
	var table [256]float32
	for q := range uint32(128) {
		table[q] = f.decode(q)
		table[q|128] = -table[q]
	}
	return func(dst []float32, src []byte) {
		for i, q := range src {
			dst[i] = table[q]
		}
	}
}

func encodeBytes(f format) func([]byte, []float32) {
	return func(dst []byte, src []float32) {
		for i, x := range src {
			dst[i] = byte(f.encode(x) | math.Float32bits(x)>>24&0x80)
		}
	}
}

var dtypeNames = []string{"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"}

func dtypeName(t ncclapi.DType) string {
	if t.Size() == 0 {
		return "unknown type"
	}
	return dtypeNames[t]
}
