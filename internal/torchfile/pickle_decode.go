package torchfile

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// PickleLimits limit the cost of reading a pickle. The memory for its values is limited as well, by the
// number of bytes that were read: mostMemory.
type PickleLimits struct {
	Bytes  int64 // size of the pickle; 0 means 2 GiB
	Values int   // number of values; 0 means 64 million
}

// The values of a pickle take at most memorySlack bytes of memory and memoryOfByte bytes for each byte that was
// read. Without this limit, empty lists of one byte each would take 60 times their size, and
// tensors with a shared shape 700 times. Files of torch.save take 8 to 14 bytes for each byte.
const (
	memorySlack  = 32 << 20
	memoryOfByte = 16
)

// Bytes of memory of values.
const (
	wordBytes      = 8
	valueBytes     = 16 // an interface, or the header of a string
	containerBytes = 24
	entryOfDict    = 2 * valueBytes
)

// A sized is a value of PickleObjects that takes memory of its own.
type sized interface{ memory() int }

// DecodePickle reads one pickle of protocol 2 to 5 from Python or PyTorch. It returns
// nil, a bool, int64, float64, string, Tuple, *List or *Dict; integers above the
// range of int64 are uint64. If the same *List or *Dict occurs in several places,
// it is the same object there; a value may even contain itself. Nil limits mean
// the defaults. DecodePickle ignores data after the pickle, but may have read some of
// it.
func DecodePickle(r io.Reader, limits *PickleLimits) (any, error) {
	return newDecoder(r, limits).decode()
}

func newDecoder(r io.Reader, limits *PickleLimits) *decoder {
	d := &decoder{r: bufio.NewReaderSize(r, 64<<10)}
	if limits != nil {
		d.limits = *limits
	}
	if d.limits.Bytes == 0 {
		d.limits.Bytes = 2 << 30
	}
	if d.limits.Values == 0 {
		d.limits.Values = 64 << 20
	}
	return d
}

func (d *decoder) decode() (any, error) {
	v, err := d.run()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("pickle: read at byte %d: %w", d.at, err)
	}
	return v, nil
}

type decoder struct {
	r       *bufio.Reader
	limits  PickleLimits
	at      int64 // number of bytes read
	values  int   // number of values pushed
	memory  int64 // bytes that the values take
	stack   []any
	deepest int   // largest length of the stack
	marks   []int // lengths of the stack
	memo    []any
	items   *items        // of DecodePickleItems, or nil
	objects PickleObjects // of DecodePickleObjects, or nil
}

func (d *decoder) run() (any, error) {
	start, err := d.uint(2)
	if err != nil {
		return nil, err
	}
	if op, proto := start&0xff, start>>8; op != opProto || proto < leastProto || proto > mostProto {
		return nil, fmt.Errorf("not a pickle of protocol %d to %d: it begins %#02x %#02x", leastProto, mostProto, op, proto)
	}
	for {
		op, err := d.uint(1)
		if err != nil {
			return nil, err
		}
		if op == opStop {
			return d.result()
		}
		if err := d.step(byte(op)); err != nil {
			return nil, err
		}
	}
}

func (d *decoder) result() (any, error) {
	if len(d.stack) != 1 || len(d.marks) != 0 {
		return nil, fmt.Errorf("the pickle stops with %d values and %d marks: want one value", len(d.stack), len(d.marks))
	}
	return d.stack[0], nil
}

// step runs one opcode.
func (d *decoder) step(op byte) error {
	switch op {
	case opMark:
		d.marks = append(d.marks, len(d.stack))
		return d.count(2 * wordBytes)
	case opNone:
		return d.push(nil)
	case opTrue, opFalse:
		return d.push(op == opTrue)
	case opInt, opInt1, opInt2, opLong1:
		return d.int(op)
	case opFloat:
		n, err := d.uint(8)
		if err != nil {
			return err
		}
		return d.push(math.Float64frombits(bits.ReverseBytes64(n))) // the only big-endian value
	case opUnicode, opShortUnicode:
		return d.string(op)
	case opEmptyList:
		return d.push(&List{})
	case opEmptyDict:
		return d.push(d.newDict())
	case opEmptyTuple:
		return d.push(Tuple{})
	case opGet1, opGet4, opPut1, opPut4, opMemoize:
		return d.remember(op)
	case opFrame: // the reader has its own buffer
		_, err := d.uint(8)
		return err
	}
	if is, err := d.object(op); is {
		return err
	}
	return d.collect(op)
}

// push pushes a new value.
func (d *decoder) push(v any) error {
	if err := d.take(memoryOf(v)); err != nil {
		return err
	}
	return d.again(v)
}

// again pushes a value whose memory was counted before.
func (d *decoder) again(v any) error {
	d.stack = append(d.stack, v)
	if d.items != nil {
		d.follow()
	}
	memory := 0
	if len(d.stack) > d.deepest {
		d.deepest = len(d.stack)
		memory = 2 * valueBytes // the stack grows by copies
	}
	return d.count(memory)
}

// memoryOf returns how many bytes a new value takes, without the place that has it.
func memoryOf(v any) int {
	switch x := v.(type) {
	case int64, uint64, float64:
		return wordBytes
	case string:
		return valueBytes + len(x)
	case Tuple:
		return containerBytes + valueBytes*len(x)
	case *List:
		return containerBytes + valueBytes*len(*x)
	case *Dict:
		return containerBytes // enter counts the entries
	case sized:
		return x.memory()
	}
	return 0
}

// count counts a value and its bytes of memory.
func (d *decoder) count(memory int) error {
	if d.values++; d.values > d.limits.Values {
		return fmt.Errorf("more than %d values", d.limits.Values)
	}
	return d.take(memory)
}

// take counts bytes of memory.
func (d *decoder) take(memory int) error {
	if d.memory += int64(memory); d.memory > memorySlack+memoryOfByte*d.at {
		return fmt.Errorf("its values so far take %d MiB of memory: want at most %d MiB and %d bytes for each byte of the pickle", d.memory>>20, memorySlack>>20, memoryOfByte)
	}
	return nil
}

// drop shortens the stack and clears the removed values, so that they can be collected.
func (d *decoder) drop(to int) {
	clear(d.stack[to:])
	d.stack = d.stack[:to]
}

func (d *decoder) int(op byte) error {
	size := 1
	switch op {
	case opInt:
		size = 4
	case opInt2:
		size = 2
	}
	n, err := d.uint(size)
	if err != nil {
		return err
	}
	switch op {
	case opInt:
		return d.push(int64(int32(n)))
	case opLong1:
		text, err := d.text(n)
		if err != nil {
			return err
		}
		return d.long(text)
	}
	return d.push(int64(n))
}

// long pushes a little-endian integer in two's complement, of any length.
func (d *decoder) long(b string) error {
	fill := byte(0)
	if len(b) > 0 && b[len(b)-1] >= 0x80 {
		fill = 0xff
	}
	wide := [9]byte{fill, fill, fill, fill, fill, fill, fill, fill, fill}
	copy(wide[:], b)
	n := binary.LittleEndian.Uint64(wide[:8])
	switch negative := int64(n) < 0; {
	case len(b) > len(wide):
	case wide[8] == 0 && negative:
		return d.push(n)
	case wide[8] == 0 || wide[8] == 0xff && negative:
		return d.push(int64(n))
	}
	return fmt.Errorf("an integer of %d bytes: want at most 64 bits", len(b))
}

func (d *decoder) string(op byte) error {
	size := 4
	if op == opShortUnicode {
		size = 1
	}
	text, err := d.counted(size)
	if err != nil {
		return err
	}
	if !utf8.ValidString(text) {
		return errors.New("a string is not valid UTF-8")
	}
	return d.push(text)
}

// remember runs the opcodes of the memo, which writers number from 0 without
// gaps, so an index beyond the end is an error.
func (d *decoder) remember(op byte) error {
	i := len(d.memo)
	if op != opMemoize {
		size := 1
		if op == opGet4 || op == opPut4 {
			size = 4
		}
		n, err := d.uint(size)
		if err != nil {
			return err
		}
		i = int(n)
	}
	if op == opGet1 || op == opGet4 {
		if i >= len(d.memo) {
			return fmt.Errorf("read of value %d of the memo, which has %d values", i, len(d.memo))
		}
		if _, gone := d.memo[i].(passed); gone {
			return fmt.Errorf("an item of %q occurs twice", d.items.key)
		}
		return d.again(d.memo[i])
	}
	if len(d.stack) <= d.floor() {
		return errors.New("a memo opcode without a value on the stack")
	}
	if i > len(d.memo) {
		return fmt.Errorf("write of value %d of the memo, which has %d values", i, len(d.memo))
	}
	v := d.stack[len(d.stack)-1]
	if i < len(d.memo) {
		d.memo[i] = v
		return nil
	}
	d.memo = append(d.memo, v)
	return d.count(2 * valueBytes)
}

// uint reads an unsigned integer of 1 to 8 bytes.
func (d *decoder) uint(size int) (uint64, error) {
	if int64(size) > d.limits.Bytes-d.at {
		return 0, fmt.Errorf("more than %d bytes", d.limits.Bytes)
	}
	b, err := d.r.Peek(size)
	if err != nil {
		return 0, err
	}
	d.at += int64(size)
	n := uint64(0)
	for i, x := range b {
		n |= uint64(x) << (8 * i)
	}
	_, err = d.r.Discard(size)
	return n, err
}

// counted reads a length of size bytes, and so many bytes.
func (d *decoder) counted(size int) (string, error) {
	n, err := d.uint(size)
	if err != nil {
		return "", err
	}
	return d.text(n)
}

// text reads n bytes, and allocates memory only as they arrive, because n may
// be false.
func (d *decoder) text(n uint64) (string, error) {
	if n > uint64(d.limits.Bytes-d.at) {
		return "", fmt.Errorf("more than %d bytes", d.limits.Bytes)
	}
	const chunk = 64 << 10
	b := make([]byte, 0, min(n, chunk))
	for uint64(len(b)) < n {
		from := len(b)
		b = append(b, make([]byte, min(chunk, n-uint64(from)))...)
		k, err := io.ReadFull(d.r, b[from:])
		d.at += int64(k)
		if err != nil {
			return "", err
		}
	}
	return string(b), nil
}

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
	if err := d.take(valueBytes * (len(d.stack) - from)); err != nil {
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
	if err := d.take(entryOfDict * (len(d.stack) - from) / 2); err != nil {
		return err
	}
	*dict = slices.Grow(*dict, (len(d.stack)-from)/2)
	for i := from; i < len(d.stack); i += 2 {
		switch d.stack[i].(type) {
		case *List, *Dict:
			return fmt.Errorf("a %T cannot be a key of a dictionary", d.stack[i])
		}
		*dict = append(*dict, DictItem{d.stack[i], d.stack[i+1]})
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
