package safetensors

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"math/bits"
	"strings"
	"unicode/utf8"
)

// maxHeader is the maximum size of a header in bytes, without its length, as in
// the reference implementation.
const maxHeader = 100_000_000

// reserved is the only key of a header that is not the name of a tensor.
const reserved = "__metadata__"

// A Header describes the content of a file. It is immutable and safe for
// concurrent use.
type Header struct {
	Tensors    []Tensor          // in file order; an empty tensor precedes others at the same position, by name
	Metadata   map[string]string // nil if the header has no metadata
	DataOffset int64             // position of the first tensor's data in bytes
	Size       int64             // size of the file in bytes

	names table
}

// Lookup returns the tensor with a name.
func (h *Header) Lookup(name string) (Tensor, bool) {
	if i, ok := h.names.find(h.Tensors, name); ok {
		return h.Tensors[i], true
	}
	return Tensor{}, false
}

// A Tensor describes a tensor of a file: type, shape and position.
type Tensor struct {
	Name  string
	DType DType
	Shape []int // row-major; empty for a scalar; a dimension may be 0
	Begin int64 // position of its data in the file in bytes
	End   int64 // position after its last byte
}

// Bytes returns the length of the tensor's data in the file.
func (t *Tensor) Bytes() int64 { return t.End - t.Begin }

// size returns the size of a tensor in bytes. It returns the reason if a dimension is
// negative, or if the size overflows or is not a whole number of bytes. Like the reference
// implementation, it multiplies the dimensions in order, so that an overflow
// remains an error even if a later dimension is 0.
func size(t DType, shape []int) (bytes int64, reason string) {
	if t.Bits() == 0 {
		return 0, fmt.Sprintf("%v is not a dtype of the format", t)
	}
	n, over := uint64(1), uint64(0)
	for i, d := range shape {
		if d < 0 {
			return 0, fmt.Sprintf("dimension %d is %d: want 0 or more", i, d)
		}
		if over, n = bits.Mul64(n, uint64(d)); over != 0 {
			return 0, fmt.Sprintf("shape %s has more elements than 64 bits count", shapeText(shape))
		}
	}
	if over, n = bits.Mul64(n, uint64(t.Bits())); over != 0 {
		return 0, fmt.Sprintf("shape %s of %v has more bits than 64 bits count", shapeText(shape), t)
	}
	if n%8 != 0 {
		return 0, fmt.Sprintf("shape %s of %v takes %d bits, which is not a whole number of bytes", shapeText(shape), t, n)
	}
	return int64(n / 8), ""
}

// size returns the size of the tensor by its type and shape.
func (t *Tensor) size() (int64, error) {
	n, reason := size(t.DType, t.Shape)
	if reason != "" {
		return 0, fmt.Errorf("safetensors: tensor %q: %s", short(t.Name), reason)
	}
	return n, nil
}

// shapeText formats a shape for an error, truncated if long.
func shapeText(shape []int) string {
	const most = 8
	if len(shape) <= most {
		return fmt.Sprint(shape)
	}
	s := fmt.Sprint(shape[:most])
	return fmt.Sprintf("%s …] (%d dimensions)", s[:len(s)-1], len(shape))
}

// byPlace compares tensors by their position in the file. Empty tensors precede
// others at the same position, by name.
func byPlace(a, b Tensor) int {
	if c := cmp.Compare(a.Begin, b.Begin); c != 0 {
		return c
	}
	if c := cmp.Compare(a.End, b.End); c != 0 {
		return c
	}
	return cmp.Compare(a.Name, b.Name)
}

// A DType is the type of a tensor's elements.
type DType uint8

// The types of the format, ordered like the reference implementation. Its
// writer stores the last types first, so that wide elements are aligned.
const (
	Invalid DType = iota
	Bool
	F4 // two elements in a byte; torch.float4_e2m1fn_x2 counts bytes, which halves the last dimension
	F6E2M3
	F6E3M2
	U8
	I8
	F8E5M2
	F8E4M3 // torch.float8_e4m3fn
	F8E8M0
	F8E4M3FNUZ
	F8E5M2FNUZ
	I16
	U16
	F16
	BF16
	I32
	U32
	F32
	C64 // two float32
	F64
	I64
	U64
)

