package memory

import (
	"strconv"

	"github.com/gochorus/chorus/internal/minifloat"
)

// The conversions of the floating-point types that Go lacks. They are those of
// torch: Float32 is exact, and the functions that end in Of round to nearest,
// ties to even, with a NaN for a NaN.

// Float16Of rounds x to a Float16, as x.to(torch.float16) does. What is too
// large becomes infinity: 65520 and more.
func Float16Of(x float32) Float16 { return Float16(minifloat.Float16.Encode(x)) }

// BFloat16Of rounds x to a BFloat16, as x.to(torch.bfloat16) does. What is too
// large becomes infinity, which of finite numbers only those next to the
// largest float32 are.
func BFloat16Of(x float32) BFloat16 { return BFloat16(minifloat.BFloat16.Encode(x)) }

// Float8E4M3Of rounds x to a Float8E4M3, as x.to(torch.float8_e4m3fn) does. The
// type has no infinity: what is too large, infinity or more than 464, becomes
// NaN. The conversions of CUDA and NCCL give the largest number, 448, instead.
func Float8E4M3Of(x float32) Float8E4M3 { return Float8E4M3(minifloat.Float8E4M3.Encode(x)) }

// Float8E5M2Of rounds x to a Float8E5M2, as x.to(torch.float8_e5m2) does. What
// is too large becomes infinity: 61440 and more. The conversions of CUDA and
// NCCL give the largest number, 57344, instead.
func Float8E5M2Of(x float32) Float8E5M2 { return Float8E5M2(minifloat.Float8E5M2.Encode(x)) }

// Float32 returns the number.
func (x Float16) Float32() float32 { return minifloat.Float16.Decode(uint16(x)) }

// Float32 returns the number.
func (x BFloat16) Float32() float32 { return minifloat.BFloat16.Decode(uint16(x)) }

// Float32 returns the number.
func (x Float8E4M3) Float32() float32 { return minifloat.Float8E4M3.Decode(uint16(x)) }

// Float32 returns the number.
func (x Float8E5M2) Float32() float32 { return minifloat.Float8E5M2.Decode(uint16(x)) }

// String returns the number in as few digits as tell it from other float32s.
func (x Float16) String() string { return format(x.Float32()) }

// String returns the number in as few digits as tell it from other float32s.
func (x BFloat16) String() string { return format(x.Float32()) }

// String returns the number in as few digits as tell it from other float32s.
func (x Float8E4M3) String() string { return format(x.Float32()) }

// String returns the number in as few digits as tell it from other float32s.
func (x Float8E5M2) String() string { return format(x.Float32()) }

func format(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }
