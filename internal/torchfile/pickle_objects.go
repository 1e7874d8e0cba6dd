package torchfile

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// PickleObjects interprets the classes and calls of a pickle as data. An error of its methods ends
// the decoding.
type PickleObjects interface {
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

// DecodePickleObjects is DecodePickle for pickles with classes, calls and
// bytes. It calls no code but the methods of objects. Bytes become strings, and
// a set is a *List.
func DecodePickleObjects(r io.Reader, limits *PickleLimits, objects PickleObjects) (any, error) {
	d := newDecoder(r, limits)
	d.objects = objects
	return d.decode()
}

// mostPickleName is the maximum length of the name of a module or of a global.
const mostPickleName = 256

// object runs the opcodes that only DecodePickleObjects accepts, and reports
// whether op is one.
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
	if !ok || !also || max(len(module), len(name)) > mostPickleName {
		return fmt.Errorf("the module and the name of a global are a %T and a %T: want strings of at most %d bytes", below, top, mostPickleName)
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
		case len(b) == mostPickleName || c == '\n':
			return "", fmt.Errorf("the name of a global is longer than %d bytes or not valid UTF-8", mostPickleName)
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
	return d.again(object)
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

// DecodePickleItems is DecodePickle for long lists. The outermost dictionary has a list of lists under
// key. DecodePickleItems passes the items of these lists to fn as they are completed, with the
// index of their list, and clears them afterwards: the lists of the result lack them. An item
// that the pickle uses again later is an error. If fn returns an error, DecodePickleItems wraps it.
//
// What remains of an item is a word or two for each of its values that the writer numbered.
// PickleLimits.Values does not count the keys and values of items.
func DecodePickleItems(r io.Reader, limits *PickleLimits, key string, fn func(list int, item any) error) (any, error) {
	d := newDecoder(r, limits)
	d.items = &items{key: key, pass: fn, made: map[*Dict]bool{}}
	return d.decode()
}

// items is the state of DecodePickleItems.
type items struct {
	key  string
	pass func(list int, item any) error
	made map[*Dict]bool // items that were made since the last ones were passed
	memo int            // length of the memo at that time

	// outer has the position of the list of lists for each position of the stack whose list may be one of its lists, and -1 for
	// others. A search down the stack at each append would take quadratic time for lists in lists.
	outer []int
}

// A passed stands in the memo for an item that was passed on.
type passed struct{}

// pass passes the values from the stack on if they are items.
func (d *decoder) pass(from int) (done bool, err error) {
	list, ok := d.listOfItems(from - 1)
	if !ok {
		return false, nil
	}
	for _, v := range d.stack[from:] {
		if err := d.items.pass(list, v); err != nil {
			return true, err
		}
	}
	for i, v := range d.memo[d.items.memo:] {
		if dict, ok := v.(*Dict); ok && d.items.made[dict] {
			d.memo[d.items.memo+i] = passed{}
		}
	}
	d.items.memo = len(d.memo)
	for dict := range d.items.made {
		d.values -= 2 * len(*dict)
		d.memory -= int64(containerBytes + entryOfDict*len(*dict))
		*dict = nil // in case that another value has it, which no writer of snapshots does
	}
	if len(d.items.made) > batch { // clear takes the time of the largest size that the map has had
		d.items.made = map[*Dict]bool{}
	}
	clear(d.items.made)
	d.drop(from)
	return true, nil
}

// newDict pushes an empty dictionary on the stack.
func (d *decoder) newDict() *Dict {
	dict := &Dict{}
	if d.items != nil {
		_, first := d.listOfItems(len(d.stack) - 1)
		_, later := d.listOfItems(d.floor() - 1) // if a mark is before the items
		if first || later {
			d.items.made[dict] = true
		}
	}
	return dict
}

// listOfItems returns the index of the list at a position of the stack, if its items are
// passed on. The stack then has the outermost dictionary, keys and values for it, the key,
// the list of lists, and lists that are not appended to that yet.
func (d *decoder) listOfItems(at int) (list int, ok bool) {
	if d.items == nil || at < 0 {
		return 0, false
	}
	i := d.items.outer[at]
	if i < 0 {
		return 0, false
	}
	return at - i - 1 + len(*d.stack[i].(*List)), i < at
}

// follow notes the position of the list of lists for the value that was pushed last.
func (d *decoder) follow() {
	at, i := len(d.stack)-1, -1
	if _, isList := d.stack[at].(*List); isList && at > 0 {
		if i = d.items.outer[at-1]; at >= 2 && d.stack[at-1] == any(d.items.key) {
			i = at
		}
	}
	d.items.outer = append(d.items.outer[:at], i)
}
