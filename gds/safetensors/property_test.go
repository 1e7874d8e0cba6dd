package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// foreign is an entry of a header for encoding/json, which reads and writes the
// headers that the tests compare with.
type foreign struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// randomTensors returns tensors with different names of all sorts of characters, and shapes that are
// whole numbers of bytes.
func randomTensors(r *rand.Rand, n int) []Data {
	letters := []rune("ab.01\"\\/\b\f\n\r\t\x00\x01\x1f\x7f é\u2028😀\ufffd{}[]:,<&")
	names := map[string]bool{reserved: true}
	var data []Data
	for len(data) < n {
		var name []rune
		for range r.IntN(8) {
			name = append(name, letters[r.IntN(len(letters))])
		}
		d := Data{Tensor: Tensor{Name: string(name), DType: Bool + DType(r.IntN(int(U64))), Shape: []int{}}}
		for range r.IntN(5) {
			d.Shape = append(d.Shape, r.IntN(6))
		}
		bits := d.DType.Bits()
		for _, dim := range d.Shape {
			bits *= dim
		}
		if names[d.Name] || bits%8 != 0 {
			continue
		}
		names[d.Name] = true
		d.Raw = make([]byte, bits/8)
		for i := range d.Raw {
			d.Raw[i] = byte(r.Uint32())
		}
		data = append(data, d)
	}
	return data
}

func eachSeed(t *testing.T, n int, f func(r *rand.Rand)) {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range n {
		f(r)
	}
}

func randomMetadata(r *rand.Rand) map[string]string {
	if r.IntN(2) == 0 {
		return nil
	}
	m := map[string]string{}
	for _, d := range randomTensors(r, r.IntN(4)) {
		m[d.Name] = d.Name + "\n"
	}
	return m
}

// What Write writes another reader understands, and ReadHeader reads it back.
func TestRandomFilesRoundTrip(t *testing.T) {
	eachSeed(t, 500, func(r *rand.Rand) {
		data, metadata := randomTensors(r, r.IntN(12)), randomMetadata(r)
		var b bytes.Buffer
		require.NoError(t, Write(&b, metadata, data...))
		h, err := ReadHeader(bytes.NewReader(b.Bytes()), int64(b.Len()))
		require.NoError(t, err)
		require.Equal(t, metadata, h.Metadata)
		require.Len(t, h.Tensors, len(data))
		require.Zero(t, h.DataOffset%8)

		n := binary.LittleEndian.Uint64(b.Bytes())
		var entries map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(b.Bytes()[8:8+n], &entries))
		if metadata != nil {
			var m map[string]string
			require.NoError(t, json.Unmarshal(entries[reserved], &m))
			require.Equal(t, metadata, m)
			delete(entries, reserved)
		}
		require.Len(t, entries, len(data))
		for _, d := range data {
			var e foreign
			require.NoError(t, json.Unmarshal(entries[d.Name], &e), "%q", d.Name)
			require.Equal(t, d.DType.String(), e.DType)
			require.Equal(t, d.Shape, e.Shape)
			place := b.Bytes()[8+n:][e.Offsets[0]:e.Offsets[1]]
			require.True(t, bytes.Equal(d.Raw, place), "%q", d.Name)
			if d.DType.Bits() >= 8 {
				require.Zero(t, e.Offsets[0]%int64(d.DType.Bits()/8), "wide types come first, so that all are aligned")
			}

			x, ok := h.Lookup(d.Name)
			require.True(t, ok, "%q", d.Name)
			require.Equal(t, Tensor{d.Name, d.DType, d.Shape, e.Offsets[0] + h.DataOffset, e.Offsets[1] + h.DataOffset}, x)
			require.Equal(t, int64(len(d.Raw)), x.Bytes())
		}
		require.True(t, slices.IsSortedFunc(h.Tensors, byPlace))
	})
}

// Tensors that another writer puts in any order read as they lie, and NewHeader
// makes one and the same file of them.
func TestRandomLayouts(t *testing.T) {
	eachSeed(t, 500, func(r *rand.Rand) {
		data := randomTensors(r, r.IntN(12))
		want := map[string]foreign{}
		end := int64(0)
		for _, d := range data {
			want[d.Name] = foreign{d.DType.String(), d.Shape, [2]int64{end, end + int64(len(d.Raw))}}
			end += int64(len(d.Raw))
		}
		text, err := json.Marshal(want)
		require.NoError(t, err)
		h, err := parse(file(string(text), int(end)))
		require.NoError(t, err, "%s", text)
		require.Len(t, h.Tensors, len(data))
		for i, x := range h.Tensors {
			e := want[x.Name]
			require.Equal(t, e, foreign{x.DType.String(), x.Shape, [2]int64{x.Begin - h.DataOffset, x.End - h.DataOffset}}, "%q", x.Name)
			if i > 0 {
				require.Equal(t, h.Tensors[i-1].End, x.Begin)
			}
		}

		_, one, err := NewHeader(h.Tensors, nil)
		require.NoError(t, err)
		r.Shuffle(len(h.Tensors), func(i, j int) { h.Tensors[i], h.Tensors[j] = h.Tensors[j], h.Tensors[i] })
		_, other, err := NewHeader(h.Tensors, nil)
		require.NoError(t, err)
		require.Equal(t, string(one), string(other))
	})
}
