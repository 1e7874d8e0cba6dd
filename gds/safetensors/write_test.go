package safetensors

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The order and the bytes of the reference implementation's writer.
func TestNewHeader(t *testing.T) {
	tensors := []Tensor{
		{Name: "bool", DType: Bool, Shape: []int{1}}, {Name: "h", DType: BF16, Shape: []int{3}}, {Name: "z", DType: F32, Shape: nil},
		{Name: "a\x1f\"", DType: F32, Shape: []int{2, 1}}, {Name: "i", DType: I64, Shape: []int{0}}, {Name: "4", DType: F4, Shape: []int{4}},
	}
	given := tensors[3]
	h, start, err := NewHeader(tensors, map[string]string{"z": "\t", "format": "pt"})
	require.NoError(t, err)
	text := `{"__metadata__":{"format":"pt","z":"\t"},` +
		`"i":{"dtype":"I64","shape":[0],"data_offsets":[0,0]},` +
		`"a\u001f\"":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},` +
		`"z":{"dtype":"F32","shape":[],"data_offsets":[8,12]},` +
		`"h":{"dtype":"BF16","shape":[3],"data_offsets":[12,18]},` +
		`"4":{"dtype":"F4","shape":[4],"data_offsets":[18,20]},` +
		`"bool":{"dtype":"BOOL","shape":[1],"data_offsets":[20,21]}}`
	require.Equal(t, file(text+strings.Repeat(" ", (8-len(text)%8)%8), 0), string(start))
	require.NotZero(t, len(text)%8, "this test has padding")
	require.Equal(t, int64(len(start)), h.DataOffset)
	require.Equal(t, h.DataOffset+21, h.Size)
	require.Equal(t, Tensor{"h", BF16, []int{3}, h.DataOffset + 12, h.DataOffset + 18}, h.Tensors[3])
	x, ok := h.Lookup("bool")
	require.True(t, ok)
	require.Equal(t, h.DataOffset+20, x.Begin)

	require.Equal(t, "bool", tensors[0].Name, "the caller's slice stays as it was")
	given.Shape[0] = 9
	require.Equal(t, []int{2, 1}, h.Tensors[1].Shape, "the header's shapes are its own")
}

func TestHeaderOfNothing(t *testing.T) {
	h, start, err := NewHeader(nil, nil)
	require.NoError(t, err)
	require.Equal(t, "\x08\x00\x00\x00\x00\x00\x00\x00{}      ", string(start))
	require.Equal(t, int64(16), h.Size)
	_, start, err = NewHeader(nil, map[string]string{})
	require.NoError(t, err)
	require.Equal(t, file(`{"__metadata__":{}}     `, 0), string(start))
}

// What JSON must escape, as the reference implementation escapes it.
func TestEscapes(t *testing.T) {
	name := ""
	for c := range byte(' ' + 2) {
		name += string(rune(c))
	}
	_, start, err := NewHeader([]Tensor{{Name: name + `"\/` + "\x7fé", DType: U8}}, nil)
	require.NoError(t, err)
	require.Contains(t, string(start), `"\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f`+
		`\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f !\"\\/`+"\x7fé\":")
}

