package memory

import (
	"fmt"
	"strconv"

	"github.com/gochorus/chorus/internal/dtype"
)

// A DType is the type of the elements of a slice or tensor at run time.
type DType uint8

// The element types. Each constant has its own declaration, so that go doc lists all of
// them.
const Invalid DType = dtype.Invalid
const Bool DType = dtype.Bool
const Int8 DType = dtype.Int8
const Uint8 DType = dtype.Uint8
const Int16 DType = dtype.Int16
const Uint16 DType = dtype.Uint16
const Int32 DType = dtype.Int32
const Uint32 DType = dtype.Uint32
const Int64 DType = dtype.Int64
const Uint64 DType = dtype.Uint64
const Float16 DType = dtype.Float16
const BFloat16 DType = dtype.BFloat16
const Float32 DType = dtype.Float32
const Float64 DType = dtype.Float64
const Float8E4M3 DType = dtype.Float8E4M3
const Float8E5M2 DType = dtype.Float8E5M2

// The floating-point types that Go lacks, stored as their bits. They are distinct
// types, so that their slices are not slices of integers.
type (
	Float16Bits    uint16 // IEEE 754 binary16, torch.float16
	BFloat16Bits   uint16 // the upper half of a float32, torch.bfloat16
	Float8E4M3Bits uint8  // torch.float8_e4m3fn
	Float8E5M2Bits uint8  // torch.float8_e5m2
)

// Element is the constraint of types that device memory can hold.
type Element interface {
	bool | int8 | uint8 | int16 | uint16 | int32 | uint32 | int64 | uint64 |
		Float16Bits | BFloat16Bits | float32 | float64 | Float8E4M3Bits | Float8E5M2Bits
}

// DTypeOf returns the DType of T.
func DTypeOf[T Element]() DType {
	var z T
	switch any(z).(type) {
	case bool:
		return Bool
	case int8:
		return Int8
	case uint8:
		return Uint8
	case int16:
		return Int16
	case uint16:
		return Uint16
	case int32:
		return Int32
	case uint32:
		return Uint32
	case int64:
		return Int64
	case uint64:
		return Uint64
	case Float16Bits:
		return Float16
	case BFloat16Bits:
		return BFloat16
	case float32:
		return Float32
	case float64:
		return Float64
	case Float8E4M3Bits:
		return Float8E4M3
	case Float8E5M2Bits:
		return Float8E5M2
	}
	return Invalid
}

// Size returns the width of one element in bytes.
func (t DType) Size() int {
	return dtype.Of(t).Size
}

// String returns torch's name of the type, such as "float8_e4m3fn".
func (t DType) String() string {
	if t < dtype.Count {
		return dtype.Of(t).Name
	}
	return fmt.Sprintf("DType(%d)", uint8(t))
}

// The conversions of the floating-point types that Go lacks follow torch. Float32 is
// exact. The functions whose names end in Of round to nearest, ties to even, and
// convert a NaN to a NaN.

// Float16Of rounds x to a Float16Bits, as x.to(torch.float16) does, so numbers
// of 65520 and more become infinity.
func Float16Of(x float32) Float16Bits { return Float16Bits(dtype.Half.Encode(x)) }

// BFloat16Of rounds x to a BFloat16Bits, as x.to(torch.bfloat16) does. Numbers that are
// too large become infinity; only finite numbers next to the largest float32 are.
func BFloat16Of(x float32) BFloat16Bits { return BFloat16Bits(dtype.BFloat.Encode(x)) }

// Float8E4M3Of rounds x to a Float8E4M3Bits, as x.to(torch.float8_e4m3fn) does. The
// type has no infinity: infinity and numbers greater than 464 become NaN. The
// conversions of CUDA and NCCL return the largest number, 448, instead.
func Float8E4M3Of(x float32) Float8E4M3Bits { return Float8E4M3Bits(dtype.E4M3.Encode(x)) }

// Float8E5M2Of rounds x to a Float8E5M2Bits, as x.to(torch.float8_e5m2) does.
// Numbers of 61440 and more become infinity, whereas the conversions of CUDA
// and NCCL return the largest number, 57344.
func Float8E5M2Of(x float32) Float8E5M2Bits { return Float8E5M2Bits(dtype.E5M2.Encode(x)) }

// Float32 returns the number.
func (x Float16Bits) Float32() float32 { return dtype.Half.Decode(uint16(x)) }

// Float32 returns the number.
func (x BFloat16Bits) Float32() float32 { return dtype.BFloat.Decode(uint16(x)) }

// Float32 returns the number.
func (x Float8E4M3Bits) Float32() float32 { return dtype.E4M3.Decode(uint16(x)) }

// Float32 returns the number.
func (x Float8E5M2Bits) Float32() float32 { return dtype.E5M2.Decode(uint16(x)) }

// String returns the shortest decimal that identifies the number as a float32.
func (x Float16Bits) String() string { return format(x.Float32()) }

// String returns the shortest decimal that identifies the number as a float32.
func (x BFloat16Bits) String() string { return format(x.Float32()) }

// String returns the shortest decimal that identifies the number as a float32.
func (x Float8E4M3Bits) String() string { return format(x.Float32()) }

// String returns the shortest decimal that identifies the number as a float32.
func (x Float8E5M2Bits) String() string { return format(x.Float32()) }

func format(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }
