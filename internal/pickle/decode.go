package pickle

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"unicode/utf8"
)

// Limits bound what a pickle may cost to read.
type Limits struct {
	Bytes  int64 // of the pickle; 0 is 2 GiB
	Values int   // in it, each of which costs 16 to 100 bytes of memory; 0 is 64 million
}

// Decode reads one pickle of protocol 2 to 5 as Python or PyTorch writes it, and
// returns nil, a bool, int64, float64, string, Tuple, *List or *Dict; an integer
// above the int64s is a uint64. The same *List or *Dict in several places is the
// same object there, so that the value may even contain itself. nil limits are
// the defaults. What comes after the pickle is not looked at, but may have been
// read.
func Decode(r io.Reader, limits *Limits) (any, error) {
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
	r      *bufio.Reader
	limits Limits
	at     int64 // how much has been read
	values int   // how many have been pushed
	stack  []any
	marks  []int // lengths of the stack
	memo   []any
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

// step carries one opcode out.
func (d *decoder) step(op byte) error {
	switch op {
	case opMark:
		d.marks = append(d.marks, len(d.stack))
		return d.count()
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
		return d.push(math.Float64frombits(bits.ReverseBytes64(n))) // the only big-endian one
	case opUnicode, opShortUnicode:
		return d.string(op)
	case opEmptyList:
		return d.push(&List{})
	case opEmptyDict:
		return d.push(&Dict{})
	case opEmptyTuple:
		return d.push(Tuple{})
	case opGet1, opGet4, opPut1, opPut4, opMemoize:
		return d.remember(op)
	case opFrame: // the reader has a buffer of its own
		_, err := d.uint(8)
		return err
	}
	return d.collect(op)
}

func (d *decoder) push(v any) error {
	d.stack = append(d.stack, v)
	return d.count()
}

func (d *decoder) count() error {
	if d.values++; d.values > d.limits.Values {
		return fmt.Errorf("more than %d values", d.limits.Values)
	}
	return nil
}

// drop shortens the stack, and lets go of what was on it.
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

// long pushes an integer in two's complement, little-endian, of any length.
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
	n, err := d.uint(size)
	if err != nil {
		return err
	}
	text, err := d.text(n)
	if err != nil {
		return err
	}
	if !utf8.ValidString(text) {
		return errors.New("a string is not UTF-8")
	}
	return d.push(text)
}

// remember carries out the opcodes of the memo. Writers number it from 0 on, so
// that an index beyond its end is a mistake.
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
			return fmt.Errorf("value %d of the memo is read, which has %d", i, len(d.memo))
		}
		return d.push(d.memo[i])
	}
	if len(d.stack) <= d.floor() {
		return errors.New("nothing is put into the memo")
	}
	if i > len(d.memo) {
		return fmt.Errorf("value %d of the memo is written, which has %d", i, len(d.memo))
	}
	v := d.stack[len(d.stack)-1]
	if i < len(d.memo) {
		d.memo[i] = v
		return nil
	}
	d.memo = append(d.memo, v)
	return d.count()
}

// uint reads an integer without sign of 1 to 8 bytes.
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

// text reads n bytes, and takes memory only as they come.
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