func TestWrongTensors(t *testing.T) {
	huge := []int{1 << 30, 1 << 30}
	for _, c := range []struct {
		wrong    string
		metadata map[string]string
		tensors  []Tensor
	}{
		{`two tensors have the name "a"`, nil, []Tensor{{Name: "a", DType: U8}, {Name: "b", DType: U8}, {Name: "a", DType: I8}}},
		{`a tensor cannot have the name "__metadata__": want UTF-8, and not __metadata__`, nil, []Tensor{{Name: "__metadata__", DType: U8}}},
		{`a tensor cannot have the name "\xff": want UTF-8, and not __metadata__`, nil, []Tensor{{Name: "\xff", DType: U8}}},
		{`tensor "a": invalid is not a dtype of the format`, nil, []Tensor{{Name: "a"}}},
		{`tensor "a": DType(23) is not a dtype of the format`, nil, []Tensor{{Name: "a", DType: U64 + 1}}},
		{`tensor "a": dimension 1 is -1: want 0 or more`, nil, []Tensor{{Name: "a", DType: U8, Shape: []int{2, -1}}}},
		{`tensor "a": shape [3] of F6_E2M3 takes 18 bits, which is not a whole number of bytes`, nil, []Tensor{{Name: "a", DType: F6E2M3, Shape: []int{3}}}},
		{`tensor "a": shape [9223372036854775807 3] has more elements than 64 bits count`, nil, []Tensor{{Name: "a", DType: U8, Shape: []int{math.MaxInt, 3}}}},
		{`the tensors take more than 9223372036754775799 bytes`, nil, []Tensor{{Name: "a", DType: U8, Shape: huge}, {Name: "b", DType: U8, Shape: huge}, {Name: "c", DType: U8, Shape: huge}, {Name: "d", DType: U8, Shape: huge}, {Name: "e", DType: U8, Shape: huge}, {Name: "f", DType: U8, Shape: huge}, {Name: "g", DType: U8, Shape: huge}, {Name: "h", DType: U8, Shape: huge}}},
		{`the metadata "\xff": "" is not valid UTF-8`, map[string]string{"\xff": ""}, nil},
		{`the metadata "": "\xff" is not valid UTF-8`, map[string]string{"": "\xff"}, nil},
		{`the header of 1 tensors has 100000072 bytes: want at most 100000000; write several files`, nil, []Tensor{{Name: strings.Repeat("x", maxHeader+20), DType: U8}}},
	} {
		h, start, err := NewHeader(c.tensors, c.metadata)
		require.EqualError(t, err, "safetensors: "+c.wrong)
		require.Nil(t, h)
		require.Nil(t, start)
	}
}

// limited takes so many bytes and fails then.
type limited struct {
	bytes.Buffer
	room int
	err  error
}

func (l *limited) Write(b []byte) (int, error) {
	if len(b) > l.room {
		n, _ := l.Buffer.Write(b[:l.room])
		l.room = 0
		return n, l.err
	}
	l.room -= len(b)
	return l.Buffer.Write(b)
}

func TestWriteErrors(t *testing.T) {
	data := []Data{{Tensor{Name: "a", DType: U8, Shape: []int{3}}, []byte{1, 2, 3}}, {Tensor{Name: "b", DType: U8, Shape: []int{2}}, []byte{4, 5}}}
	var whole bytes.Buffer
	require.NoError(t, Write(&whole, nil, data...))
	header := whole.Len() - 5
	full := errors.New("the disk is full")
	for room := range whole.Len() {
		err := Write(&limited{room: room, err: full}, nil, data...)
		require.ErrorIs(t, err, full)
		switch {
		case room < header:
			require.ErrorContains(t, err, "safetensors: write the header: ")
		case room < header+3:
			require.ErrorContains(t, err, `safetensors: write tensor "a" at byte 120: `)
		default:
			require.ErrorContains(t, err, `safetensors: write tensor "b" at byte 123: `)
		}
	}

	for _, raw := range [][]byte{{4}, {4, 5, 6}, nil} {
		var none bytes.Buffer
		data[1].Raw = raw
		require.EqualError(t, Write(&none, nil, data...), fmt.Sprintf(`safetensors: tensor "b": got %d bytes, but shape [2] of U8 takes 2`, len(raw)))
		require.Zero(t, none.Len())
	}
	var none bytes.Buffer
	require.Error(t, Write(&none, nil, data[0], data[0]))
	require.Zero(t, none.Len())
}

func TestDTypes(t *testing.T) {
	bits := map[string]int{
		"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
		"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
	}
	require.Len(t, bits, 22)
	for name, n := range bits {
		d, err := ParseDType(name)
		require.NoError(t, err)
		require.Equal(t, name, d.String())
		require.Equal(t, n, d.Bits(), name)
		bytes, wrong := size(d, []int{3, 8})
		require.Empty(t, wrong)
		require.Equal(t, int64(3*n), bytes)
	}
	for _, name := range []string{"", "invalid", "f32", "F32 ", "DType(23)"} {
		d, err := ParseDType(name)
		require.Error(t, err)
		require.Equal(t, Invalid, d)
	}
	_, err := ParseDType("F128")
	require.EqualError(t, err, `safetensors: unknown dtype "F128"`)
	require.Zero(t, DType(23).Bits())
	require.Equal(t, "DType(23)", DType(23).String())
	_, wrong := size(F4, []int{1})
	require.Equal(t, "shape [1] of F4 takes 4 bits, which is not a whole number of bytes", wrong)
}
