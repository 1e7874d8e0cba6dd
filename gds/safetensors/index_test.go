package safetensors

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func parseIndex(text string) (*Index, error) {
	return ReadIndex(strings.NewReader(text), int64(len(text)))
}

func TestReadIndex(t *testing.T) {
	x, err := parseIndex(` {"metadata": {"total_size": 12, "note": [1, {"a": "\u00e9"}]}, "other": [null],
		"weight_map": {"b\u0000": "2.safetensors", "a": "1.safetensors", "": "..2", "c": "2.safetensors"}}
	`)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"b\x00": "2.safetensors", "a": "1.safetensors", "": "..2", "c": "2.safetensors"}, x.WeightMap)
	require.Equal(t, []string{"..2", "1.safetensors", "2.safetensors"}, x.Files())
	require.JSONEq(t, `{"total_size": 12, "note": [1, {"a": "é"}]}`, string(x.Metadata))
	n, ok := x.TotalSize()
	require.True(t, ok)
	require.Equal(t, int64(12), n)

	x, err = parseIndex(`{"weight_map":{}}`)
	require.NoError(t, err)
	require.Empty(t, x.Files())
	require.Nil(t, x.Metadata)
}

func TestTotalSize(t *testing.T) {
	for text, want := range map[string]int64{
		`{"total_size":0}`: 0, `{"total_size":26031728640.0}`: 26031728640, `{"total_size":9007199254740992}`: 1 << 53,
		`{}`: -1, `{"total_size":-1}`: -1, `{"total_size":"12"}`: -1, `{"total_size":null}`: -1, `{"total_size":1e300}`: -1, `{"total_size":1.5}`: -1,
	} {
		x, err := parseIndex(`{"metadata":` + text + `,"weight_map":{}}`)
		require.NoError(t, err)
		n, ok := x.TotalSize()
		require.Equal(t, want >= 0, ok, text)
		require.Equal(t, max(want, 0), n, text)
	}
	_, ok := new(Index).TotalSize()
	require.False(t, ok)
}

// wrongIndexes has what is said of each.
var wrongIndexes = []struct{ name, text, wrong string }{
	{"nothing", ``, `byte 0: want '{' for the index, got the end`},
	{"array", `[]`, `byte 0: want '{' for the index, got '['`},
	{"no map", `{"metadata":{}}`, `byte 0: weight_map is missing: the file is not an index of safetensors files`},
	{"more after it", `{"weight_map":{}} {}`, `byte 18: want the end after the JSON, got '{'`},
	{"not UTF-8", "{\"weight_map\":{\"\xff\":\"1\"}}", `byte 16: the JSON is not valid UTF-8`},
	{"map an array", `{"weight_map":[]}`, `byte 14: want '{' for weight_map, got '['`},
	{"map null", `{"weight_map":null}`, `byte 14: want '{' for weight_map, got 'n'`},
	{"map twice", `{"weight_map":{},"weight_map":{}}`, `byte 17: weight_map occurs twice`},
	{"map cut", `{"weight_map":{"a":"1"`, `byte 22: want ',' or '}' after a value, got the end`},
	{"metadata twice", `{"metadata":{},"weight_map":{},"metadata":{}}`, `byte 31: metadata occurs twice`},
	{"metadata an array", `{"metadata":[],"weight_map":{}}`, `byte 12: want '{' for metadata, got '['`},
	{"metadata broken", `{"metadata":{"total_size":1.},"weight_map":{}}`, `byte 26: 1. is not a number in JSON`},
	{"name twice", `{"weight_map":{"a":"1","\u0061":"2"}}`, `byte 23: tensor "a": duplicate name`},
	{"file a number", `{"weight_map":{"a":1}}`, `byte 19: tensor "a": want '"' for the file of a tensor, got '1'`},
	{"file empty", `{"weight_map":{"a":""}}`, `byte 19: tensor "a": "" is not the name of a file`},
	{"file is the folder", `{"weight_map":{"a":"."}}`, `byte 19: tensor "a": "." is not the name of a file`},
	{"file is the folder above", `{"weight_map":{"a":".."}}`, `byte 19: tensor "a": ".." is not the name of a file`},
	{"file above", `{"weight_map":{"a":"../1"}}`, `byte 19: tensor "a": "../1" is not the name of a file next to the index: want a name without separators`},
	{"file with a line end", `{"weight_map":{"a":"1\n2"}}`, `byte 19: tensor "a": "1\n2" has a line end or another control character: rename the file`},
	{"file below", `{"weight_map":{"a":"b/1"}}`, `byte 19: tensor "a": "b/1" is not the name of a file next to the index: want a name without separators`},
	{"file from the root", `{"weight_map":{"a":"/etc/passwd"}}`, `byte 19: tensor "a": "/etc/passwd" is not the name of a file next to the index: want a name without separators`},
	{"file with an escaped separator", `{"weight_map":{"a":"\u002fetc"}}`, `byte 19: tensor "a": "/etc" is not the name of a file next to the index: want a name without separators`},
	{"file with the other separator", `{"weight_map":{"a":"..\\1"}}`, `byte 19: tensor "a": "..\\1" is not the name of a file next to the index: want a name without separators`},
	{"file with NUL", `{"weight_map":{"a":"1\u0000.safetensors"}}`, `byte 19: tensor "a": "1\x00.safetensors" is not the name of a file next to the index: want a name without separators`},
	{"nested deep", `{"x":` + strings.Repeat("[", 1000), `byte 131: arrays and objects are nested more than 127 levels deep`},
	{"surrogate alone", `{"weight_map":{"a":"\udc00"}}`, `byte 20: a string has half of a surrogate pair, "\udc00", without the other`},
}

