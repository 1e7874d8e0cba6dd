// Package element reads and writes single elements of any type in host memory, and
// converts between types like kernels and torch.
//
// WrapDim has torch's rule for the dimensions of a tensor.
//
// These functions are for few elements, or for uses without a faster alternative: host
// tensors, and the Go stand-ins of kernels on virtual devices.
package element

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/memory"
)

// A Value is the value of one element. The zero Value is the float 0.
type Value struct {
	f        float64
	i        int64
	whole    bool // the value is i
	unsigned bool // i holds the bits of a uint64
}

// Float returns a value of a floating-point type.
func Float(f float64) Value { return Value{f: f} }

// Int returns a value of an integer type or bool.
func Int(i int64) Value { return Value{i: i, whole: true} }

// Uint returns a value of uint64, given by its bits.
func Uint(bits int64) Value { return Value{i: bits, whole: true, unsigned: true} }

// Int64 returns the value of an integer type or bool; for uint64, its bits.
func (v Value) Int64() int64 { return v.i }

// IsFloat reports whether a type is a floating-point type.
func IsFloat(t memory.DType) bool {
	return t == memory.Float16 || t == memory.BFloat16 || t == memory.Float32 || t == memory.Float64 || IsFloat8(t)
}

// IsFloat8 reports whether a type is an 8-bit float, which supports only copies and conversions.
func IsFloat8(t memory.DType) bool { return t == memory.Float8E4M3 || t == memory.Float8E5M2 }

func as[T any](b []byte, i int) *T {
	var z T
	return (*T)(unsafe.Pointer(&b[i*int(unsafe.Sizeof(z))]))
}

// Load returns element i of b, whose elements have type t.
func Load(t memory.DType, b []byte, i int) Value {
	switch t {
	case memory.Bool:
		return Int(min(1, int64(b[i])))
	case memory.Int8:
		return Int(int64(*as[int8](b, i)))
	case memory.Uint8:
		return Int(int64(b[i]))
	case memory.Int16:
		return Int(int64(*as[int16](b, i)))
	case memory.Uint16:
		return Int(int64(*as[uint16](b, i)))
	case memory.Int32:
		return Int(int64(*as[int32](b, i)))
	case memory.Uint32:
		return Int(int64(*as[uint32](b, i)))
	case memory.Int64:
		return Int(*as[int64](b, i))
	case memory.Uint64:
		return Uint(*as[int64](b, i))
	case memory.Float16:
		return Float(float64(as[memory.Float16Bits](b, i).Float32()))
	case memory.BFloat16:
		return Float(float64(as[memory.BFloat16Bits](b, i).Float32()))
	case memory.Float8E4M3:
		return Float(float64(as[memory.Float8E4M3Bits](b, i).Float32()))
	case memory.Float8E5M2:
		return Float(float64(as[memory.Float8E5M2Bits](b, i).Float32()))
	case memory.Float32:
		return Float(float64(*as[float32](b, i)))
	}
	return Float(*as[float64](b, i))
}

// Store converts v to type t and writes it to element i of b. If t is an integer
// type, a float is truncated; the result is undefined if t cannot represent it.
func Store(t memory.DType, b []byte, i int, v Value) {
	switch {
	case IsFloat(t):
		SetFloat(t, b, i, v.Round(t))
	case v.whole:
		SetInt(t, b, i, v.i)
	case t == memory.Bool && v.f != 0: // also below 1
		SetInt(t, b, i, 1)
	case t == memory.Uint64 && v.f >= 1<<63:
		SetInt(t, b, i, int64(uint64(v.f)))
	default:
		SetInt(t, b, i, int64(v.f))
	}
}

// Round rounds v to a floating-point type. Types that Go does not have are
// rounded through float32, like in kernels.
func (v Value) Round(t memory.DType) float64 {
	if t == memory.Float64 {
		switch {
		case v.whole && v.unsigned:
			return float64(uint64(v.i))
		case v.whole:
			return float64(v.i)
		}
		return v.f
	}
	var f float32
	switch {
	case v.whole && v.unsigned:
		f = float32(uint64(v.i))
	case v.whole:
		f = float32(v.i)
	default:
		f = float32(v.f)
	}
	switch t {
	case memory.Float16:
		f = memory.Float16Of(f).Float32()
	case memory.BFloat16:
		f = memory.BFloat16Of(f).Float32()
	case memory.Float8E4M3:
		f = memory.Float8E4M3Of(f).Float32()
	case memory.Float8E5M2:
		f = memory.Float8E5M2Of(f).Float32()
	}
	return float64(f)
}

// Wrap truncates v to the bits of an integer type. For bool it returns 1 if v is
// not 0.
func Wrap(t memory.DType, v int64) int64 {
	switch t {
	case memory.Bool:
		if v != 0 {
			return 1
		}
		return 0
	case memory.Int8:
		return int64(int8(v))
	case memory.Uint8:
		return int64(uint8(v))
	case memory.Int16:
		return int64(int16(v))
	case memory.Uint16:
		return int64(uint16(v))
	case memory.Int32:
		return int64(int32(v))
	case memory.Uint32:
		return int64(uint32(v))
	}
	return v
}

// SetInt writes v, wrapped, to element i of b, whose type is an integer type or bool.
func SetInt(t memory.DType, b []byte, i int, v int64) {
	switch v = Wrap(t, v); t.Size() {
	case 1:
		*as[int8](b, i) = int8(v)
	case 2:
		*as[int16](b, i) = int16(v)
	case 4:
		*as[int32](b, i) = int32(v)
	default:
		*as[int64](b, i) = v
	}
}

// SetFloat writes v to element i of b, whose type is a floating-point type.
func SetFloat(t memory.DType, b []byte, i int, v float64) {
	switch t {
	case memory.Float16:
		*as[memory.Float16Bits](b, i) = memory.Float16Of(float32(v))
	case memory.BFloat16:
		*as[memory.BFloat16Bits](b, i) = memory.BFloat16Of(float32(v))
	case memory.Float8E4M3:
		*as[memory.Float8E4M3Bits](b, i) = memory.Float8E4M3Of(float32(v))
	case memory.Float8E5M2:
		*as[memory.Float8E5M2Bits](b, i) = memory.Float8E5M2Of(float32(v))
	case memory.Float32:
		*as[float32](b, i) = float32(v)
	default:
		*as[float64](b, i) = v
	}
}

// FMA returns a*b+c rounded once, as the instruction of GPUs does. The product is exact in
// float64. Rounding the sum to odd, instead of to nearest, makes the second rounding correct.
//
//go:norace
func FMA(a, b, c float32) float32 {
	p, q := float64(a)*float64(b), float64(c)
	s := p + q
	v := s - p
	lost := (p - (s - v)) + (q - v)
	if lost != 0 && math.Float64bits(s)&1 == 0 {
		s = math.Nextafter(s, math.Copysign(math.Inf(1), lost))
	}
	return float32(s)
}

// WrapDim returns the dimension that dim means of n dimensions: a negative dim counts from
// the end (torch's maybe_wrap_dim). A tensor without dimensions counts as one with one.
func WrapDim(dim, n int) (int, error) {
	n = max(1, n)
	if dim < -n || dim >= n {
		return 0, fmt.Errorf("dimension out of range (expected to be in range of [%d, %d], but got %d)", -n, n-1, dim)
	}
	if dim < 0 {
		dim += n
	}
	return dim, nil
}
