package safetensors

import (
	"encoding/binary"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// file is a safetensors file with that header, whatever it is, and n zeros.
func file(header string, n int) string {
	return string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header + strings.Repeat("\x00", n)
}

func parse(text string) (*Header, error) {
	return ReadHeader(strings.NewReader(text), int64(len(text)))
}

// requireFormatError fails unless err is what a broken rule gives.
func requireFormatError(t *testing.T, h *Header, err error) *FormatError {
	t.Helper()
	require.Nil(t, h)
	var broken *FormatError
	require.ErrorAs(t, err, &broken)
	return broken
}

func TestEveryRule(t *testing.T) {
	for _, a := range attacks() {
		t.Run(a.name, func(t *testing.T) {
			h, err := parse(a.file)
			broken := requireFormatError(t, h, err)
			require.Equal(t, "safetensors: "+a.wrong, err.Error())
			require.LessOrEqual(t, broken.Offset, int64(len(a.file)))
		})
	}
}

func TestCuriosities(t *testing.T) {
	for _, c := range curiosities() {
		t.Run(c.name, func(t *testing.T) {
			h, err := parse(c.file)
			require.NoError(t, err)
			require.Equal(t, int64(len(c.file)), h.Size)
			require.Equal(t, binary.LittleEndian.Uint64([]byte(c.file))+8, uint64(h.DataOffset))
			require.Nil(t, h.Metadata)
			require.Len(t, h.Tensors, len(c.tensors))
			for i, want := range c.tensors {
				want.Begin += h.DataOffset
				want.End += h.DataOffset
				require.Equal(t, want, h.Tensors[i])
				found, ok := h.Lookup(want.Name)
				require.True(t, ok)
				require.Equal(t, want, found)
			}
			_, ok := h.Lookup("no such tensor")
			require.False(t, ok)
		})
	}
}

func TestMetadata(t *testing.T) {
	h, err := parse(file(`{"__metadata__":{"format":"pt","":"\u00e9\n","a\"":""}}`, 0))
	require.NoError(t, err)
	require.Equal(t, map[string]string{"format": "pt", "": "é\n", `a"`: ""}, h.Metadata)
	h, err = parse(file(`{"__metadata__":{}}`, 0))
	require.NoError(t, err)
	require.Equal(t, map[string]string{}, h.Metadata)
}

// A file that ends anywhere else than at its end, or goes on, is refused.
func TestTruncation(t *testing.T) {
	text := file(`{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[3,1],"data_offsets":[0,12]},"b":{"dtype":"U8","shape":[5],"data_offsets":[12,17]}}`, 17)
	_, err := parse(text)
	require.NoError(t, err)
	for n := range len(text) {
		h, err := parse(text[:n])
		requireFormatError(t, h, err)
	}
	h, err := parse(text + "\x00")
	requireFormatError(t, h, err)
	h, err = ReadHeader(strings.NewReader(text), -1)
	requireFormatError(t, h, err)
}

// A file that has become shorter than it was said to be is an error of reading.
func TestShortRead(t *testing.T) {
	text := file(`{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}`, 5)
	header := len(text) - 5
	for n := range header {
		h, err := ReadHeader(strings.NewReader(text[:n]), int64(len(text)))
		require.Nil(t, h)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		if n >= 8 {
			require.EqualError(t, err, "safetensors: read bytes "+strconv.Itoa(n)+" to "+strconv.Itoa(header)+": unexpected EOF")
		}
	}
}

// failing fails at one byte.
type failing struct {
	text string
	at   int64
	err  error
}

func (f failing) ReadAt(b []byte, off int64) (int, error) {
	n, err := strings.NewReader(f.text).ReadAt(b, off)
	if f.at >= off && f.at < off+int64(n) {
		return int(f.at - off), f.err
	}
	return n, err
}

func TestReadError(t *testing.T) {
	text := file(`{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}`, 5)
	broken := errors.New("the disk is broken")
	for at := range len(text) - 5 {
		_, err := ReadHeader(failing{text, int64(at), broken}, int64(len(text)))
		require.ErrorIs(t, err, broken)
	}
	_, err := ReadHeader(failing{text, int64(len(text) - 5), broken}, int64(len(text)))
	require.NoError(t, err, "the data are not read")
}

func TestLookupInNothing(t *testing.T) {
	h, err := parse(file("{}", 0))
	require.NoError(t, err)
	for _, h := range []*Header{h, {}} {
		_, ok := h.Lookup("")
		require.False(t, ok)
	}
}

// Shapes share memory, but what is appended to one does not go into another.
func TestShapesAreApart(t *testing.T) {
	h, err := parse(file(`{"a":{"dtype":"U8","shape":[1,2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]},"c":{"dtype":"U8","shape":[],"data_offsets":[5,6]}}`, 6))
	require.NoError(t, err)
	for _, x := range h.Tensors {
		_ = append(x.Shape, 8, 9)
	}
	require.Equal(t, []int{1, 2}, h.Tensors[0].Shape)
	require.Equal(t, []int{3}, h.Tensors[1].Shape)
	require.Equal(t, []int{}, h.Tensors[2].Shape)
}

// A name of any length makes an error that a person reads.
func TestLongNames(t *testing.T) {
	name := strings.Repeat("é", 1000)
	h, err := parse(file(`{"`+name+`":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}`, 2))
	broken := requireFormatError(t, h, err)
	require.Equal(t, strings.Repeat("é", 60)+"…", broken.Name)
	require.Less(t, len(err.Error()), 300)
	h, err = parse(file(`{"`+strings.Repeat("x", 119)+`é":{}}`, 2))
	require.Equal(t, strings.Repeat("x", 119)+"…", requireFormatError(t, h, err).Name)
}

func TestManyTensors(t *testing.T) {
	const n = 100_000
	text := manyTensors(n)
	h, err := parse(text)
	require.NoError(t, err)
	require.Len(t, h.Tensors, n)
	for i, x := range h.Tensors {
		if found, ok := h.Lookup(x.Name); !ok || found.Begin != x.Begin {
			t.Fatalf("tensor %d, %q, is not found", i, x.Name)
		}
		if i > 0 && x.Begin != h.Tensors[i-1].End {
			t.Fatalf("tensor %d begins at %d", i, x.Begin)
		}
	}
}

// manyTensors is a file as a mixture of experts in half precision has it.
func manyTensors(n int) string {
	tensors := make([]Tensor, n)
	for i := range tensors {
		tensors[i] = Tensor{Name: "model.layers." + strconv.Itoa(i/512) + ".mlp.experts." + strconv.Itoa(i%512) + ".down_proj.weight", DType: BF16, Shape: []int{1, 1 + i%3}}
	}
	h, start, err := NewHeader(tensors, nil)
	if err != nil {
		panic(err)
	}
	return string(start) + strings.Repeat("\x00", int(h.Size-h.DataOffset))
}

func BenchmarkReadHeader(b *testing.B) {
	text := manyTensors(100_000)
	b.ReportAllocs()
	for b.Loop() {
		h, err := parse(text)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(h.DataOffset), "B/header")
	}
}
