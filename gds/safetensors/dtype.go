package safetensors

import "fmt"

// A DType is the type of a tensor's elements.
type DType uint8

// The types of the format, in the order of the reference implementation. Its
// writer stores the last types first, so that wide elements are aligned.
const (
	Invalid DType = iota
	Bool
	F4 // two elements in a byte; torch.float4_e2m1fn_x2 counts bytes, which halves the last dimension
	F6E2M3
	F6E3M2
	U8
	I8
	F8E5M2
	F8E4M3 // torch.float8_e4m3fn
	F8E8M0
	F8E4M3FNUZ
	F8E5M2FNUZ
	I16
	U16
	F16
	BF16
	I32
	U32
	F32
	C64 // two float32
	F64
	I64
	U64
)

var dtypes = [...]struct {
	name string
	bits int
}{
	Invalid: {"invalid", 0}, Bool: {"BOOL", 8}, F4: {"F4", 4}, F6E2M3: {"F6_E2M3", 6}, F6E3M2: {"F6_E3M2", 6},
	U8: {"U8", 8}, I8: {"I8", 8}, F8E5M2: {"F8_E5M2", 8}, F8E4M3: {"F8_E4M3", 8}, F8E8M0: {"F8_E8M0", 8},
	F8E4M3FNUZ: {"F8_E4M3FNUZ", 8}, F8E5M2FNUZ: {"F8_E5M2FNUZ", 8},
	I16: {"I16", 16}, U16: {"U16", 16}, F16: {"F16", 16}, BF16: {"BF16", 16},
	I32: {"I32", 32}, U32: {"U32", 32}, F32: {"F32", 32},
	C64: {"C64", 64}, F64: {"F64", 64}, I64: {"I64", 64}, U64: {"U64", 64},
}

var dtypeOf = func() map[string]DType {
	m := make(map[string]DType, len(dtypes))
	for t := Bool; int(t) < len(dtypes); t++ {
		m[dtypes[t].name] = t
	}
	return m
}()

// ParseDType returns the type with a name as in a header, such as "BF16".
func ParseDType(name string) (DType, error) {
	if t, ok := dtypeOf[name]; ok {
		return t, nil
	}
	return Invalid, fmt.Errorf("safetensors: unknown dtype %q", short(name))
}

// Bits returns the size of an element in bits; it is less than 8 for the smallest
// types, and 0 for a type that is not part of the format.
func (t DType) Bits() int {
	if int(t) < len(dtypes) {
		return dtypes[t].bits
	}
	return 0
}

// String returns the name as in a header, such as "F8_E4M3".
func (t DType) String() string {
	if int(t) < len(dtypes) {
		return dtypes[t].name
	}
	return fmt.Sprintf("DType(%d)", uint8(t))
}
