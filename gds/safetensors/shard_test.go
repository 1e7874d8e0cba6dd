package safetensors

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

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
