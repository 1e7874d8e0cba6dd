// Package dtype is the table of element types. The row of a type has its size, range and
// format, and its names in torch, NCCL, CUDA and safetensors.
//
// A row also reads and writes single elements in host memory, converting like kernels and
// torch. These methods are for few elements, or for uses without a faster alternative: host
// tensors, and the Go functions that replace kernels on virtual devices. Format converts many
// elements at once.
//
// memory.DType is a number of this package under a public name.
package dtype

import (
	"iter"
	"math"
	"unsafe"
)

// The numbers of the types. They are stored in files, so they never change.
const (
	Invalid = iota
	Bool
	Int8
	Uint8
	Int16
	Uint16
	Int32
	Uint32
	Int64
	Uint64
	Float16
	BFloat16
	Float32
	Float64
	Float8E4M3
	Float8E5M2
	Count // of the numbers
)

// A Kind is a class of types.
type Kind uint8

// The kinds. The zero Kind is that of Invalid.
const (
	Boolean Kind = iota + 1
	Signed
	Unsigned
	Float
)

// A Type is a row of the table. A name is empty where the other party does not have the type.
type Type struct {
	Name   string // torch's, without the package
	Size   int    // bytes
	Kind   Kind
	Digits int // bits of an integer's magnitude, or of a significand with its leading one

	Scalar      string // c10::ScalarType, as PyTorch writes it
	Storage     string // the class of storages in files of torch.save
	Safetensors string
	NCCLTests   string // in nccl-tests; empty also means that NCCL does not have the type
	C           string // in CUDA C++
	Short       string // in the headers of the Chorus kernels
	CUDA        int32  // cudaDataType of matrix products, or -1

	MinExp, MaxExp int     // exponents of the smallest normal and the largest power of two, of floats
	Max            float64 // the largest finite number, of floats
	Infinity       uint64  // the largest bits of a positive float that is not a NaN
	Format         *Format // of floats that Go does not have

	load  func(b []byte, i int) Value
	store func(b []byte, i int, v Value)
}

var table = [Count]Type{
	Invalid: {Name: "invalid", CUDA: -1},

	Bool:   {"bool", 1, Boolean, 1, "Bool", "BoolStorage", "BOOL", "", "bool", "bool", -1, 0, 0, 0, 0, nil, loadBool, storeBool},
	Int8:   {"int8", 1, Signed, 7, "Char", "CharStorage", "I8", "int8", "signed char", "i8", -1, 0, 0, 0, 0, nil, loadInt[int8], storeInt[int8]},
	Uint8:  {"uint8", 1, Unsigned, 8, "Byte", "ByteStorage", "U8", "uint8", "unsigned char", "u8", -1, 0, 0, 0, 0, nil, loadInt[uint8], storeInt[uint8]},
	Int16:  {"int16", 2, Signed, 15, "Short", "ShortStorage", "I16", "", "short", "i16", -1, 0, 0, 0, 0, nil, loadInt[int16], storeInt[int16]},
	Uint16: {"uint16", 2, Unsigned, 16, "UInt16", "", "U16", "", "unsigned short", "u16", -1, 0, 0, 0, 0, nil, loadInt[uint16], storeInt[uint16]},
	Int32:  {"int32", 4, Signed, 31, "Int", "IntStorage", "I32", "int32", "int", "i32", -1, 0, 0, 0, 0, nil, loadInt[int32], storeInt[int32]},
	Uint32: {"uint32", 4, Unsigned, 32, "UInt32", "", "U32", "uint32", "unsigned", "u32", -1, 0, 0, 0, 0, nil, loadInt[uint32], storeInt[uint32]},
	Int64:  {"int64", 8, Signed, 63, "Long", "LongStorage", "I64", "int64", "long long", "i64", -1, 0, 0, 0, 0, nil, loadInt[int64], storeInt[int64]},
	Uint64: {"uint64", 8, Unsigned, 64, "UInt64", "", "U64", "uint64", "unsigned long long", "u64", -1, 0, 0, 0, 0, nil, loadUint64, storeUint64},

	Float16: {"float16", 2, Float, 11, "Half", "HalfStorage", "F16", "half", "__half", "Half", 2,
		-14, 15, 65504, 0x7c00, Half, loadHalf, storeHalf},
	BFloat16: {"bfloat16", 2, Float, 8, "BFloat16", "BFloat16Storage", "BF16", "bfloat16", "__nv_bfloat16", "BFloat", 14,
		-126, 127, 0x1.fep127, 0x7f80, BFloat, loadBFloat, storeBFloat},
	Float32: {"float32", 4, Float, 24, "Float", "FloatStorage", "F32", "float", "float", "float", 0,
		-126, 127, math.MaxFloat32, 0x7f800000, nil, loadFloat32, storeFloat32},
	Float64: {"float64", 8, Float, 53, "Double", "DoubleStorage", "F64", "double", "double", "double", 1,
		-1022, 1023, math.MaxFloat64, 0x7ff0000000000000, nil, loadFloat64, storeFloat64},
	Float8E4M3: {"float8_e4m3fn", 1, Float, 4, "Float8_e4m3fn", "", "F8_E4M3", "f8e4m3", "__nv_fp8_e4m3", "E4M3", 28,
		-6, 8, 448, 0x7e, E4M3, loadE4M3, storeE4M3},
	Float8E5M2: {"float8_e5m2", 1, Float, 3, "Float8_e5m2", "", "F8_E5M2", "f8e5m2", "__nv_fp8_e5m2", "E5M2", 29,
		-14, 15, 57344, 0x7c, E5M2, loadE5M2, storeE5M2},
}

