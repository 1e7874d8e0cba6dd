package checkpoint

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
)

// manyToMatch is a Restore of n tensors on four ranks, each of which has every tensor.
func manyToMatch(n int) *restoring {
	h := &safetensors.Header{}
	files := &Checkpoint{files: []*gds.File{{}}, headers: []*safetensors.Header{h}, where: map[string]place{}}
	s := &Saved{m: &manifest{}, files: files}
	r := &restoring{peers: &peers{ranks: 4}, saved: s, by: make([][]partInfo, 4)}
	for i := range n {
		t := safetensors.Tensor{Name: fmt.Sprintf("layer.%06d", i), DType: safetensors.I32, Shape: []int{4}, Begin: int64(16 * i), End: int64(16*i + 16)}
		h.Tensors = append(h.Tensors, t)
		if err := files.add(place{tensor: i}, &t); err != nil {
			panic(err)
		}
		s.m.Tensors = append(s.m.Tensors, savedTensor{Name: t.Name, DType: t.DType.String(), Shape: t.Shape, Rows: 1, Width: 4, Parts: []savedPart{{Key: t.Name, Len: 4}}})
		for rank := range r.by {
			r.by[rank] = append(r.by[rank], partInfo{Name: t.Name, Format: t.DType, Shape: t.Shape, Stored: t.Shape, Box: box{1, 4, 0, 4}})
		}
	}
	return r
}

// TestMatchManyTensors: each of 32,000 tensors is found. BenchmarkRestoreMany has the time.
func TestMatchManyTensors(t *testing.T) {
	const n = 32000
	r := manyToMatch(n)
	res, err := r.match()
	require.NoError(t, err)
	require.Equal(t, &Restored{}, res)
	require.Len(t, r.moves, n)
}
