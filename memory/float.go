package memory

import (
	"strconv"

	"github.com/gochorus/chorus/internal/minifloat"
)

// The conversions of the floating-point types that Go lacks follow torch. Float32 is
// exact. The functions whose names end in Of round to nearest, ties to even, and
// convert a NaN to a NaN.

// Float16Of rounds x to a Float16Bits, as x.to(torch.float16) does. Numbers of 65520
// and more become infinity.
func Float16Of(x float32) Float16Bits { return Float16Bits(minifloat.Float16.Encode(x)) }

// BFloat16Of rounds x to a BFloat16Bits, as x.to(torch.bfloat16) does. Numbers that are
// too large become infinity; only finite numbers next to the largest float32 are.
func BFloat16Of(x float32) BFloat16Bits { return BFloat16Bits(minifloat.BFloat16.Encode(x)) }

// Float8E4M3Of rounds x to a Float8E4M3Bits, as x.to(torch.float8_e4m3fn) does. The
// type has no infinity: infinity and numbers greater than 464 become NaN. The
// conversions of CUDA and NCCL return the largest number, 448, instead.
func Float8E4M3Of(x float32) Float8E4M3Bits { return Float8E4M3Bits(minifloat.Float8E4M3.Encode(x)) }

// Float8E5M2Of rounds x to a Float8E5M2Bits, as x.to(torch.float8_e5m2) does. Numbers
// of 61440 and more become infinity. The conversions of CUDA and NCCL return the
// largest number, 57344, instead.
func Float8E5M2Of(x float32) Float8E5M2Bits { return Float8E5M2Bits(minifloat.Float8E5M2.Encode(x)) }

// Float32 returns the number.
func (x Float16Bits) Float32() float32 { return minifloat.Float16.Decode(uint16(x)) }

// Float32 returns the number.
func (x BFloat16Bits) Float32() float32 { return minifloat.BFloat16.Decode(uint16(x)) }

// Float32 returns the number.
func (x Float8E4M3Bits) Float32() float32 { return minifloat.Float8E4M3.Decode(uint16(x)) }

// Float32 returns the number.
func (x Float8E5M2Bits) Float32() float32 { return minifloat.Float8E5M2.Decode(uint16(x)) }

// String returns the shortest decimal that identifies the number as a float32.
func (x Float16Bits) String() string { return format(x.Float32()) }

// String returns the shortest decimal that identifies the number as a float32.
func (x BFloat16Bits) String() string { return format(x.Float32()) }

// String returns the shortest decimal that identifies the number as a float32.
func (x Float8E4M3Bits) String() string { return format(x.Float32()) }

// String returns the shortest decimal that identifies the number as a float32.
func (x Float8E5M2Bits) String() string { return format(x.Float32()) }

func format(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }
