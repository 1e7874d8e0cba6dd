package kernel

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A field of an argument struct is one parameter of a kernel.
type field struct {
	name   string
	offset uintptr
	param  Param
	elem   memory.DType // of the number, or of the slice
}

// A fieldType is an element type, and the Go types of a number, of a slice in device memory,
// and of a slice of the host.
type fieldType struct {
	number, slice, host reflect.Type
	elem                memory.DType
}

var fieldTypes = []fieldType{
	typeOf[bool](), typeOf[int8](), typeOf[uint8](), typeOf[int16](), typeOf[uint16](), typeOf[int32](), typeOf[uint32](),
	typeOf[int64](), typeOf[uint64](), typeOf[memory.Float16Bits](), typeOf[memory.BFloat16Bits](), typeOf[float32](),
	typeOf[float64](), typeOf[memory.Float8E4M3Bits](), typeOf[memory.Float8E5M2Bits](),
}

func typeOf[T memory.Element]() fieldType {
	return fieldType{reflect.TypeFor[T](), reflect.TypeFor[memory.Slice[T]](), reflect.TypeFor[[]T](), memory.DTypeOf[T]()}
}

// fieldsOf returns the fields of an argument struct.
func fieldsOf(t reflect.Type) ([]field, error) {
	if t.Kind() != reflect.Struct {
		return nil, fmt.Errorf("the arguments are of type %v: want a struct with a field for each parameter", t)
	}
	if t.NumField() > maxArgs {
		return nil, fmt.Errorf("%v has %d fields: at most %d", t, t.NumField(), maxArgs)
	}
	var fs []field
	for i := range t.NumField() {
		f := t.Field(i)
		at := slices.IndexFunc(fieldTypes, func(t fieldType) bool { return f.Type == t.number || f.Type == t.slice })
		if at < 0 {
			return nil, fmt.Errorf("field %s of %v is of type %v: want a memory.Slice, or a number such as int32 or float32", f.Name, t, f.Type)
		}
		p := field{name: f.Name, offset: f.Offset, param: Pointer, elem: fieldTypes[at].elem}
		if f.Type == fieldTypes[at].number {
			p.param = numberParams[p.elem]
		}
		fs = append(fs, p)
	}
	return fs, nil
}

// encode converts the struct at p to arguments, which are zero or of an earlier launch.
func encode(fs []field, p unsafe.Pointer, args []Arg) {
	for i := range fs {
		f, a := &fs[i], &args[i]
		at := unsafe.Add(p, f.offset)
		a.kind, a.elem = f.param, f.elem
		if f.param == Pointer { // as Ptr does; slices of all types have one layout
			x := (*memory.Slice[uint8])(at)
			a.bits, a.argDevice = x.Ptr(), kern.On(x.Device(), x.Len()*f.elem.Size())
			a.err = mem.Check("kernel: launch", x.Buffer(), x.Len(), nil)
			continue
		}
		a.argDevice, a.err = argDevice{}, nil
		switch f.elem.Size() {
		case 1:
			a.bits = uint64(*(*uint8)(at))
		case 2:
			a.bits = uint64(*(*uint16)(at))
		case 4:
			a.bits = uint64(*(*uint32)(at))
		default:
			a.bits = *(*uint64)(at)
		}
	}
}

// decode writes the arguments of a launch on a virtual device to the struct at p. inputs
// has the parameters that the kernel does not write through.
func decode(fs []field, c *Call, p unsafe.Pointer, inputs []bool) {
	call := kern.CallOf(c)
	for i := range fs {
		f := &fs[i]
		at := unsafe.Add(p, f.offset)
		bits := call.Bits(i, f.param.virtual())
		if f.param == Pointer {
			bytes := call.Bits(len(fs)+i, machine.Int64Param)
			h := (*mem.SliceHeader)(at)
			h.Offset, h.Len = uintptr(bits), int(bytes)/f.elem.Size()
			c.spans = append(c.spans, span{bits, bits + bytes, inputs[i]})
			continue
		}
		switch f.elem.Size() {
		case 1:
			*(*uint8)(at) = uint8(bits)
		case 2:
			*(*uint16)(at) = uint16(bits)
		case 4:
			*(*uint32)(at) = uint32(bits)
		default:
			*(*uint64)(at) = bits
		}
	}
}

// compareFields returns an error if the fields contradict the parameters in the source.
func compareFields(fs []field, ps []declared) error {
	if ps == nil {
		return fmt.Errorf("its parameters cannot be read in the source: declare it once, without macros and templates among the parameters, or use a Def with Params")
	}
	if len(ps) != len(fs) {
		return fmt.Errorf("it has %d parameters in the source, but its arguments have %d fields", len(ps), len(fs))
	}
	for i := range fs {
		f, p := &fs[i], &ps[i]
		if at := slices.IndexFunc(ps, f.hasNameOf); at >= 0 && at != i && !f.hasNameOf(*p) {
			return fmt.Errorf("field %d is %s, but parameter %d is %q and %q is parameter %d: order the fields as the parameters", i, f.name, i, p.text, ps[at].text, at)
		}
		if !f.fits(p) {
			return fmt.Errorf("parameter %d is %q in the source, but field %s is %s", i, p.text, f.name, f.goType())
		}
	}
	return nil
}

// hasNameOf reports whether the field and the parameter have one name, as in Go and in C.
func (f *field) hasNameOf(p declared) bool {
	return strings.EqualFold(f.name, strings.ReplaceAll(p.name, "_", ""))
}

func (f *field) fits(p *declared) bool {
	if f.param == Pointer {
		return p.pointer && p.takes(f.elem)
	}
	return !p.pointer && (p.types == nil || slices.Contains(p.types, f.elem))
}

// goType returns the type of the field for messages.
func (f *field) goType() string {
	if f.param == Pointer {
		return "a slice of " + f.elem.String()
	}
	return f.elem.String()
}
