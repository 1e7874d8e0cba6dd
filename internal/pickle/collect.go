package pickle

import (
	"errors"
	"fmt"
)

// collect runs the opcodes that add values to containers.
func (d *decoder) collect(op byte) error {
	switch op {
	case opAppend:
		return d.appends(len(d.stack) - 1)
	case opSetItem:
		return d.setItems(len(d.stack) - 2)
	case opTuple1, opTuple2, opTuple3:
		return d.tuple(len(d.stack) - int(op-opTuple1+1))
	case opAppends, opSetItems, opTuple, opList, opDict:
	default:
		return fmt.Errorf("opcode %#02x (%q) is not allowed: only plain data is read, without classes and calls", op, op)
	}
	if len(d.marks) == 0 {
		return fmt.Errorf("opcode %q without a mark before it", op)
	}
	from := d.marks[len(d.marks)-1]
	d.marks = d.marks[:len(d.marks)-1]
	switch op {
	case opAppends:
		return d.appends(from)
	case opSetItems:
		return d.setItems(from)
	case opTuple:
		return d.tuple(from)
	case opList:
		items := append(List(nil), d.stack[from:]...)
		d.drop(from)
		return d.push(&items)
	default:
		dict := &Dict{}
		if err := d.enter(dict, from); err != nil {
			return err
		}
		return d.push(dict)
	}
}

// above returns an error unless the stack has a container below from.
func (d *decoder) above(from int) error {
	if from < d.floor()+1 {
		return errors.New("an opcode adds to a container that is not on the stack")
	}
	return nil
}

// floor returns the stack position of the last mark, or 0.
func (d *decoder) floor() int {
	if len(d.marks) == 0 {
		return 0
	}
	return d.marks[len(d.marks)-1]
}

func (d *decoder) appends(from int) error {
	if err := d.above(from); err != nil {
		return err
	}
	l, ok := d.stack[from-1].(*List)
	if !ok {
		return fmt.Errorf("items are appended to a %T: want a list", d.stack[from-1])
	}
	if done, err := d.pass(from); done {
		return err
	}
	*l = append(*l, d.stack[from:]...)
	d.drop(from)
	return nil
}

func (d *decoder) setItems(from int) error {
	if err := d.above(from); err != nil {
		return err
	}
	dict, ok := d.stack[from-1].(*Dict)
	if !ok {
		return fmt.Errorf("entries are set in a %T: want a dictionary", d.stack[from-1])
	}
	return d.enter(dict, from)
}

// enter moves the keys and values from the stack into the dictionary.
func (d *decoder) enter(dict *Dict, from int) error {
	if (len(d.stack)-from)%2 != 0 {
		return errors.New("a dictionary has a key without a value")
	}
	for i := from; i < len(d.stack); i += 2 {
		switch d.stack[i].(type) {
		case *List, *Dict:
			return fmt.Errorf("a %T cannot be a key of a dictionary", d.stack[i])
		}
		*dict = append(*dict, Item{d.stack[i], d.stack[i+1]})
	}
	d.drop(from)
	return nil
}

func (d *decoder) tuple(from int) error {
	if from < d.floor() {
		return errors.New("a tuple has too few items")
	}
	t := append(Tuple(nil), d.stack[from:]...)
	d.drop(from)
	return d.push(t)
}
