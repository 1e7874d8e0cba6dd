package kernel

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A Param is the type of a kernel's parameter.
type Param uint32

// The parameter types, as in C: a pointer to device memory, and numbers. Struct makes the
// types of structs.
const (
	Pointer Param = iota
	I32
	I64
	U32
	U64
	F32
	F64
	I8
	U8
	I16
	U16
	B8
	F16
	BF16
)

// virtualParams are the types on virtual devices.
var virtualParams = [...]machine.Param{
	Pointer: machine.PtrParam, I32: machine.Int32Param, I64: machine.Int64Param, U32: machine.Uint32Param,
	U64: machine.Uint64Param, F32: machine.Float32Param, F64: machine.Float64Param, I8: machine.Int8Param,
	U8: machine.Uint8Param, I16: machine.Int16Param, U16: machine.Uint16Param, B8: machine.BoolParam,
	F16: machine.Float16Param, BF16: machine.BFloat16Param,
}

// virtual returns the type on virtual devices.
func (p Param) virtual() machine.Param {
	if n, ok := p.isStruct(); ok {
		return machine.StructParam(n)
	}
	return virtualParams[p]
}

// Struct is the type of a struct parameter of that many bytes, passed by value with Bytes.
// All parameters of a kernel together have at most 4096 bytes, and structs begin at
// multiples of 16. The size is the C++ compiler's size of the struct, including padding at
// its end.
func Struct(bytes int) Param {
	if bytes < 1 || bytes > mostStruct {
		return badStruct
	}
	return Param(bytes) << 8
}

// The size of a struct is above the kind.
const (
	badStruct  = ^Param(0)
	kindMask   = 0xff
	mostStruct = 1 << 20 // larger than any valid struct, so that a launch can report the size
)

// isStruct reports whether the parameter is a struct, and its size.
func (p Param) isStruct() (bytes int, ok bool) {
	return int(p >> 8), p != badStruct && p > kindMask
}

// known reports whether the type is valid.
func (p Param) known() bool {
	_, ok := p.isStruct()
	return ok || int(p) < len(paramNames)
}

var paramNames = [...]string{
	Pointer: "pointer", I32: "int", I64: "long long", U32: "unsigned", U64: "unsigned long long", F32: "float", F64: "double",
	I8: "signed char", U8: "unsigned char", I16: "short", U16: "unsigned short", B8: "bool", F16: "__half", BF16: "__nv_bfloat16",
}

// String returns the C type.
func (p Param) String() string {
	if int(p) < len(paramNames) {
		return paramNames[p]
	}
	if n, ok := p.isStruct(); ok {
		return fmt.Sprintf("struct of %d bytes", n)
	}
	return fmt.Sprintf("Param(%d)", uint32(p))
}

// withArticle returns the type with its article for messages: an int, a float.
func withArticle(p Param) string {
	name := p.String()
	if strings.ContainsRune("aeiou", rune(name[0])) {
		return "an " + name
	}
	return "a " + name
}

// An Arg is the value of one parameter.
type Arg struct {
	kind      Param
	elem      memory.DType // of the memory at a pointer; Invalid if the caller does not say
	bits      uint64
	bytes     *byte // of a struct
	argDevice       // of a pointer
	err       error
}

type argDevice = kern.ArgDevice

// Ptr passes the address of x. If the source declares a pointer to another element type,
// the launch returns an error. A pointer to void, or to a type that Chorus does not know,
// accepts every element type; signed and unsigned integers of one size count as one type.
func Ptr[T memory.Element](x memory.Slice[T]) Arg {
	return Arg{kind: Pointer, elem: memory.DTypeOf[T](), bits: x.Ptr(), argDevice: kern.On(x.Device(), x.Len()*int(unsafe.Sizeof(*new(T)))), err: mem.Check("kernel: launch", x.Buffer(), x.Len(), nil)}
}

// Address passes the address of memory that the caller manages, such as memory.AllocRaw
// returns; 0 is a null pointer. Launch does not check that the device can access the memory and that it is open.
func Address(p uint64) Arg { return Arg{kind: Pointer, bits: p} }

// PinnedPtr passes the address of pinned memory, which every device can access. The caller
// calls RecordStream for the memory, or keeps it open until the kernel has ended.
func PinnedPtr[T memory.Element](h *memory.Pinned[T]) Arg {
	data := h.Data()
	if len(data) == 0 {
		return Arg{kind: Pointer, err: errors.New("pinned memory without elements, or closed")}
	}
	return Arg{kind: Pointer, elem: memory.DTypeOf[T](), bits: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))), argDevice: kern.On(nil, len(data)*int(unsafe.Sizeof(data[0])))}
}

// Bytes passes a struct by value, or a C array in a struct: b is its memory, with as many
// bytes as the type of Struct has. Launch copies it. The caller is responsible for
// addresses in it: nothing checks that their memory is open and on the right device.
func Bytes(b []byte) Arg {
	if len(b) == 0 {
		return Arg{err: errors.New("a struct without bytes")}
	}
	return Arg{kind: Struct(len(b)), bytes: unsafe.SliceData(b)}
}

// Scalar passes a number: an int32 as an int, a memory.Float16Bits as a __half. An 8-bit
// float is passed as an unsigned char.
func Scalar[T memory.Element](v T) Arg {
	kind, bits := numeric(v)
	return Arg{kind: kind, bits: bits}
}

// numeric returns the type of a number, and its bytes in the low bits. The compiler knows
// the size of T, so one case remains.
func numeric[T memory.Element](v T) (Param, uint64) {
	kind := scalarParam[T]()
	switch unsafe.Sizeof(v) {
	case 1:
		return kind, uint64(*(*uint8)(unsafe.Pointer(&v)))
	case 2:
		return kind, uint64(*(*uint16)(unsafe.Pointer(&v)))
	case 4:
		return kind, uint64(*(*uint32)(unsafe.Pointer(&v)))
	}
	return kind, *(*uint64)(unsafe.Pointer(&v))
}

// scalarParam returns the type of parameters for numbers of type T.
func scalarParam[T memory.Element]() Param { return numberParams[memory.DTypeOf[T]()] }

var numberParams = [...]Param{
	memory.Bool: B8, memory.Int8: I8, memory.Uint8: U8, memory.Int16: I16, memory.Uint16: U16, memory.Int32: I32, memory.Uint32: U32,
	memory.Int64: I64, memory.Uint64: U64, memory.Float16: F16, memory.BFloat16: BF16, memory.Float32: F32, memory.Float64: F64,
	memory.Float8E4M3: U8, memory.Float8E5M2: U8,
}
