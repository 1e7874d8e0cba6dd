package pickle

import "io"

// DecodeItems is Decode for long lists. The outermost dictionary has a list of lists under
// key. DecodeItems passes the items of these lists to fn as they are completed, with the
// index of their list, and clears them afterwards: the lists of the result lack them. An item
// that the pickle uses again later is an error. If fn returns an error, DecodeItems wraps it.
//
// What remains of an item is a word or two for each of its values that the writer numbered.
// Limits.Values does not count the keys and values of items.
func DecodeItems(r io.Reader, limits *Limits, key string, fn func(list int, item any) error) (any, error) {
	d := newDecoder(r, limits)
	d.items = &items{key: key, pass: fn, made: map[*Dict]bool{}}
	return d.decode()
}

// items is the state of DecodeItems.
type items struct {
	key  string
	pass func(list int, item any) error
	made map[*Dict]bool // items that were made since the last ones were passed
	memo int            // length of the memo at that time
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
		*dict = nil // in case that another value has it, which no writer of snapshots does
	}
	clear(d.items.made)
	d.drop(from)
	return true, nil
}

// newDict makes a dictionary at the top of the stack.
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
	if d.items == nil {
		return 0, false
	}
	for i := at; i >= 2; i-- {
		l, isList := d.stack[i].(*List)
		if !isList {
			return 0, false
		}
		if d.stack[i-1] == any(d.items.key) {
			return at - i - 1 + len(*l), i < at
		}
	}
	return 0, false
}
