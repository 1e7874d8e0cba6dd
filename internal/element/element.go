// Package element reads and writes single elements of any type in host memory, and
// converts between the types as kernels and torch do.
//
// Functions of single elements are for what is small or has no faster way: host
// tensors, and the Go functions that stand in for kernels on virtual devices.
package element

import (
	"unsafe"

	"github.com/gochorus/chorus/memory"
)

// A Value is the value of one element. The zero Value is the float 0.
type Value struct {
	f        float64
	i        int64
	whole    bool // it is i
	unsigned bool // whose bits are those of a uint64
}

// Float is a value of a floating-point type.
func Float(f float64) Value { return Value{f: f} }

// Int is a value of an integer type or bool.
func Int(i int64) Value { return Value{i: i, whole: true} }

// Uint is a value of uint64, given as its bits.
func Uint(bits int64) Value { return Value{i: bits, whole: true, unsigned: true} }

// Int64 is the value of an integer type or bool; of a uint64, its bits.
func (v Value) Int64() int64 { return v.i }

// IsFloat reports whether the numbers of a type are floating-point.
func IsFloat(t memory.DType) bool {
	return t == memory.Float16T || t == memory.BFloat16T || t == memory.Float32 || t == memory.Float64 || IsFloat8(t)
}

// IsFloat8 reports whether a type is one of the two that only move and convert.
func IsFloat8(t memory.DType) bool { return t == memory.Float8E4M3T || t == memory.Float8E5M2T }

func as[T any](b []byte, i int) *T {
	var z T
	return (*T)(unsafe.Pointer(&b[i*int(unsafe.Sizeof(z))]))
}

// Load reads element i of b, elements of type t.
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
	case memory.Float16T:
		return Float(float64(as[memory.Float16](b, i).Float32()))
	case memory.BFloat16T:
		return Float(float64(as[memory.BFloat16](b, i).Float32()))
	case memory.Float8E4M3T:
		return Float(float64(as[memory.Float8E4M3](b, i).Float32()))
	case memory.Float8E5M2T:
		return Float(float64(as[memory.Float8E5M2](b, i).Float32()))
	case memory.Float32:
		return Float(float64(*as[float32](b, i)))
	}
	return Float(*as[float64](b, i))
}

// Store converts v to type t and writes it as element i of b. A float is cut
// towards zero where t is an integer; one that t cannot hold is undefined.
func Store(t memory.DType, b []byte, i int, v Value) {
	switch {
	case IsFloat(t):
		SetFloat(t, b, i, v.Round(t))
	case v.whole:
		SetInt(t, b, i, v.i)
	case t == memory.Bool && v.f != 0: // less than 1, perhaps
		SetInt(t, b, i, 1)
	case t == memory.Uint64 && v.f >= 1<<63:
		SetInt(t, b, i, int64(uint64(v.f)))
	default:
		SetInt(t, b, i, int64(v.f))
	}
}

// Round rounds v to a floating-point type, those that Go lacks by way of a
// float32, as kernels do.
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
	case memory.Float16T:
		f = memory.Float16Of(f).Float32()
	case memory.BFloat16T:
		f = memory.BFloat16Of(f).Float32()
	case memory.Float8E4M3T:
		f = memory.Float8E4M3Of(f).Float32()
	case memory.Float8E5M2T:
		f = memory.Float8E5M2Of(f).Float32()
	}
	return float64(f)
}

// Wrap takes the low bits that an integer type has; a bool is whether there are
// any.
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

// SetInt writes v, wrapped, as element i of b, whose type is an integer or bool.
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

// SetFloat writes v as element i of b, whose type is floating-point.
func SetFloat(t memory.DType, b []byte, i int, v float64) {
	switch t {
	case memory.Float16T:
		*as[memory.Float16](b, i) = memory.Float16Of(float32(v))
	case memory.BFloat16T:
		*as[memory.BFloat16](b, i) = memory.BFloat16Of(float32(v))
	case memory.Float8E4M3T:
		*as[memory.Float8E4M3](b, i) = memory.Float8E4M3Of(float32(v))
	case memory.Float8E5M2T:
		*as[memory.Float8E5M2](b, i) = memory.Float8E5M2Of(float32(v))
	case memory.Float32:
		*as[float32](b, i) = float32(v)
	default:
		*as[float64](b, i) = v
	}
}
