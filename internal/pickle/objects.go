package pickle

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// Objects interprets the classes and calls of a pickle as data. An error of its methods ends
// the decoding.
type Objects interface {
	// Global returns the value that stands for a name in a Python module.
	Global(module, name string) (any, error)
	// Call returns the value that stands for the result of calling a value of Global, or for
	// a new object if that value is a class.
	Call(global any, args Tuple) (any, error)
	// Build sets the state of a value that Call returned.
	Build(object, state any) error
	// Persistent returns the value that the writer stored elsewhere under an identifier.
	Persistent(id any) (any, error)
}

// DecodeObjects is Decode for pickles with classes, calls and bytes. It calls no code but the
// methods of objects. Bytes become strings. A set is a *List.
func DecodeObjects(r io.Reader, limits *Limits, objects Objects) (any, error) {
	d := newDecoder(r, limits)
	d.objects = objects
	return d.decode()
}

// mostName is the maximum length of the name of a module or of a global.
const mostName = 256

// object runs the opcodes that only DecodeObjects accepts. It reports whether op is one.
func (d *decoder) object(op byte) (bool, error) {
	if d.objects == nil {
		return false, nil
	}
	switch op {
	case opGlobal:
		return true, d.readGlobal()
	case opStackGlobal:
		return true, d.popGlobal()
	case opReduce, opNewObject:
		return true, d.call()
	case opBuild:
		return true, d.build()
	case opPersistent:
		return true, d.persistent()
	case opShortBytes, opShortString:
		return true, d.bytes(1)
	case opBytes, opString:
		return true, d.bytes(4)
	case opEmptySet:
		return true, d.push(&List{})
	case opAddItems:
		return true, d.addItems()
	}
	return false, nil
}

// readGlobal pushes the value of a global, whose module and name are the next two lines.
func (d *decoder) readGlobal() error {
	module, err := d.line()
	if err != nil {
		return err
	}
	name, err := d.line()
	if err != nil {
		return err
	}
	return d.global(module, name)
}

// popGlobal replaces the names of a module and a global on the stack by the value.
func (d *decoder) popGlobal() error {
	below, top, err := d.pop2("a global")
	if err != nil {
		return err
	}
	module, ok := below.(string)
	name, also := top.(string)
	if !ok || !also || max(len(module), len(name)) > mostName {
		return fmt.Errorf("the module and the name of a global are a %T and a %T: want strings of at most %d bytes", below, top, mostName)
	}
	return d.global(module, name)
}

func (d *decoder) global(module, name string) error {
	v, err := d.objects.Global(module, name)
	if err != nil {
		return err
	}
	return d.push(v)
}

// line reads a text up to the end of its line.
func (d *decoder) line() (string, error) {
	var b []byte
	for {
		c, err := d.uint(1)
		switch {
		case err != nil:
			return "", err
		case c == '\n' && utf8.Valid(b):
			return string(b), nil
		case len(b) == mostName || c == '\n':
			return "", fmt.Errorf("the name of a global is longer than %d bytes or not valid UTF-8", mostName)
		}
		b = append(b, byte(c))
	}
}

// pop2 returns the two values on the top of the stack, and removes them.
func (d *decoder) pop2(what string) (below, top any, err error) {
	at := len(d.stack) - 2
	if at < d.floor() {
		return nil, nil, fmt.Errorf("%s without two values on the stack", what)
	}
	below, top = d.stack[at], d.stack[at+1]
	d.drop(at)
	return below, top, nil
}

func (d *decoder) call() error {
	global, args, err := d.pop2("a call")
	if err != nil {
		return err
	}
	t, ok := args.(Tuple)
	if !ok {
		return fmt.Errorf("a call has arguments of type %T: want a tuple", args)
	}
	v, err := d.objects.Call(global, t)
	if err != nil {
		return err
	}
	return d.push(v)
}

func (d *decoder) build() error {
	object, state, err := d.pop2("the state of an object")
	if err != nil {
		return err
	}
	if err := d.objects.Build(object, state); err != nil {
		return err
	}
	return d.push(object)
}

func (d *decoder) persistent() error {
	at := len(d.stack) - 1
	if at < d.floor() {
		return errors.New("a persistent identifier is not on the stack")
	}
	id := d.stack[at]
	d.drop(at)
	v, err := d.objects.Persistent(id)
	if err != nil {
		return err
	}
	return d.push(v)
}

// bytes pushes bytes, whose length has size bytes.
func (d *decoder) bytes(size int) error {
	text, err := d.counted(size)
	if err != nil {
		return err
	}
	return d.push(text)
}

// addItems adds the items above the last mark to a set.
func (d *decoder) addItems() error {
	if len(d.marks) == 0 {
		return errors.New("items of a set without a mark before them")
	}
	from := d.marks[len(d.marks)-1]
	d.marks = d.marks[:len(d.marks)-1]
	return d.appends(from)
}