// Of returns the row of a type, and the row of Invalid for a number that is not a type.
func Of[T ~uint8 | ~int](t T) *Type {
	if i := uint(t); i < Count {
		return &table[i]
	}
	return &table[Invalid]
}

// All ranges over the valid types.
func All() iter.Seq2[uint8, *Type] {
	return func(yield func(uint8, *Type) bool) {
		for i := uint8(1); i < Count; i++ {
			if !yield(i, &table[i]) {
				return
			}
		}
	}
}

var byCUDA = func() (list [32]*Type) {
	for _, t := range All() {
		if t.CUDA >= 0 {
			list[t.CUDA] = t
		}
	}
	return list
}()

// ByCUDA returns the row of a cudaDataType that matrix products can have, or nil.
func ByCUDA[T ~int32](t T) *Type {
	if i := uint32(t); i < uint32(len(byCUDA)) {
		return byCUDA[i]
	}
	return nil
}

// IsFloat reports whether the type is a floating-point type.
func (t *Type) IsFloat() bool { return t.Kind == Float }

// IsFloat8 reports whether the type is an 8-bit float, which supports only copies and conversions.
func (t *Type) IsFloat8() bool { return t.Kind == Float && t.Size == 1 }

// Load returns element i of b.
func (t *Type) Load(b []byte, i int) Value { return t.load(b, i) }

// Store converts v and writes it to element i of b. An integer type truncates a float, and
// keeps the low bits of an integer; the result is undefined if it cannot represent the
// truncated float.
func (t *Type) Store(b []byte, i int, v Value) { t.store(b, i, v) }

// Round rounds v to a floating-point type. Types that Go does not have are rounded through
// float32, as in kernels.
func (t *Type) Round(v Value) float64 {
	switch {
	case t.Format != nil:
		return float64(t.Format.Decode(t.Format.Encode(v.Float32())))
	case t.Size == 8:
		return v.Float64()
	}
	return float64(v.Float32())
}

// Wrap returns the value of an integer type with the low bits of v. For bool it returns 1 if
// v is not 0.
func (t *Type) Wrap(v int64) int64 {
	unused := 64 - 8*t.Size
	switch t.Kind {
	case Boolean:
		if v != 0 {
			return 1
		}
		return 0
	case Signed:
		return v << unused >> unused
	}
	return int64(uint64(v) << unused >> unused)
}

