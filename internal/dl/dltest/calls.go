package dltest

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unsafe"
)

// Calls calls methods of a binding and describes each call in a line: what C received and what
// the method returned. A golden file compares the lines.
//
// Arguments are generated. Those of a call differ, so that the line shows which of them are
// swapped. Numbers need 17 bits, or 41 bits if their type has 64, so that it shows a conversion
// to a narrower type; signed ones are negative. Slices have two elements, of which only the
// first has true fields. Memory at an unsafe.Pointer has 64 bytes.
type Calls struct {
	rec   *Recorder
	given map[reflect.Type]reflect.Value
	used  map[reflect.Type]bool // the types of given that the call has
	n     uint64                // values generated for the call so far
	yes   bool                  // the next generated bool
	text  strings.Builder
}

// NewCalls returns a Calls whose arguments of the types of given are these values, not
// generated ones. A method that takes such a type twice fails the test, because a swap would not show.
func NewCalls(rec *Recorder, given ...any) *Calls {
	c := &Calls{rec: rec, given: map[reflect.Type]reflect.Value{}}
	for _, v := range given {
		c.given[reflect.TypeOf(v)] = reflect.ValueOf(v)
	}
	rec.Take()
	return c
}

// Methods calls each method of the interface I, except some. A method that calls no C function
// fails the test.
func Methods[I any](c *Calls, lib I, except ...string) {
	c.rec.t.Helper()
	for m := range reflect.TypeFor[I]().NumMethod() {
		if name := reflect.TypeFor[I]().Method(m).Name; !slices.Contains(except, name) {
			c.Call(name, reflect.ValueOf(&lib).Elem().Method(m).Interface())
		}
	}
}

// Call calls a function of the binding with the arguments, and generates those behind them.
func (c *Calls) Call(name string, f any, args ...any) {
	c.rec.t.Helper()
	fn := reflect.ValueOf(f)
	c.n, c.yes, c.used = 0, true, map[reflect.Type]bool{}
	var in []reflect.Value
	for i := range fn.Type().NumIn() {
		v := reflect.New(fn.Type().In(i)).Elem()
		if i < len(args) {
			v.Set(reflect.ValueOf(args[i]))
		} else {
			c.fill(v)
		}
		in = append(in, v)
	}
	before := pointees(in)
	call := fn.Call
	if fn.Type().IsVariadic() {
		call = fn.CallSlice
	}
	var results []string
	for _, v := range call(in) {
		results = append(results, show(v))
	}
	for i, after := range pointees(in) {
		if after != before[i] {
			results = append(results, fmt.Sprintf("argument %d becomes %s", i+1, after))
		}
	}
	received := c.rec.Take()
	if received == "" {
		c.rec.t.Errorf("%s calls no C function", name)
	}
	fmt.Fprintf(&c.text, "%s: %s = %s\n", name, received, strings.Join(results, ", "))
}

// Text returns the lines. A function of the recorder that was not called fails the test.
func (c *Calls) Text() string {
	c.rec.t.Helper()
	if left := c.rec.Uncalled(); len(left) > 0 {
		c.rec.t.Errorf("no method calls %q", left)
	}
	return c.text.String()
}

// fill gives v, and what it contains or points at, generated values.
func (c *Calls) fill(v reflect.Value) {
	if given, ok := c.given[v.Type()]; ok {
		if c.used[v.Type()] {
			c.rec.t.Errorf("a method takes two %s: generate them", v.Type())
		}
		c.used[v.Type()] = true
		v.Set(given)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				c.fill(v.Field(i))
			}
		}
		return
	case reflect.Array, reflect.Slice:
		if v.Kind() == reflect.Slice {
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		}
		for i := range v.Len() {
			c.fill(v.Index(i))
		}
		return
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		c.fill(v.Elem())
		return
	}
	c.n++
	switch n := c.n; v.Kind() {
	case reflect.Bool:
		v.SetBool(c.yes)
		c.yes = !c.yes
	case reflect.Int32:
		v.SetInt(-1<<16 - int64(n))
	case reflect.Int64:
		v.SetInt(-1<<40 - int64(n))
	case reflect.Uint8:
		v.SetUint(n % 256)
	case reflect.Uint32:
		v.SetUint(1<<16 + n)
	case reflect.Uint64, reflect.Uintptr:
		v.SetUint(1<<40 + n)
	case reflect.Float32:
		v.SetFloat(float64(n) + 0.5)
	case reflect.String:
		v.SetString(fmt.Sprintf("text %d", n))
	case reflect.UnsafePointer:
		memory := new([64]byte)
		for i := range memory {
			memory[i] = byte(n<<4) + byte(i%16)
		}
		v.SetPointer(unsafe.Pointer(memory))
	default:
		c.rec.t.Fatalf("Calls cannot generate a %s", v.Type())
	}
}

// pointees shows what the arguments point at; C may write there.
func pointees(args []reflect.Value) []string {
	shown := make([]string, len(args))
	for i, v := range args {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() {
				shown[i] = show(v.Elem())
			}
		case reflect.Slice:
			shown[i] = show(v)
		case reflect.UnsafePointer:
			if p := v.UnsafePointer(); p != nil {
				shown[i] = show(reflect.ValueOf((*[8]byte)(p)).Elem())
			}
		}
	}
	return shown
}

// show formats a value: bytes in hexadecimal, without the middle of many.
func show(v reflect.Value) string {
	format := "%v"
	if k := v.Kind(); (k == reflect.Array || k == reflect.Slice) && v.Type().Elem().Kind() == reflect.Uint8 {
		format = "%x"
	}
	text := fmt.Sprintf(format, v.Interface())
	if len(text) > 100 {
		text = text[:64] + "…" + text[len(text)-32:]
	}
	return text
}
