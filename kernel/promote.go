package kernel

import (
	"fmt"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// promoted are the types in the table of promotions, in the order of its rows and columns.
var promoted = [...]memory.DType{memory.Bool, memory.Uint8, memory.Int8, memory.Int16, memory.Int32, memory.Int64,
	memory.Float16, memory.BFloat16, memory.Float32, memory.Float64}

// promotions is torch.promote_types: the smallest type that represents the numbers of
// both. A 16-bit float type is considered to represent all integers, regardless of range;
// two different 16-bit float types need a float32.
var promotions = func() [len(promoted)][len(promoted)]memory.DType {
	const (
		bl = memory.Bool
		u1 = memory.Uint8
		i1 = memory.Int8
		i2 = memory.Int16
		i4 = memory.Int32
		i8 = memory.Int64
		f2 = memory.Float16
		bf = memory.BFloat16
		f4 = memory.Float32
		f8 = memory.Float64
	)
	return [len(promoted)][len(promoted)]memory.DType{
		{bl, u1, i1, i2, i4, i8, f2, bf, f4, f8}, // bool
		{u1, u1, i2, i2, i4, i8, f2, bf, f4, f8}, // uint8
		{i1, i2, i1, i2, i4, i8, f2, bf, f4, f8}, // int8
		{i2, i2, i2, i2, i4, i8, f2, bf, f4, f8}, // int16
		{i4, i4, i4, i4, i4, i8, f2, bf, f4, f8}, // int32
		{i8, i8, i8, i8, i8, i8, f2, bf, f4, f8}, // int64
		{f2, f2, f2, f2, f2, f2, f2, f4, f4, f8}, // float16
		{bf, bf, bf, bf, bf, bf, f4, bf, f4, f8}, // bfloat16
		{f4, f4, f4, f4, f4, f4, f4, f4, f4, f8}, // float32
		{f8, f8, f8, f8, f8, f8, f8, f8, f8, f8}, // float64
	}
}()

// Promote returns the smallest type that represents the numbers of both a and b
// (torch.promote_types). If one is memory.Invalid, it returns the other one. Some pairs
// have no such type: unsigned integers of 16 bits or more with other integers, and 8-bit
// floats with any other type.
func Promote(a, b memory.DType) (memory.DType, error) {
	switch {
	case a == b || b == memory.Invalid:
		return a, nil
	case a == memory.Invalid:
		return b, nil
	case element.IsFloat8(a) || element.IsFloat8(b):
		return 0, fmt.Errorf("no type has the numbers of both %s and %s: convert one of them", a, b)
	}
	row, column := placeOf(a), placeOf(b)
	switch {
	case row >= 0 && column >= 0:
		return promotions[row][column], nil
	case element.IsFloat(a): // b is an unsigned integer of 16 bits or more
		return a, nil
	case element.IsFloat(b):
		return b, nil
	}
	return 0, fmt.Errorf("torch has no type for the numbers of both %s and %s: convert one of them", a, b)
}

func placeOf(t memory.DType) int {
	for i, p := range promoted {
		if p == t {
			return i
		}
	}
	return -1
}

// resultType is torch.result_type for slices with the promoted type arrays, and for single
// numbers with the type numbers: bool, int64 or float64. A number counts only if it has a
// higher category, and then a float32 is enough.
func resultType(arrays, numbers memory.DType) (memory.DType, error) {
	if numbers == memory.Float64 {
		numbers = memory.Float32
	}
	switch {
	case element.IsFloat(arrays):
		return arrays, nil
	case arrays == memory.Invalid || arrays == memory.Bool || element.IsFloat(numbers):
		return Promote(arrays, numbers)
	}
	return arrays, nil
}

// CanCast reports whether a result of type from may be stored as type to (torch.can_cast):
// floats not as integers, and other types not as bool.
func CanCast(from, to memory.DType) bool {
	return !(element.IsFloat(from) && !element.IsFloat(to)) && !(from != memory.Bool && to == memory.Bool)
}
