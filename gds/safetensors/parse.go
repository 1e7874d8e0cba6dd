package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// leastEntry is the minimum size of a tensor's entry, with its comma:
// "":{"dtype":"U8","shape":[],"data_offsets":[0,1]},
const leastEntry = 50

// parse fills the header from its JSON.
func (h *Header) parse(text string) error {
	p := parser{scanner: scanner{text: text, base: prefix}}
	p.tensors = make([]Tensor, 0, min(strings.Count(text, "{"), len(text)/leastEntry+1))
	p.object("for the header", p.entry)
	p.end()
	if p.err != nil {
		return p.err
	}
	h.Tensors, h.Metadata = p.tensors, p.metadata
	if !slices.IsSortedFunc(h.Tensors, byPlace) {
		slices.SortFunc(h.Tensors, byPlace)
	}
	if i, ok := h.names.index(h.Tensors); !ok {
		return p.fault(h.Tensors[i].Name, 2, "duplicate name")
	}
	return h.place(&p)
}

// place checks that the tensors are adjacent and fill the file, and converts
// their positions to positions in the file.
func (h *Header) place(p *parser) error {
	end := int64(0)
	for i := range h.Tensors {
		t := &h.Tensors[i]
		if reason := misplaced(t, end); reason != "" {
			return p.fault(t.Name, 1, "data_offsets [%d,%d] %s", t.Begin, t.End, reason)
		}
		n, reason := size(t.DType, t.Shape)
		if reason != "" {
			return p.fault(t.Name, 1, "%s", reason)
		}
		if n != t.Bytes() {
			return p.fault(t.Name, 1, "data_offsets [%d,%d] are %d bytes, but shape %s of %v takes %d", t.Begin, t.End, t.Bytes(), shapeText(t.Shape), t.DType, n)
		}
		end = t.End
	}
	switch data := h.Size - h.DataOffset; {
	case end > data:
		return &FormatError{Offset: h.Size, Reason: fmt.Sprintf("the tensors take %d bytes, but only %d follow the header: the file is truncated", end, data)}
	case end < data:
		return &FormatError{Offset: h.DataOffset + end, Reason: fmt.Sprintf("the tensors take %d bytes, but %d follow the header", end, data)}
	}
	for i := range h.Tensors {
		h.Tensors[i].Begin += h.DataOffset
		h.Tensors[i].End += h.DataOffset
	}
	return nil
}

// misplaced returns the reason why a tensor does not start at end, the end of the
// previous tensor, or "".
func misplaced(t *Tensor, end int64) string {
	switch {
	case t.Begin > end:
		return fmt.Sprintf("leave a gap: want a start at %d, the end of the previous tensor", end)
	case t.Begin < end:
		return fmt.Sprintf("overlap the previous tensor, which ends at %d", end)
	case t.End < t.Begin:
		return "end before they start"
	}
	return ""
}

// A parser reads the entries of a header.
type parser struct {
	scanner
	tensors   []Tensor
	metadata  map[string]string
	described bool  // the metadata was read
	dims      []int // unused backing memory for shapes
}

// entry reads the value of one key of the header.
func (p *parser) entry(at int, key string) {
	if key == reserved {
		p.describe(at)
		return
	}
	p.name = key
	p.tensors = append(p.tensors, p.tensor(at, key))
	p.name = ""
}

// The fields of a tensor that were read.
const (
	seenDType = 1 << iota
	seenShape
	seenOffsets
	seenAll = seenDType | seenShape | seenOffsets
)

// tensor reads one tensor. Like the reference implementation, it ignores unknown
// keys.
func (p *parser) tensor(at int, name string) Tensor {
	t := Tensor{Name: name}
	seen := 0
	p.object("for a tensor", func(at int, key string) {
		field := 0
		switch key {
		case "dtype":
			field = seenDType
			t.DType = p.dtype()
		case "shape":
			field = seenShape
			t.Shape = p.shape()
		case "data_offsets":
			field = seenOffsets
			t.Begin, t.End = p.offsets()
		default:
			p.skip()
		}
		if seen&field != 0 {
			p.fail(at, "%s occurs twice", key)
		}
		seen |= field
	})
	if seen != seenAll {
		for i, key := range []string{"dtype", "shape", "data_offsets"} {
			if seen&(1<<i) == 0 {
				p.fail(at, "%s is missing", key)
			}
		}
	}
	return t
}

func (p *parser) dtype() DType {
	p.peek()
	at := p.at
	name := p.string("for a dtype")
	t, ok := dtypeOf[name]
	if !ok {
		p.fail(at, "the dtype %q is unknown", short(name))
	}
	return t
}

