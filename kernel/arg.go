package kernel

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A Param is the type of a kernel's parameter.
type Param uint32

// The parameter types, as in C: a pointer to device memory, and numbers. Struct returns the
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

// params has the types of parameters by kind: on virtual devices, and as an element type.
var params = [...]struct {
	virtual machine.Param
	elem    memory.DType // Invalid for a pointer
}{
	Pointer: {machine.PtrParam, memory.Invalid}, B8: {machine.BoolParam, memory.Bool},
	I8: {machine.Int8Param, memory.Int8}, U8: {machine.Uint8Param, memory.Uint8},
	I16: {machine.Int16Param, memory.Int16}, U16: {machine.Uint16Param, memory.Uint16},
	I32: {machine.Int32Param, memory.Int32}, U32: {machine.Uint32Param, memory.Uint32},
	I64: {machine.Int64Param, memory.Int64}, U64: {machine.Uint64Param, memory.Uint64},
	F16: {machine.Float16Param, memory.Float16}, BF16: {machine.BFloat16Param, memory.BFloat16},
	F32: {machine.Float32Param, memory.Float32}, F64: {machine.Float64Param, memory.Float64},
}

// elem returns the element type of a number, or Invalid for pointers and structs.
func (p Param) elem() memory.DType {
	if int(p) < len(params) {
		return params[p].elem
	}
	return memory.Invalid
}

// virtual returns the type on virtual devices.
func (p Param) virtual() machine.Param {
	if n, ok := p.isStruct(); ok {
		return machine.StructParam(n)
	}
	return params[p].virtual
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
	return ok || int(p) < len(params)
}

// String returns the C type.
func (p Param) String() string {
	if p == Pointer {
		return "pointer"
	}
	if elem := p.elem(); elem != memory.Invalid {
		return dtype.Of(elem).C
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

type argDevice = inside.ArgDevice

// Ptr passes the address of x. If the source declares a pointer to another element type,
// the launch returns an error. A pointer to void, or to a type that Chorus does not know,
// accepts every element type; signed and unsigned integers of one size count as one type.
func Ptr[T memory.Element](x memory.Slice[T]) Arg {
	return Arg{kind: Pointer, elem: memory.DTypeOf[T](), bits: x.Ptr(), argDevice: inside.ArgOn(x.Device(), x.Len()*int(unsafe.Sizeof(*new(T)))), err: inside.CheckBuffer("kernel: launch", x.Buffer(), x.Len(), nil)}
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
	return Arg{kind: Pointer, elem: memory.DTypeOf[T](), bits: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))), argDevice: inside.ArgOn(nil, len(data)*int(unsafe.Sizeof(data[0])))}
}

// Bytes passes a struct by value, or a C array in a struct: b is its memory,
// with as many bytes as the type of Struct has, which Launch copies. The caller
// is responsible for addresses in it: nothing checks that their memory is open
// and on the right device.
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