func TestWrongIndexes(t *testing.T) {
	for _, c := range wrongIndexes {
		t.Run(c.name, func(t *testing.T) {
			x, err := parseIndex(c.text)
			require.Nil(t, x)
			var broken *FormatError
			require.ErrorAs(t, err, &broken)
			require.EqualError(t, err, "safetensors: "+c.wrong)
		})
	}
	_, err := ReadIndex(strings.NewReader("{}"), maxHeader+1)
	require.EqualError(t, err, "safetensors: byte 0: the index has 100000001 bytes: want at most 100000000")
	_, err = ReadIndex(strings.NewReader("{}"), 3)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	_, err = ReadIndex(strings.NewReader("{}"), -1)
	require.EqualError(t, err, "safetensors: byte 0: want '{' for the index, got the end")
}

// Every beginning of an index is refused.
func TestIndexTruncation(t *testing.T) {
	const text = `{"metadata":{"total_size":12},"weight_map":{"a":"1","\u00e9":"2"}}`
	_, err := parseIndex(text)
	require.NoError(t, err)
	for n := range len(text) {
		_, err := parseIndex(text[:n])
		require.Error(t, err, text[:n])
	}
}

// The index as transformers writes it.
func TestWriteIndex(t *testing.T) {
	x, err := NewIndex([]Shard{{"1<", []Tensor{{Name: "b", DType: F32, Shape: []int{2}}, {Name: "a&", DType: U8}}}, {"2", []Tensor{{Name: "c", DType: F4, Shape: []int{4}}}}})
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, x.Write(&b))
	require.Equal(t, `{
  "metadata": {
    "total_size": 11
  },
  "weight_map": {
    "a&": "1<",
    "b": "1<",
    "c": "2"
  }
}
`, b.String())
	text, err := json.Marshal(new(Index))
	require.NoError(t, err)
	require.Equal(t, `{"weight_map":{}}`, string(text))
}

