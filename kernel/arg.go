package kernel

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/virtual"
	"github.com/gochorus/chorus/memory"
)

// A Param is the type of a kernel's parameter.
type Param uint32

// The parameter types, as in C: a pointer to device memory, and numbers. Struct makes
// those of structs.
const (
	Pointer = Param(virtual.PtrParam)
	I32     = Param(virtual.Int32Param)
	I64     = Param(virtual.Int64Param)
	U32     = Param(virtual.Uint32Param)
	U64     = Param(virtual.Uint64Param)
	F32     = Param(virtual.Float32Param)
	F64     = Param(virtual.Float64Param)
	I8      = Param(virtual.Int8Param)
	U8      = Param(virtual.Uint8Param)
	I16     = Param(virtual.Int16Param)
	U16     = Param(virtual.Uint16Param)
	B8      = Param(virtual.BoolParam)
	F16     = Param(virtual.Float16Param)
	BF16    = Param(virtual.BFloat16Param)
)

// Struct is the type of a struct that the kernel takes by value, of that many bytes,
// which Bytes passes. A kernel's parameters have 4096 bytes in all at most, structs
// beginning at multiples of 16. The size is that which the C++ compiler gives the
// struct, padding at its end included.
func Struct(bytes int) Param {
	if bytes < 1 || bytes > mostStruct {
		return badStruct
	}
	return Param(virtual.StructParam(bytes))
}

// The size of a struct is above the kind.
const (
	badStruct  = ^Param(0)
	kindMask   = 0xff
	mostStruct = 1 << 20 // that can be said, and be refused as too large
)

// isStruct reports whether the parameter is a struct, and how large.
func (p Param) isStruct() (bytes int, ok bool) {
	return int(p >> 8), p != badStruct && p > kindMask
}

// known reports whether there is such a type.
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

// withArticle returns the type as messages name it: an int, a float.
func withArticle(p Param) string {
	name := p.String()
	if strings.ContainsRune("aeiou", rune(name[0])) {
		return "an " + name
	}
	return "a " + name
}

// An Arg is the value of one parameter.
type Arg struct {
	kind  Param
	elem  memory.DType // behind a pointer; Invalid if the caller does not say
	bits  uint64
	bytes *byte          // of a struct
	dev   *device.Device // of a pointer
	err   error
}

// Ptr passes the address of x. If the source declares a pointer to another element type,
// the launch returns an error. A pointer to void, and to a type that Chorus does not know,
// takes every element type; integers of one size are one type.
func Ptr[T memory.Element](x memory.Slice[T]) Arg {
	return Arg{kind: Pointer, elem: memory.DTypeOf[T](), bits: uint64(x.Raw()), dev: x.Device(), err: x.Check("kernel: launch", nil)}
}

// PeerPtr passes the address of x, which may be of another device than the
// launch's: one whose memory that device reaches. For Chorus's own packages, which
// open the way (memory.Reach).
func PeerPtr[T memory.Element](x memory.Slice[T]) Arg {
	a := Ptr(x)
	a.dev = nil
	return a
}

// Address passes an address that the device reaches, of memory that the caller keeps.
// For Chorus's own packages.
func Address(p uint64) Arg { return Arg{kind: Pointer, bits: p} }

// PinnedPtr passes the address of pinned memory, which every device reaches. The
// caller tells the memory, by RecordStream, or keeps it open until the kernel has
// ended. For Chorus's own packages.
func PinnedPtr[T memory.Element](h *memory.Pinned[T]) Arg {
	data := h.Data()
	if len(data) == 0 {
		return Arg{kind: Pointer, err: errors.New("pinned memory without elements, or closed")}
	}
	return Arg{kind: Pointer, elem: memory.DTypeOf[T](), bits: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data))))}
}

// Null passes a null pointer, as Ptr of the zero Slice does.
func Null() Arg { return Arg{kind: Pointer} }

// Bytes passes a struct by value, or a C array in one: b is what it is in memory, of as
// many bytes as Struct says. They have been read when Launch returns. Addresses in it are
// the caller's concern: nothing checks whose memory they are of and that it is open.
func Bytes(b []byte) Arg {
	if len(b) == 0 {
		return Arg{err: errors.New("a struct without bytes")}
	}
	return Arg{kind: Struct(len(b)), bytes: unsafe.SliceData(b)}
}

// Int32 passes an int.
func Int32(v int32) Arg { return Arg{kind: I32, bits: uint64(uint32(v))} }

// Int64 passes a long long.
func Int64(v int64) Arg { return Arg{kind: I64, bits: uint64(v)} }

// Uint32 passes an unsigned.
func Uint32(v uint32) Arg { return Arg{kind: U32, bits: uint64(v)} }

// Uint64 passes an unsigned long long.
func Uint64(v uint64) Arg { return Arg{kind: U64, bits: v} }

// Float32 passes a float.
func Float32(v float32) Arg { return Arg{kind: F32, bits: uint64(math.Float32bits(v))} }

// Float64 passes a double.
func Float64(v float64) Arg { return Arg{kind: F64, bits: math.Float64bits(v)} }

// Int8 passes a signed char.
func Int8(v int8) Arg { return Arg{kind: I8, bits: uint64(uint8(v))} }

// Uint8 passes an unsigned char.
func Uint8(v uint8) Arg { return Arg{kind: U8, bits: uint64(v)} }

// Int16 passes a short.
func Int16(v int16) Arg { return Arg{kind: I16, bits: uint64(uint16(v))} }

// Uint16 passes an unsigned short.
func Uint16(v uint16) Arg { return Arg{kind: U16, bits: uint64(v)} }

// Bool passes a bool.
func Bool(v bool) Arg {
	if v {
		return Arg{kind: B8, bits: 1}
	}
	return Arg{kind: B8}
}

// Float16 passes a __half.
func Float16(v memory.Float16) Arg { return Arg{kind: F16, bits: uint64(v)} }

// BFloat16 passes a __nv_bfloat16.
func BFloat16(v memory.BFloat16) Arg { return Arg{kind: BF16, bits: uint64(v)} }