// numberParams has the types of parameters by element type; an 8-bit float is passed as its bits.
var numberParams = func() (list [dtype.Count]Param) {
	for p := range params {
		if elem := params[p].elem; elem != memory.Invalid {
			list[elem] = Param(p)
		}
	}
	list[memory.Float8E4M3], list[memory.Float8E5M2] = U8, U8
	return list
}()

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
			a.bits, a.argDevice = x.Ptr(), inside.ArgOn(x.Device(), x.Len()*f.elem.Size())
			a.err = inside.CheckBuffer("kernel: launch", x.Buffer(), x.Len(), nil)
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
	call := inside.CallOf(c)
	for i := range fs {
		f := &fs[i]
		at := unsafe.Add(p, f.offset)
		bits := call.Bits(i, f.param.virtual())
		if f.param == Pointer {
			bytes := call.Bits(len(fs)+i, machine.Int64Param)
			h := (*inside.SliceHeader)(at)
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

// A signature is the parsed signature of the last function template of a source.
type signature struct {
	name     string
	params   []parameter
	byReturn bool // the function returns its only output
}

type parameter struct {
	name string
	role role // input, output or scalar
}

var (
	template = regexp.MustCompile(`template\s*<\s*([^>]*)>\s*([\w:\s]+?)\s+(\w+)\s*\(`)
	oneType  = regexp.MustCompile(`^(?:typename|class)\s+\w+\s*$`)
	words    = regexp.MustCompile(`\w+`)
)

// parse parses the source of an element-wise function.
func parse(code string) (*signature, error) {
	code = withoutComments(code)
	all := template.FindAllStringSubmatchIndex(code, -1)
	if len(all) == 0 {
		return nil, fmt.Errorf("there is no function template: want template <typename T> T name(T x, ...) { ... }")
	}
	m := all[len(all)-1]
	sig := &signature{name: code[m[6]:m[7]]}
	if types := code[m[2]:m[3]]; !oneType.MatchString(types) {
		return nil, fmt.Errorf("%s is a template of <%s>: want one type, <typename T>", sig.name, types)
	}
	before := words.FindAllString(code[m[4]:m[5]], -1)
	sig.byReturn = before[len(before)-1] != "void"
	list, rest, ok := strings.Cut(code[m[1]:], ")")
	if !ok || !strings.HasPrefix(strings.TrimSpace(rest), "{") {
		return nil, fmt.Errorf("%s has no body behind its parameters: want name(T x, ...) { ... }", sig.name)
	}
	for i, text := range strings.Split(list, ",") {
		p, err := parseParameter(text)
		if err != nil {
			return nil, fmt.Errorf("parameter %d of %s, %q: %w", i, sig.name, strings.TrimSpace(text), err)
		}
		sig.params = append(sig.params, p)
	}
	outputs := len(sig.named(output))
	switch {
	case sig.byReturn && outputs > 0:
		return nil, fmt.Errorf("%s returns a result and has outputs, T&: want one or the other", sig.name)
	case !sig.byReturn && outputs == 0:
		return nil, fmt.Errorf("%s returns nothing and has no output, T&", sig.name)
	}
	return sig, nil
}

// parseParameter parses a parameter: T x, const T& x, or T& x for an output.
func parseParameter(text string) (p parameter, err error) {
	names := words.FindAllString(text, -1)
	switch {
	case len(names) < 2:
		return p, errors.New("it has no type or no name")
	case strings.ContainsAny(text, "*[<="):
		return p, errors.New("want T x, or T& x for an output")
	}
	p.name = names[len(names)-1]
	if strings.Contains(text, "&") && !slices.Contains(names, "const") {
		p.role = output
	}
	return p, nil
}

// named returns the names of the parameters with a role.
func (s *signature) named(r role) (names []string) {
	for _, p := range s.params {
		if p.role == r {
			names = append(names, p.name)
		}
	}
	return names
}

func (s *signature) outputs() int {
	if s.byReturn {
		return 1
	}
	return len(s.named(output))
}

// An Operand is an argument of an Elementwise: an input, an output, a single number for an
// input, or a value for a named parameter.
type Operand struct {
	role  role
	dtype memory.DType // of the elements; for a number: bool, int64 or float64
	raw   uint64
	n     int
	dev   *device.Device
	err   error
	name  string
	bits  uint64 // value of a number, as an int64 or a float64
}

type role uint8

const (
	input role = iota
	output
	number // for an input
	scalar // for a named parameter
)

// In is the next input. If the slice has one element, it is used for every
// element of the other slices.
func In[T memory.Element](x memory.Slice[T]) Operand { return slice(x, input) }

// Out is the next output, which may be one of the inputs, but not a part of
// one.
func Out[T memory.Element](x memory.Slice[T]) Operand { return slice(x, output) }

func slice[T memory.Element](x memory.Slice[T], r role) Operand {
	return Operand{role: r, dtype: x.DType(), raw: x.Ptr(), n: x.Len(), dev: x.Device(), err: inside.CheckBuffer("kernel: launch", x.Buffer(), x.Len(), nil)}
}

// A Value is a number on the host.
type Value interface {
	bool | int | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | float32 | float64
}

// Number is the next input: one number for all elements. As in torch it determines the
// type of the computation only if it has a higher category than the slices: bool, then
// integers, then floats.
func Number[T Value](v T) Operand { return value(number, "", v) }

// Set replaces the default of a parameter, without effect on the type of the
// computation.
func Set[T Value](name string, v T) Operand { return value(scalar, name, v) }

func value[T Value](r role, name string, v T) Operand {
	a := numberOf(v)
	return Operand{role: r, name: name, dtype: a.dtype, bits: a.bits}
}

type numeral struct {
	dtype memory.DType
	bits  uint64
}

func numberOf[T Value](v T) numeral {
	switch v := any(v).(type) {
	case bool:
		if v {
			return numeral{memory.Bool, 1}
		}
		return numeral{memory.Bool, 0}
	case float32:
		return numeral{memory.Float64, math.Float64bits(float64(v))}
	case float64:
		return numeral{memory.Float64, math.Float64bits(v)}
	case int:
		return integer(v)
	case int8:
		return integer(v)
	case int16:
		return integer(v)
	case int32:
		return integer(v)
	case int64:
		return integer(v)
	case uint8:
		return integer(v)
	case uint16:
		return integer(v)
	case uint32:
		return integer(v)
	}
	return numeral{}
}

func integer[T int | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32](v T) numeral {
	return numeral{memory.Int64, uint64(int64(v))}
}

// arg passes a number as a long long or a double.
func (o *Operand) arg() Arg {
	if o.dtype == memory.Float64 {
		return Arg{kind: F64, bits: o.bits}
	}
	return Arg{kind: I64, bits: o.bits}
}

// promoted are the types in the rows and columns of the table of promotions.
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
	case dtype.Of(a).IsFloat8() || dtype.Of(b).IsFloat8():
		return 0, fmt.Errorf("no type has the numbers of both %s and %s: convert one of them", a, b)
	}
	row, column := placeOf(a), placeOf(b)
	switch {
	case row >= 0 && column >= 0:
		return promotions[row][column], nil
	case dtype.Of(a).IsFloat(): // b is an unsigned integer of 16 bits or more
		return a, nil
	case dtype.Of(b).IsFloat():
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
	case dtype.Of(arrays).IsFloat():
		return arrays, nil
	case arrays == memory.Invalid || arrays == memory.Bool || dtype.Of(numbers).IsFloat():
		return Promote(arrays, numbers)
	}
	return arrays, nil
}

// CanCast reports whether a result of type from may be stored as type to (torch.can_cast):
// floats not as integers, and other types not as bool.
func CanCast(from, to memory.DType) bool {
	return !(dtype.Of(from).IsFloat() && !dtype.Of(to).IsFloat()) && !(from != memory.Bool && to == memory.Bool)
}
