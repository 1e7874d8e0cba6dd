package torchfile

import (
	"fmt"
	"io"
	"iter"
	"math"
	"math/bits"
	"strings"
)

// EncodePickle writes v as a pickle of protocol 2. v is nil, a bool, int, int64, uint64,
// float64 or string; a Tuple, List or Dict of such values; or an iter.Seq[any], which
// is written as a list during the iteration.
//
// Equal strings, and values that are shared through a *List or *Dict, are written once,
// so that Python has the same object in all places.
func EncodePickle(w io.Writer, v any) error {
	e := &encoder{w: w, strings: map[string]uint32{}, shared: map[any]uint32{}}
	e.op(opProto, 2)
	err := e.value(v, 0)
	if err == nil {
		e.op(opStop)
		e.flush()
		err = e.err
	}
	if err != nil {
		return fmt.Errorf("pickle: write: %w", err)
	}
	return nil
}

type encoder struct {
	w       io.Writer
	buf     []byte // data not yet written
	err     error  // first error of w
	memo    uint32 // number of values in Python's memo
	strings map[string]uint32
	shared  map[any]uint32 // *List and *Dict
}

// op appends an opcode with its argument bytes.
func (e *encoder) op(bytes ...byte) {
	if len(e.buf) > 64<<10 {
		e.flush()
	}
	e.buf = append(e.buf, bytes...)
}

func (e *encoder) flush() {
	if e.err == nil {
		_, e.err = e.w.Write(e.buf)
	}
	e.buf = e.buf[:0]
}

// number appends an opcode and the n lowest bytes of a number.
func (e *encoder) number(op byte, n int, v uint64) {
	e.op(op)
	for range n {
		e.buf = append(e.buf, byte(v))
		v >>= 8
	}
}

func (e *encoder) value(v any, depth int) error {
	if depth > deepest {
		return fmt.Errorf("the value has more than %d levels, or contains itself", deepest)
	}
	switch v := v.(type) {
	case nil:
		e.op(opNone)
	case bool:
		if v {
			e.op(opTrue)
		} else {
			e.op(opFalse)
		}
	case int:
		e.int(int64(v))
	case int64:
		e.int(v)
	case uint64:
		e.uint(v)
	case float64:
		e.number(opFloat, 8, bits.ReverseBytes64(math.Float64bits(v))) // the only big-endian value
	case string:
		return e.string(v)
	default:
		return e.container(v, depth+1)
	}
	return nil
}

func (e *encoder) container(v any, depth int) error {
	switch v := v.(type) {
	case Tuple:
		return e.tuple(v, depth)
	case List:
		e.op(opEmptyList)
		return e.items(values(v), depth)
	case iter.Seq[any]:
		e.op(opEmptyList)
		return e.items(v, depth)
	case Dict:
		e.op(opEmptyDict)
		return e.entries(v, depth)
	case *List:
		if e.again(v) {
			return nil
		}
		e.op(opEmptyList)
		e.share(v)
		return e.items(values(*v), depth)
	case *Dict:
		if e.again(v) {
			return nil
		}
		e.op(opEmptyDict)
		e.share(v)
		return e.entries(*v, depth)
	}
	return fmt.Errorf("a %T cannot be pickled", v)
}

func values(l []any) iter.Seq[any] {
	return func(yield func(any) bool) {
		for _, v := range l {
			if !yield(v) {
				return
			}
		}
	}
}

// items writes the items of a new list in batches, because readers keep a batch
// on their stack.
func (e *encoder) items(seq iter.Seq[any], depth int) (err error) {
	n := 0
	for v := range seq {
		if n%batch == 0 {
			if n > 0 {
				e.op(opAppends)
			}
			e.op(opMark)
		}
		n++
		if err = e.value(v, depth); err != nil {
			return err
		}
	}
	if n > 0 {
		e.op(opAppends)
	}
	return nil
}

func (e *encoder) entries(d Dict, depth int) error {
	if len(d) == 0 {
		return nil
	}
	e.op(opMark)
	for _, i := range d {
		if err := e.value(i.Key, depth); err != nil {
			return err
		}
		if err := e.value(i.Value, depth); err != nil {
			return err
		}
	}
	e.op(opSetItems)
	return nil
}

func (e *encoder) tuple(t Tuple, depth int) error {
	if len(t) > 3 {
		e.op(opMark)
	}
	for _, v := range t {
		if err := e.value(v, depth); err != nil {
			return err
		}
	}
	switch len(t) {
	case 0:
		e.op(opEmptyTuple)
	case 1, 2, 3:
		e.op(opTuple1 + byte(len(t)-1))
	default:
		e.op(opTuple)
	}
	return nil
}

func (e *encoder) int(n int64) {
	switch {
	case n >= 0 && n <= math.MaxUint8:
		e.number(opInt1, 1, uint64(n))
	case n >= 0 && n <= math.MaxUint16:
		e.number(opInt2, 2, uint64(n))
	case n >= math.MinInt32 && n <= math.MaxInt32:
		e.number(opInt, 4, uint64(n))
	default:
		e.op(opLong1)
		e.number(8, 8, uint64(n))
	}
}

// uint writes an additional byte if the highest bit would otherwise be the sign.
func (e *encoder) uint(n uint64) {
	if n <= math.MaxInt64 {
		e.int(int64(n))
		return
	}
	e.op(opLong1)
	e.number(9, 8, n)
	e.op(0)
}

func (e *encoder) string(s string) error {
	if i, ok := e.strings[s]; ok {
		e.get(i)
		return nil
	}
	text := strings.ToValidUTF8(s, "\uFFFD")
	if len(text) > math.MaxUint32 {
		return fmt.Errorf("a string of %d bytes: want at most 4 GiB", len(text))
	}
	e.number(opUnicode, 4, uint64(len(text)))
	e.buf = append(e.buf, text...)
	e.strings[s] = e.put()
	return nil
}

// again writes a reference to a container if it was written before.
func (e *encoder) again(container any) bool {
	i, ok := e.shared[container]
	if ok {
		e.get(i)
	}
	return ok
}

func (e *encoder) share(container any) { e.shared[container] = e.put() }

func (e *encoder) get(i uint32) { e.index(opGet1, opGet4, i) }

// put stores the top of the reader's stack in the memo.
func (e *encoder) put() uint32 {
	i := e.memo
	e.memo++
	e.index(opPut1, opPut4, i)
	return i
}

func (e *encoder) index(short, long byte, i uint32) {
	if i <= math.MaxUint8 {
		e.number(short, 1, uint64(i))
		return
	}
	e.number(long, 4, uint64(i))
}