// shape reads an array of dimensions.
func (p *parser) shape() []int {
	p.peek()
	within, _, _ := strings.Cut(p.text[p.at:], "]")
	dims := p.backing(min(strings.Count(within, ",")+1, len(within)/2+1))
	p.array("for a shape", func() { dims = append(dims, int(p.count("a dimension"))) })
	return dims
}

// backing returns a slice with space for n dimensions, in an allocation that
// small shapes share.
func (p *parser) backing(n int) []int {
	const slab = 4096
	if n > slab/8 {
		return make([]int, 0, n)
	}
	if len(p.dims) < n {
		p.dims = make([]int, min(slab, max(n, 4*cap(p.tensors))))
	}
	dims := p.dims[:0:n]
	p.dims = p.dims[n:]
	return dims
}

func (p *parser) offsets() (begin, end int64) {
	const where = "for data_offsets"
	if !p.open('[', where) {
		return 0, 0
	}
	begin = p.count("data_offsets")
	p.want(',', where)
	end = p.count("data_offsets")
	p.want(']', "after the second of data_offsets")
	p.depth--
	return begin, end
}

// describe reads the metadata.
func (p *parser) describe(at int) {
	if p.described {
		p.fail(at, "%s occurs twice", reserved)
		return
	}
	p.described = true
	if p.peek() == 'n' {
		p.literal("null") // the reference implementation writes null for missing metadata
		return
	}
	const where = "for " + reserved
	p.metadata = make(map[string]string, p.members(where))
	p.object(where, func(at int, key string) {
		before := len(p.metadata)
		p.metadata[key] = p.string("for a value of " + reserved)
		if len(p.metadata) == before {
			p.fail(at, "%s has the duplicate key %q", reserved, short(key))
		}
	})
}

// fault returns an error at the nth entry with a name. It searches for the entry
// only now, to keep parsing fast.
func (p *parser) fault(name string, nth int, format string, args ...any) error {
	s := scanner{text: p.text, base: p.base}
	place := 0
	s.object("", func(at int, key string) {
		if key == name {
			if nth--; nth == 0 {
				place = at
			}
		}
		s.skip()
	})
	return &FormatError{Name: short(name), Offset: p.base + int64(place), Reason: fmt.Sprintf(format, args...)}
}

const prefix = 8 // bytes of the header's length

// ReadHeader reads the header of a file of size bytes and validates it against
// all rules of the format, including that the tensors fill the file exactly.
// Invalid content is a *FormatError; other errors come from r. It reads only the
// header, which stays in memory while one of its names is in use.
func ReadHeader(r io.ReaderAt, size int64) (*Header, error) {
	text, err := readText(r, size)
	if err != nil {
		return nil, err
	}
	h := &Header{DataOffset: prefix + int64(len(text)), Size: size}
	if err := h.parse(text); err != nil {
		return nil, err
	}
	return h, nil
}

// readText returns the header's JSON. It compares the length with the file before
// it allocates memory.
func readText(r io.ReaderAt, size int64) (string, error) {
	if size < prefix {
		return "", &FormatError{Reason: fmt.Sprintf("the file has %d bytes: want at least %d, the length of the header", max(size, 0), prefix)}
	}
	var length [prefix]byte
	if _, err := io.ReadFull(io.NewSectionReader(r, 0, prefix), length[:]); err != nil {
		return "", readError(0, prefix, err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader {
		return "", &FormatError{Reason: fmt.Sprintf("the header has %d bytes by its length: want at most %d; the file may not be a safetensors file", n, maxHeader)}
	}
	if int64(n) > size-prefix {
		return "", &FormatError{Reason: fmt.Sprintf("the header has %d bytes by its length, but only %d follow: the file is truncated, or is not a safetensors file", n, size-prefix)}
	}
	return readString(r, prefix, int64(n))
}

// readString reads n bytes of UTF-8, starting at offset.
func readString(r io.ReaderAt, offset, n int64) (string, error) {
	var b strings.Builder
	b.Grow(int(n))
	if got, err := io.CopyN(&b, io.NewSectionReader(r, offset, n), n); err != nil {
		return "", readError(offset+got, offset+n, err)
	}
	text := b.String()
	if utf8.ValidString(text) {
		return text, nil
	}
	return "", &FormatError{Offset: offset + invalid(text), Reason: "the JSON is not valid UTF-8"}
}

// invalid returns the position of the first invalid UTF-8 in text.
func invalid(text string) int64 {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		if r == utf8.RuneError && n == 1 {
			return int64(i)
		}
		i += n
	}
	return int64(len(text))
}

func readError(from, to int64, err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("safetensors: read bytes %d to %d: %w", from, to, err)
}
