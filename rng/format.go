package rng

import (
	"math"

	"github.com/gochorus/chorus/memory"
)

// A format describes an element type for fills and stand-ins.
type format struct {
	dtype  memory.DType
	c      string                // the type in rng.cu
	wide   bool                  // torch computes in float64, otherwise in float32
	digits int                   // significand bits; 0 for integers
	most   float64               // the largest value of a floating-point type
	low    int64                 // the smallest value of an integer type
	top    uint64                // the largest value of an integer type
	round  func(float64) float64 // to the nearest value of a floating-point type
}

func (f *format) holds(v int64) bool {
	if f.digits > 0 {
		return math.Abs(float64(v)) <= f.most
	}
	return v >= f.low && (v < 0 || uint64(v) <= f.top)
}

var formats = [...]format{
	memory.Bool:     {dtype: memory.Bool, c: "bool", top: 1},
	memory.Int8:     {dtype: memory.Int8, c: "i8", low: math.MinInt8, top: math.MaxInt8},
	memory.Uint8:    {dtype: memory.Uint8, c: "u8", top: math.MaxUint8},
	memory.Int16:    {dtype: memory.Int16, c: "i16", low: math.MinInt16, top: math.MaxInt16},
	memory.Uint16:   {dtype: memory.Uint16, c: "u16", top: math.MaxUint16},
	memory.Int32:    {dtype: memory.Int32, c: "i32", low: math.MinInt32, top: math.MaxInt32},
	memory.Uint32:   {dtype: memory.Uint32, c: "u32", top: math.MaxUint32},
	memory.Int64:    {dtype: memory.Int64, c: "i64", low: math.MinInt64, top: math.MaxInt64},
	memory.Uint64:   {dtype: memory.Uint64, c: "u64", top: math.MaxUint64},
	memory.Float16:  {dtype: memory.Float16, c: "Half", digits: 11, most: 65504, round: func(v float64) float64 { return fromHalf(toHalf(float32(v))) }},
	memory.BFloat16: {dtype: memory.BFloat16, c: "BFloat", digits: 8, most: 0x1.fep127, round: func(v float64) float64 { return fromBFloat(toBFloat(float32(v))) }},
	memory.Float32:  {dtype: memory.Float32, c: "float", digits: 24, most: math.MaxFloat32, round: func(v float64) float64 { return float64(float32(v)) }},
	memory.Float64:  {dtype: memory.Float64, c: "double", wide: true, digits: 53, most: math.MaxFloat64, round: func(v float64) float64 { return v }},
}

// of returns v rounded to a floating-point type like in torch, through float32
// unless f is wide.
func (f *format) of(v int64) float64 {
	if f.wide {
		return float64(v)
	}
	return f.round(float64(float32(v)))
}

// minus returns a-b as an element of a floating-point type.
func (f *format) minus(a, b float64) float64 {
	if f.wide {
		return a - b
	}
	return f.round(float64(float32(a) - float32(b)))
}

func formatOf[T memory.Element]() *format { return &formats[memory.DTypeOf[T]()] }

// caster returns the conversion from the type that torch computes in.
func caster[T memory.Element]() func(float64) T {
	var f any
	var z T
	switch any(z).(type) {
	case bool:
		f = func(v float64) bool { return v != 0 }
	case int8:
		f = func(v float64) int8 { return int8(int64(v)) }
	case uint8:
		f = func(v float64) uint8 { return uint8(int64(v)) }
	case int16:
		f = func(v float64) int16 { return int16(int64(v)) }
	case int32:
		f = func(v float64) int32 { return int32(int64(v)) }
	case int64:
		f = func(v float64) int64 { return int64(v) }
	case memory.Float16Bits:
		f = func(v float64) memory.Float16Bits { return toHalf(float32(v)) }
	case memory.BFloat16Bits:
		f = func(v float64) memory.BFloat16Bits { return toBFloat(float32(v)) }
	case float32:
		f = func(v float64) float32 { return float32(v) }
	case float64:
		f = func(v float64) float64 { return v }
	}
	return f.(func(float64) T)
}

// counter returns the conversion from an integer.
func counter[T memory.Element]() func(int64) T {
	var f any
	var z T
	switch any(z).(type) {
	case bool:
		f = func(v int64) bool { return v != 0 }
	case int8:
		f = func(v int64) int8 { return int8(v) }
	case uint8:
		f = func(v int64) uint8 { return uint8(v) }
	case int16:
		f = func(v int64) int16 { return int16(v) }
	case uint16:
		f = func(v int64) uint16 { return uint16(v) }
	case int32:
		f = func(v int64) int32 { return int32(v) }
	case uint32:
		f = func(v int64) uint32 { return uint32(v) }
	case int64:
		f = func(v int64) int64 { return v }
	case uint64:
		f = func(v int64) uint64 { return uint64(v) }
	case memory.Float16Bits:
		f = func(v int64) memory.Float16Bits { return toHalf(float32(v)) }
	case memory.BFloat16Bits:
		f = func(v int64) memory.BFloat16Bits { return toBFloat(float32(v)) }
	case float32:
		f = func(v int64) float32 { return float32(v) }
	case float64:
		f = func(v int64) float64 { return float64(v) }
	}
	return f.(func(int64) T)
}

// toHalf rounds to the nearest float16, ties to even.
//
//go:norace
func toHalf(x float32) memory.Float16Bits {
	b := math.Float32bits(x)
	sign, e, m := uint16(b>>16&0x8000), int(b>>23&0xff), b&0x7fffff
	switch {
	case e == 0xff && m != 0:
		return 0x7fff // the GPU's result for a NaN
	case e >= 127+16:
		return memory.Float16Bits(sign | 0x7c00)
	case e < 127-25:
		return memory.Float16Bits(sign)
	}
	shift := uint(13)
	m |= 0x800000
	if e < 127-14 { // subnormal: fewer bits are left
		shift += uint(127 - 14 - e)
		e = 127 - 15 // exponent 0, with an explicit leading one
	} else {
		m &= 0x7fffff
	}
	v := uint32(e-(127-15))<<10 + m>>shift
	rest, half := m&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > half || rest == half && v&1 == 1 {
		v++ // a carry out of the significand increments the exponent
	}
	return memory.Float16Bits(sign | uint16(v))
}

func fromHalf(h memory.Float16Bits) float64 {
	e, m := int(h>>10&31), float64(h&0x3ff)
	v := math.Ldexp(1+m/1024, e-15)
	switch {
	case e == 31 && m != 0:
		return math.NaN()
	case e == 31:
		v = math.Inf(1)
	case e == 0:
		v = math.Ldexp(m, -24)
	}
	if h>>15 == 1 {
		return -v
	}
	return v
}

// toBFloat rounds to the nearest bfloat16, ties to even.
//
//go:norace
func toBFloat(x float32) memory.BFloat16Bits {
	if x != x {
		return 0x7fff
	}
	b := math.Float32bits(x)
	return memory.BFloat16Bits((b + 0x7fff + b>>16&1) >> 16)
}

func fromBFloat(b memory.BFloat16Bits) float64 {
	return float64(math.Float32frombits(uint32(b) << 16))
}
