package conformance

import (
	"encoding/binary"
	"math"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/ncclapi"
)

var dtypes = []ncclapi.DType{
	ncclapi.Int8, ncclapi.Uint8, ncclapi.Int32, ncclapi.Uint32, ncclapi.Int64, ncclapi.Uint64,
	ncclapi.Float16, ncclapi.Float32, ncclapi.Float64, ncclapi.BFloat16, ncclapi.Float8E4M3, ncclapi.Float8E5M2,
}

var dtypeNames = []string{"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"}

var redops = []ncclapi.RedOp{ncclapi.Sum, ncclapi.Prod, ncclapi.Max, ncclapi.Min, ncclapi.Avg}

var redopNames = []string{"sum", "prod", "max", "min", "avg"}

// A layout is the layout of a floating-point type.
type layout struct{ exponent, mantissa int }

var layouts = map[ncclapi.DType]layout{
	ncclapi.Float16: {5, 10}, ncclapi.Float32: {8, 23}, ncclapi.Float64: {11, 52},
	ncclapi.BFloat16: {8, 7}, ncclapi.Float8E4M3: {4, 3}, ncclapi.Float8E5M2: {5, 2},
}

func (l layout) bias() int { return 1<<(l.exponent-1) - 1 }

// value returns the number represented by the bits, which must be finite.
func (l layout) value(bits uint64) float64 {
	m := float64(bits & (1<<l.mantissa - 1))
	e := int(bits >> l.mantissa & (1<<l.exponent - 1))
	var v float64
	if e == 0 {
		v = m * l.tiny()
	} else {
		v = (1 + m*l.eps()) * power(e-l.bias())
	}
	if bits>>(l.exponent+l.mantissa)&1 == 1 {
		return -v
	}
	return v
}

// eps is the distance from 1 to the next number, and tiny the smallest positive
// number.
func (l layout) eps() float64  { return power(-l.mantissa) }
func (l layout) tiny() float64 { return math.Ldexp(1, 1-l.bias()-l.mantissa) }

// power returns 2ⁿ, if that is a normal number.
func power(n int) float64 { return math.Float64frombits(uint64(n+1023) << 52) }

func (l layout) finite(bits uint64) bool {
	e := bits >> l.mantissa & (1<<l.exponent - 1)
	if l == layouts[ncclapi.Float8E4M3] {
		return bits&0x7f != 0x7f
	}
	return e != 1<<l.exponent-1
}

func bitsAt(t ncclapi.DType, p []byte, i int) uint64 {
	switch t.Size() {
	case 1:
		return uint64(p[i])
	case 2:
		return uint64(binary.LittleEndian.Uint16(p[2*i:]))
	case 4:
		return uint64(binary.LittleEndian.Uint32(p[4*i:]))
	}
	return binary.LittleEndian.Uint64(p[8*i:])
}

func putBits(t ncclapi.DType, p []byte, i int, bits uint64) {
	switch t.Size() {
	case 1:
		p[i] = byte(bits)
	case 2:
		binary.LittleEndian.PutUint16(p[2*i:], uint16(bits))
	case 4:
		binary.LittleEndian.PutUint32(p[4*i:], uint32(bits))
	default:
		binary.LittleEndian.PutUint64(p[8*i:], bits)
	}
}

// valuesOf returns the number for each bit pattern of an 8 or 16-bit type, or NaN
// if it is not finite.
var valuesOf = map[ncclapi.DType]func() []float64{}

func init() {
	for t, l := range layouts {
		if t.Size() <= 2 {
			valuesOf[t] = sync.OnceValue(l.values)
		}
	}
}

func (l layout) values() []float64 {
	v := make([]float64, 1<<(1+l.exponent+l.mantissa))
	for bits := range v {
		v[bits] = math.NaN()
		if l.finite(uint64(bits)) {
			v[bits] = l.value(uint64(bits))
		}
	}
	return v
}

// unsigned is a type for the bits of elements.
type unsigned interface {
	uint8 | uint16 | uint32 | uint64
}

// as converts bytes to elements without a copy.
func as[T any](p []byte) []T {
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/int(unsafe.Sizeof(zero)))
}
