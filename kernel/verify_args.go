package kernel

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/memory"
)

// guard is the number of bytes before and after the memory of an argument. It keeps the
// alignment that the allocator gives.
const guard = 256

// A testArg is the argument of a trial.
type testArg struct {
	name   string // in the source; "" if unknown
	param  Param
	elem   memory.DType // of the number, or of the memory
	value  []byte       // of the number, the struct or the memory
	memory []byte       // of a pointer that is not null, with guards
	output bool
	hidden bool // not compared
}

// arguments converts the arguments of a trial.
func (v *verification) arguments(src *Source, tr *Trial) (args []testArg, err error) {
	at := slices.IndexFunc(src.Kernels, func(d Def) bool { return d.Name == tr.Kernel })
	if at < 0 {
		return nil, fmt.Errorf("the source has no kernel of this name")
	}
	params := src.Kernels[at].Params
	if len(params) != len(tr.Args) {
		return nil, fmt.Errorf("%d arguments: want %d: %v", len(tr.Args), len(params), params)
	}
	for i, p := range params {
		a := testArg{param: p}
		if ps := v.said[tr.Kernel]; ps != nil {
			a.name = ps[i].name
		}
		if err := a.set(tr.Args[i]); err != nil {
			return nil, fmt.Errorf("argument %d: %w", i, err)
		}
		args = append(args, a)
	}
	mark := func(names []string, set func(*testArg)) error {
		for _, name := range names {
			i := slices.IndexFunc(args, func(a testArg) bool { return a.name == name && a.param == Pointer })
			if i < 0 {
				return fmt.Errorf("the source declares no pointer %q: it has %s", name, namesOf(args))
			}
			set(&args[i])
		}
		return nil
	}
	if err := mark(tr.Outputs, func(a *testArg) { a.output = true }); err != nil {
		return nil, err
	}
	return args, mark(tr.Scratch, func(a *testArg) { a.hidden = true })
}

// set sets the value.
func (a *testArg) set(x any) error {
	v := reflect.ValueOf(x)
	if _, ok := a.param.isStruct(); ok {
		if a.value, ok = x.([]byte); !ok {
			return fmt.Errorf("a %T for a %s: want []byte", x, a.param)
		}
		return nil
	}
	if x == nil && a.param == Pointer {
		return nil
	}
	for _, t := range fieldTypes {
		switch {
		case x == nil:
		case v.Type() == t.number && a.param == numberParams[t.elem]:
			number := reflect.New(v.Type())
			number.Elem().Set(v)
			a.elem, a.value = t.elem, slices.Clone(unsafe.Slice((*byte)(number.UnsafePointer()), t.elem.Size()))
			return nil
		case v.Type() == t.host && a.param == Pointer:
			a.elem, a.value = t.elem, unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*t.elem.Size())
			a.memory = []byte{}
			return nil
		}
	}
	return fmt.Errorf("a %T for %s: want a slice such as []float32, a number such as int32 of the parameter's size, or nil for a null pointer", x, withArticle(a.param))
}

func namesOf(args []testArg) string {
	var names []string
	for _, a := range args {
		names = append(names, a.name)
	}
	return strings.Join(names, ", ")
}

// memoryOf returns the arguments with memory for one side, where outputs are poisoned.
func memoryOf(args []testArg, poison byte) []testArg {
	args = slices.Clone(args)
	for i := range args {
		a := &args[i]
		if a.memory == nil {
			continue
		}
		a.memory = slices.Concat(guardBytes[:], a.value, guardBytes[:])
		if a.output {
			copy(a.data(), bytes.Repeat([]byte{poison}, len(a.value)))
		}
	}
	return args
}

// data returns the memory between the guards.
func (a *testArg) data() []byte { return a.memory[guard : len(a.memory)-guard] }

// guardBytes are contents that a kernel hardly writes.
var guardBytes = func() (b [guard]byte) {
	for i := range b {
		b[i] = byte(37*i + 101)
	}
	return b
}()
