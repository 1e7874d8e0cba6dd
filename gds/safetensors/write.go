package safetensors

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Data is a tensor with its bytes in host memory.
type Data struct {
	Tensor
	Raw []byte // row-major, little-endian
}

// Write writes a complete file from host memory; see NewHeader for the order of
// the tensors. If the number of bytes of a tensor does not match its type and
// shape, Write fails before it writes anything.
func Write(w io.Writer, metadata map[string]string, data ...Data) error {
	tensors := make([]Tensor, len(data))
	raw := make(map[string][]byte, len(data))
	for i, d := range data {
		tensors[i], raw[d.Name] = d.Tensor, d.Raw
	}
	h, start, err := NewHeader(tensors, metadata)
	if err != nil {
		return err
	}
	for _, t := range h.Tensors {
		if n := int64(len(raw[t.Name])); n != t.Bytes() {
			return fmt.Errorf("safetensors: tensor %q: got %d bytes, but shape %s of %v takes %d", short(t.Name), n, shapeText(t.Shape), t.DType, t.Bytes())
		}
	}
	if _, err := w.Write(start); err != nil {
		return fmt.Errorf("safetensors: write the header: %w", err)
	}
	for _, t := range h.Tensors {
		if _, err := w.Write(raw[t.Name]); err != nil {
			return fmt.Errorf("safetensors: write tensor %q at byte %d: %w", short(t.Name), t.Begin, err)
		}
	}
	return nil
}

// NewHeader computes the layout of a new file. It returns the header, with the position
// of each tensor, and the first bytes of the file: the length and the JSON, padded with
// spaces so that the data starts at a multiple of 8. It ignores the positions in
// tensors. The order is the same as in the reference implementation: the last dtype first, and
// by name within a dtype.
//
// It fails if a name is duplicate, not valid UTF-8 or "__metadata__", or if the header
// exceeds 100,000,000 bytes. It also fails if a dimension is negative, or if the size of a
// tensor overflows or is not a whole number of bytes.
func NewHeader(tensors []Tensor, metadata map[string]string) (*Header, []byte, error) {
	h := &Header{Tensors: slices.Clone(tensors), Metadata: maps.Clone(metadata)}
	slices.SortFunc(h.Tensors, byType)
	if err := h.lay(); err != nil {
		return nil, nil, err
	}
	if i, ok := h.names.index(h.Tensors); !ok {
		return nil, nil, fmt.Errorf("safetensors: two tensors have the name %q", short(h.Tensors[i].Name))
	}
	for k, v := range metadata {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return nil, nil, fmt.Errorf("safetensors: the metadata %q: %q is not valid UTF-8", short(k), short(v))
		}
	}
	text := h.encode()
	if n := len(text) - prefix; n > maxHeader {
		return nil, nil, fmt.Errorf("safetensors: the header of %d tensors has %d bytes: want at most %d; write several files", len(tensors), n, maxHeader)
	}
	h.DataOffset = int64(len(text))
	for i := range h.Tensors {
		h.Tensors[i].Begin += h.DataOffset
		h.Tensors[i].End += h.DataOffset
	}
	h.Size += h.DataOffset
	return h, text, nil
}

// byType orders tensors like the reference implementation.
func byType(a, b Tensor) int {
	if c := cmp.Compare(b.DType, a.DType); c != 0 {
		return c
	}
	return cmp.Compare(a.Name, b.Name)
}

// lay assigns positions to the tensors and copies their shapes.
func (h *Header) lay() error {
	for i := range h.Tensors {
		t := &h.Tensors[i]
		if t.Name == reserved || !utf8.ValidString(t.Name) {
			return fmt.Errorf("safetensors: a tensor cannot have the name %q: want UTF-8, and not %s", short(t.Name), reserved)
		}
		n, err := t.size()
		if err != nil {
			return err
		}
		if h.Size > maxData-n {
			return fmt.Errorf("safetensors: the tensors take more than %d bytes", int64(maxData))
		}
		t.Shape = slices.Clone(t.Shape)
		t.Begin, t.End = h.Size, h.Size+n
		h.Size = t.End
	}
	return nil
}

// maxData limits the size of all tensors, so that positions in a file do not overflow.
const maxData = 1<<63 - 1 - prefix - maxHeader

// encode returns the start of the file in the format of the reference
// implementation, with metadata sorted by key.
func (h *Header) encode() []byte {
	b := make([]byte, prefix, prefix+64+128*len(h.Tensors))
	b = append(b, '{')
	if h.Metadata != nil {
		b = append(appendString(b, reserved), ":{"...)
		for i, k := range slices.Sorted(maps.Keys(h.Metadata)) {
			b = appendString(comma(b, i), k)
			b = appendString(append(b, ':'), h.Metadata[k])
		}
		b = append(b, '}')
	}
	for i := range h.Tensors {
		if i > 0 || h.Metadata != nil {
			b = append(b, ',')
		}
		b = h.Tensors[i].append(b)
	}
	b = append(b, '}')
	for len(b)%8 != 0 {
		b = append(b, ' ')
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-prefix))
	return b
}

// append appends the entry of the tensor.
func (t *Tensor) append(b []byte) []byte {
	b = append(appendString(b, t.Name), `:{"dtype":"`...)
	b = append(append(b, t.DType.String()...), `","shape":[`...)
	for i, d := range t.Shape {
		b = strconv.AppendInt(comma(b, i), int64(d), 10)
	}
	b = strconv.AppendInt(append(b, `],"data_offsets":[`...), t.Begin, 10)
	b = strconv.AppendInt(append(b, ','), t.End, 10)
	return append(b, "]}"...)
}

// comma appends a comma before each element except the first.
func comma(b []byte, i int) []byte {
	if i == 0 {
		return b
	}
	return append(b, ',')
}

// appendString appends s as JSON with the fewest possible escapes.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c >= ' ':
			b = append(b, c)
		default:
			b = appendControl(b, c)
		}
	}
	return append(b, '"')
}

func appendControl(b []byte, c byte) []byte {
	for _, letter := range "bfnrt" {
		if escaped[letter] == c {
			return append(b, '\\', byte(letter))
		}
	}
	return fmt.Appendf(b, `\u%04x`, c)
}
