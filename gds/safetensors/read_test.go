package safetensors

import (
	"encoding/binary"
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

func TestReadHeader(t *testing.T) {
	h, err := parse(file(` {"b":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]},
		"__metadata__":{"format":"pt"}, "a\u0041":{"data_offsets":[0,3],"x":[1,{"y":null}],"dtype":"BOOL","shape":[3]}, "e":{"shape":[],"dtype":"I8","data_offsets":[11,12]} } `, 12))
	require.NoError(t, err)
	d := h.DataOffset
	require.Equal(t, []Tensor{{"aA", Bool, []int{3}, d, d + 3}, {"b", F32, []int{2, 1}, d + 3, d + 11}, {"e", I8, []int{}, d + 11, d + 12}}, h.Tensors)
	require.Equal(t, map[string]string{"format": "pt"}, h.Metadata)
	x, ok := h.Lookup("b")
	require.True(t, ok)
	require.Equal(t, h.Tensors[1], x)
}

func manyTensors(n int) string {
	var tensors []Tensor
	for i := range n {
		tensors = append(tensors, Tensor{Name: "model.layers." + strconv.Itoa(i/8) + ".mlp.experts." + strconv.Itoa(i%8) + ".down_proj.weight", DType: BF16, Shape: []int{1, 1}})
	}
	_, b, err := NewHeader(tensors, nil)
	if err != nil {
		panic(err)
	}
	return string(b) + strings.Repeat("\x00", 2*n)
}

func BenchmarkReadHeader(b *testing.B) {
	text := manyTensors(100_000)
	b.ReportAllocs()
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		if _, err := parse(text); err != nil {
			b.Fatal(err)
		}
	}
}