func TestWrongIndexIsNotWritten(t *testing.T) {
	for _, c := range []struct {
		wrong string
		x     Index
	}{
		{`safetensors: index: "1": tensor "\xff" has a name or a file name that is not valid UTF-8`, Index{WeightMap: map[string]string{"\xff": "1"}}},
		{`safetensors: index: "\xff": tensor "a" has a name or a file name that is not valid UTF-8`, Index{WeightMap: map[string]string{"a": "\xff"}}},
		{`safetensors: write an invalid index: safetensors: byte 19: tensor "a": ".." is not the name of a file`, Index{WeightMap: map[string]string{"a": ".."}}},
		{`safetensors: write an invalid index: safetensors: byte 12: want '{' for metadata, got '1'`, Index{Metadata: json.RawMessage("1")}},
		{"safetensors: write an index: json: error calling MarshalJSON for type ", Index{Metadata: json.RawMessage("}")}},
	} {
		var b bytes.Buffer
		require.ErrorContains(t, c.x.Write(&b), c.wrong)
		require.Zero(t, b.Len())
	}
	err := new(Index).Write(&limited{err: io.ErrShortWrite})
	require.ErrorIs(t, err, io.ErrShortWrite)
	require.ErrorContains(t, err, "safetensors: write an index: ")
}

func TestCheck(t *testing.T) {
	header := func(names ...string) *Header {
		var tensors []Tensor
		for _, n := range names {
			tensors = append(tensors, Tensor{Name: n, DType: U8})
		}
		h, _, err := NewHeader(tensors, nil)
		require.NoError(t, err)
		return h
	}
	x := &Index{WeightMap: map[string]string{"a": "1", "b": "1", "c": "2"}}
	for _, c := range []struct {
		name    string
		wrong   string
		headers map[string]*Header
	}{
		{"right", "", map[string]*Header{"1": header("a", "b"), "2": header("c")}},
		{"a tensor more", "", map[string]*Header{"1": header("a", "b", "d"), "2": header("c")}},
		{"a file more", "", map[string]*Header{"1": header("a", "b"), "2": header("c"), "3": header("a")}},
		{"a file less", `index: "2": the index contains this file, but its header was not read`, map[string]*Header{"1": header("a", "b", "c")}},
		{"a tensor less", `index: "1": tensor "a" is not in this file, as the index says, nor in any other`, map[string]*Header{"1": header(), "2": header("c")}},
		{"in the other file", `index: "1": tensor "b" is not in this file, as the index says, but in "2"`, map[string]*Header{"1": header("a"), "2": header("b", "c")}},
		{"in two files", `index: "2": tensor "a" is also in "1"`, map[string]*Header{"1": header("a", "b"), "2": header("a", "c")}},
		{"unknown in two files", `index: "2": tensor "d" is also in "1"`, map[string]*Header{"1": header("a", "b", "d"), "2": header("d", "c")}},
		{"the empty name in two files", `index: "2": tensor "" is also in "1"`, map[string]*Header{"1": header("a", "b", ""), "2": header("", "c")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := x.Check(c.headers)
			if c.wrong == "" {
				require.NoError(t, err)
				return
			}
			var e *IndexError
			require.ErrorAs(t, err, &e)
			require.EqualError(t, err, "safetensors: "+c.wrong)
		})
	}
	empty := &Index{WeightMap: map[string]string{"": "1"}}
	require.NoError(t, empty.Check(map[string]*Header{"1": header("")}))
	require.EqualError(t, empty.Check(map[string]*Header{"1": header()}), `safetensors: index: "1": tensor "" is not in this file, as the index says, nor in any other`)
	require.NoError(t, new(Index).Check(nil))
}