// A Value is the value of one element. The zero Value is the float 0.
type Value struct {
	f        float64
	i        int64
	whole    bool // the value is i
	unsigned bool // i holds the bits of a uint64
}

// FloatValue returns a value of a floating-point type.
func FloatValue(f float64) Value { return Value{f: f} }

// IntValue returns a value of an integer type or bool.
func IntValue(i int64) Value { return Value{i: i, whole: true} }

// UintValue returns a value of uint64, given by its bits.
func UintValue(bits int64) Value { return Value{i: bits, whole: true, unsigned: true} }

// Int64 returns the value of an integer type or bool; for uint64, its bits.
func (v Value) Int64() int64 { return v.i }

// Float64 returns the value, rounded if it is a large integer.
func (v Value) Float64() float64 {
	switch {
	case !v.whole:
		return v.f
	case v.unsigned:
		return float64(uint64(v.i))
	}
	return float64(v.i)
}

// Float32 returns the value, rounded once.
func (v Value) Float32() float32 {
	switch {
	case !v.whole:
		return float32(v.f)
	case v.unsigned:
		return float32(uint64(v.i))
	}
	return float32(v.i)
}

func as[T any](b []byte, i int) *T {
	return (*T)(unsafe.Pointer(&b[i*int(unsafe.Sizeof(*new(T)))]))
}

func loadBool(b []byte, i int) Value { return IntValue(min(1, int64(b[i]))) }

func storeBool(b []byte, i int, v Value) {
	b[i] = 0
	if v.whole && v.i != 0 || !v.whole && v.f != 0 { // also below 1
		b[i] = 1
	}
}

func loadInt[T int8 | uint8 | int16 | uint16 | int32 | uint32 | int64](b []byte, i int) Value {
	return IntValue(int64(*as[T](b, i)))
}

func storeInt[T int8 | uint8 | int16 | uint16 | int32 | uint32 | int64](b []byte, i int, v Value) {
	if !v.whole {
		v.i = int64(v.f)
	}
	*as[T](b, i) = T(v.i)
}

func loadUint64(b []byte, i int) Value { return UintValue(*as[int64](b, i)) }

func storeUint64(b []byte, i int, v Value) {
	switch {
	case v.whole:
		*as[int64](b, i) = v.i
	case v.f >= 1<<63:
		*as[uint64](b, i) = uint64(v.f)
	default:
		*as[int64](b, i) = int64(v.f)
	}
}

func loadFloat32(b []byte, i int) Value     { return FloatValue(float64(*as[float32](b, i))) }
func storeFloat32(b []byte, i int, v Value) { *as[float32](b, i) = v.Float32() }
func loadFloat64(b []byte, i int) Value     { return FloatValue(*as[float64](b, i)) }
func storeFloat64(b []byte, i int, v Value) { *as[float64](b, i) = v.Float64() }

func loadHalf(b []byte, i int) Value { return FloatValue(float64(Half.Decode(*as[uint16](b, i)))) }
func storeHalf(b []byte, i int, v Value) {
	*as[uint16](b, i) = Half.Encode(v.Float32())
}

func loadBFloat(b []byte, i int) Value { return FloatValue(float64(BFloat.Decode(*as[uint16](b, i)))) }
func storeBFloat(b []byte, i int, v Value) {
	*as[uint16](b, i) = BFloat.Encode(v.Float32())
}

func loadE4M3(b []byte, i int) Value { return FloatValue(float64(E4M3.Decode(uint16(b[i])))) }
func storeE4M3(b []byte, i int, v Value) {
	b[i] = byte(E4M3.Encode(v.Float32()))
}

func loadE5M2(b []byte, i int) Value { return FloatValue(float64(E5M2.Decode(uint16(b[i])))) }
func storeE5M2(b []byte, i int, v Value) {
	b[i] = byte(E5M2.Encode(v.Float32()))
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
