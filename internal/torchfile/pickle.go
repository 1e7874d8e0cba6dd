package torchfile

// A DictItem is an entry of a Dict.
type DictItem struct{ Key, Value any }

// A Dict is a dictionary with ordered entries, as in Python.
type Dict []DictItem

// Get returns the last value of a key, like Python for duplicate keys.
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

// The opcodes of plain data. PyTorch's viewer does not support others.
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
	mostProto      = 5 // protocol 5 adds only opcodes for buffers, which plain data does not use
	batch          = 1000
	deepest        = 64
)

// The opcodes that only DecodePickleObjects accepts.
const (
	opBytes       = 'B' // the length in 4 bytes
	opShortBytes  = 'C' // the length in 1 byte
	opPersistent  = 'Q' // the identifier is on the stack
	opReduce      = 'R' // call
	opString      = 'T' // of Python 2; the length in 4 bytes
	opShortString = 'U' // of Python 2; the length in 1 byte
	opBuild       = 'b' // set the state of an object
	opGlobal      = 'c' // two lines: module and name
	opNewObject   = 0x81
	opEmptySet    = 0x8f
	opAddItems    = 0x90
	opStackGlobal = 0x93 // module and name are on the stack
)