var dtypes = [...]struct {
	name string
	bits int
}{
	Invalid: {"invalid", 0}, Bool: {"BOOL", 8}, F4: {"F4", 4}, F6E2M3: {"F6_E2M3", 6}, F6E3M2: {"F6_E3M2", 6},
	U8: {"U8", 8}, I8: {"I8", 8}, F8E5M2: {"F8_E5M2", 8}, F8E4M3: {"F8_E4M3", 8}, F8E8M0: {"F8_E8M0", 8},
	F8E4M3FNUZ: {"F8_E4M3FNUZ", 8}, F8E5M2FNUZ: {"F8_E5M2FNUZ", 8},
	I16: {"I16", 16}, U16: {"U16", 16}, F16: {"F16", 16}, BF16: {"BF16", 16},
	I32: {"I32", 32}, U32: {"U32", 32}, F32: {"F32", 32},
	C64: {"C64", 64}, F64: {"F64", 64}, I64: {"I64", 64}, U64: {"U64", 64},
}

var dtypeOf = func() map[string]DType {
	m := make(map[string]DType, len(dtypes))
	for t := Bool; int(t) < len(dtypes); t++ {
		m[dtypes[t].name] = t
	}
	return m
}()

// ParseDType returns the type with a name as in a header, such as "BF16".
func ParseDType(name string) (DType, error) {
	if t, ok := dtypeOf[name]; ok {
		return t, nil
	}
	return Invalid, fmt.Errorf("safetensors: unknown dtype %q", short(name))
}

// Bits returns the size of an element in bits; it is less than 8 for the smallest
// types, and 0 for a type that is not part of the format.
func (t DType) Bits() int {
	if int(t) < len(dtypes) {
		return dtypes[t].bits
	}
	return 0
}

// String returns the name as in a header, such as "F8_E4M3".
func (t DType) String() string {
	if int(t) < len(dtypes) {
		return dtypes[t].name
	}
	return fmt.Sprintf("DType(%d)", uint8(t))
}

// A FormatError describes a violation of the format in a header or an index. It
// does not contain the file's name: the caller that opened the file adds it.
type FormatError struct {
	Name   string // name of the tensor, truncated if long; "" if the error does not concern a tensor
	Offset int64  // position of the error in the file in bytes
	Reason string
}

func (e *FormatError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("safetensors: byte %d: %s", e.Offset, e.Reason)
	}
	return fmt.Sprintf("safetensors: byte %d: tensor %q: %s", e.Offset, e.Name, e.Reason)
}

// An IndexError describes a contradiction between an index and its files.
type IndexError struct {
	File   string
	Name   string // name of the tensor; "" if the error concerns the file
	Reason string // includes the name of the tensor
}

func (e *IndexError) Error() string {
	return fmt.Sprintf("safetensors: index: %q: %s", short(e.File), e.Reason)
}

// misfit returns an IndexError about a tensor.
func misfit(file, name, format string, args ...any) error {
	return &IndexError{File: file, Name: name, Reason: fmt.Sprintf("tensor %q ", short(name)) + fmt.Sprintf(format, args...)}
}

// short truncates text from a file for an error. It returns a copy, so that the
// error does not keep the header in memory.
func short(s string) string {
	const most = 120
	if len(s) <= most {
		return strings.Clone(s)
	}
	cut := most
	for !utf8.RuneStart(s[cut]) && cut > most-utf8.UTFMax {
		cut--
	}
	return s[:cut] + "…"
}

// A table finds tensors by name. It stores only their indices, which takes a
// fraction of the memory of a map. Each table has a random seed, so that a file
// cannot cause collisions.
type table struct {
	seed  maphash.Seed
	slots []uint32 // index of the tensor + 1, by the hash of its name; 0 if free
}

// index adds all tensors. If a name is duplicate, it returns the index of the
// second tensor with this name.
func (t *table) index(tensors []Tensor) (twice int, ok bool) {
	n := 1
	for n < len(tensors)+len(tensors)/2 {
		n *= 2
	}
	t.seed, t.slots = maphash.MakeSeed(), make([]uint32, n+1)
	for i := range tensors {
		slot := t.slot(tensors, tensors[i].Name)
		if t.slots[slot] != 0 {
			return i, false
		}
		t.slots[slot] = uint32(i + 1)
	}
	return 0, true
}

func (t *table) find(tensors []Tensor, name string) (int, bool) {
	if len(t.slots) == 0 {
		return 0, false
	}
	i := t.slots[t.slot(tensors, name)]
	return int(i) - 1, i != 0
}

// slot returns the slot of the name, or the free slot for it, which always
// exists.
func (t *table) slot(tensors []Tensor, name string) int {
	slot := int(maphash.String(t.seed, name) % uint64(len(t.slots)))
	for t.slots[slot] != 0 && tensors[t.slots[slot]-1].Name != name {
		if slot++; slot == len(t.slots) {
			slot = 0
		}
	}
	return slot
}