func TestSplit(t *testing.T) {
	tensor := func(bytes int) Tensor { return Tensor{Name: fmt.Sprint(bytes), DType: U8, Shape: []int{bytes}} }
	for _, c := range []struct {
		sizes []int
		most  int64
		want  [][]int
	}{
		{nil, 1, [][]int{{}}},
		{[]int{3}, 1, [][]int{{3}}},
		{[]int{1, 2, 3}, 6, [][]int{{1, 2, 3}}},
		{[]int{1, 2, 3}, 5, [][]int{{1, 2}, {3}}},
		{[]int{3, 2, 1}, 3, [][]int{{3}, {2, 1}}},
		{[]int{1, 9, 2, 0}, 3, [][]int{{1}, {9}, {2, 0}}},
		{[]int{0, 4, 0}, 4, [][]int{{0, 4, 0}}},
	} {
		var tensors []Tensor
		for _, n := range c.sizes {
			tensors = append(tensors, tensor(n))
		}
		shards, err := Split("model", tensors, c.most)
		require.NoError(t, err)
		require.Len(t, shards, len(c.want))
		for i, s := range shards {
			want := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
			if len(shards) == 1 {
				want = "model.safetensors"
			}
			require.Equal(t, want, s.File)
			require.Len(t, s.Tensors, len(c.want[i]), "%v in files of %d", c.sizes, c.most)
			for k, n := range c.want[i] {
				require.Equal(t, tensor(n), s.Tensors[k])
			}
		}
	}
}

func TestWrongSplit(t *testing.T) {
	for _, c := range []struct {
		name  string
		most  int64
		wrong string
	}{
		{"model", 0, `split: files of at most 0 bytes: want 1 or more`},
		{"a/b", 1, `split: "a/b" is not the name of a file next to the index: want a name without separators`},
		{"model", 1, `tensor "a": invalid is not a dtype of the format`},
	} {
		_, err := Split(c.name, []Tensor{{Name: "a"}}, c.most)
		require.EqualError(t, err, "safetensors: "+c.wrong)
	}
	_, err := NewIndex([]Shard{{"1", []Tensor{{Name: "a", DType: U8}}}, {"2", []Tensor{{Name: "a", DType: U8}}}})
	require.EqualError(t, err, `safetensors: index: "2": tensor "a" is also in "1"`)
	_, err = NewIndex([]Shard{{"1", []Tensor{{Name: "a"}}}})
	require.EqualError(t, err, `safetensors: tensor "a": invalid is not a dtype of the format`)
}

// A checkpoint that is split, written and read is whole, whatever is in it.
func TestRandomCheckpointsRoundTrip(t *testing.T) {
	eachSeed(t, 200, func(r *rand.Rand) {
		data := randomTensors(r, r.IntN(20))
		var tensors []Tensor
		raw, total := map[string][]byte{}, 0
		for _, d := range data {
			tensors = append(tensors, d.Tensor)
			raw[d.Name] = d.Raw
			total += len(d.Raw)
		}
		most := int64(1 + r.IntN(500))
		shards, err := Split("m", tensors, most)
		require.NoError(t, err)
		x, err := NewIndex(shards)
		require.NoError(t, err)
		var text bytes.Buffer
		require.NoError(t, x.Write(&text))
		x, err = ReadIndex(bytes.NewReader(text.Bytes()), int64(text.Len()))
		require.NoError(t, err, text.String())
		said, ok := x.TotalSize()
		require.True(t, ok)
		require.Equal(t, int64(total), said)

		headers, found := map[string]*Header{}, 0
		for _, s := range shards {
			var part []Data
			for _, x := range s.Tensors {
				part = append(part, Data{x, raw[x.Name]})
			}
			var b bytes.Buffer
			require.NoError(t, Write(&b, nil, part...))
			h, err := ReadHeader(bytes.NewReader(b.Bytes()), int64(b.Len()))
			require.NoError(t, err)
			require.True(t, h.Size-h.DataOffset <= most || len(h.Tensors) == 1)
			headers[s.File] = h
			for _, t2 := range h.Tensors {
				require.Equal(t, s.File, x.WeightMap[t2.Name])
				require.True(t, bytes.Equal(raw[t2.Name], b.Bytes()[t2.Begin:t2.End]))
				found++
			}
		}
		require.Equal(t, len(data), found)
		require.NoError(t, x.Check(headers))
	})
}
