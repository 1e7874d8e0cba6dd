// Package pickle writes and reads the part of Python's pickle format that plain
// data needs: dictionaries, lists, tuples, strings, numbers, None. It is what
// snapshots of memory are files of, and all that PyTorch's viewer understands of
// pickle. Classes and calls are refused: reading runs no code.
package pickle

// An Item is an entry of a Dict.
type Item struct{ Key, Value any }

// A Dict is a dictionary whose entries have an order, as Python's have.
type Dict []Item

// Get returns the last value of the key, as Python does where a key comes twice.
func (d Dict) Get(key string) (any, bool) {
	for i := len(d) - 1; i >= 0; i-- {
		if k, ok := d[i].Key.(string); ok && k == key {
			return d[i].Value, true
		}
	}
	return nil, false
}

// A List is a list.
type List []any

// A Tuple is a tuple.
type Tuple []any

// The opcodes that are written and read. PyTorch's viewer knows no others.
const (
	opMark         = '('
	opEmptyTuple   = ')'
	opStop         = '.'
	opFloat        = 'G'
	opInt          = 'J' // 4 bytes
	opInt1         = 'K' // 1 byte without sign
	opInt2         = 'M' // 2 bytes without sign
	opNone         = 'N'
	opUnicode      = 'X' // the length in 4 bytes
	opEmptyList    = ']'
	opAppend       = 'a'
	opDict         = 'd'
	opAppends      = 'e'
	opGet1         = 'h' // from the memo, the index in 1 byte
	opGet4         = 'j'
	opList         = 'l'
	opPut1         = 'q' // into the memo
	opPut4         = 'r'
	opSetItem      = 's'
	opTuple        = 't'
	opSetItems     = 'u'
	opEmptyDict    = '}'
	opProto        = 0x80
	opTuple1       = 0x85
	opTuple2       = 0x86
	opTuple3       = 0x87
	opTrue         = 0x88
	opFalse        = 0x89
	opLong1        = 0x8a // the length in 1 byte
	opShortUnicode = 0x8c // the length in 1 byte
	opMemoize      = 0x94 // into the memo, at its end
	opFrame        = 0x95 // the length in 8 bytes
	leastProto     = 2
	mostProto      = 5 // beyond 4 it adds opcodes for buffers, which plain data has none of
	batch          = 1000
	deepest        = 64
)
