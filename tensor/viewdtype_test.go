package tensor

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// TestViewDType has what torch gives for view(dtype).
func TestViewDType(t *testing.T) {
	x, err := OfHost([]uint8{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 2, 8)
	require.NoError(t, err)
	v, err := x.ViewDType(memory.Uint32)
	require.NoError(t, err)
	require.Equal(t, []int{2, 2}, v.Shape())
	require.Equal(t, []int{2, 1}, v.Strides())
	row, err := v.Select(0, 1)
	require.NoError(t, err)
	got, err := Data[uint32](row)
	require.NoError(t, err)
	require.Equal(t, []uint32{0x0c0b0a09, 0x100f0e0d}, got)
	back, err := v.ViewDType(memory.Int8)
	require.NoError(t, err)
	require.Equal(t, []int{2, 8}, back.Shape())
	require.Equal(t, []int{8, 1}, back.Strides())
	same, err := x.T().ViewDType(memory.Bool)
	require.NoError(t, err, "the same size needs no layout")
	require.Equal(t, x.T().Strides(), same.Strides())

	for _, tc := range []struct {
		of   func() (Tensor, error)
		as   memory.DType
		says string
	}{
		{func() (Tensor, error) { return x.Narrow(1, 1, 4) }, memory.Uint16, "begins at byte 1 of its memory: want a multiple of 2"},
		{func() (Tensor, error) { return x.Narrow(1, 0, 3) }, memory.Uint16, "3 bytes of the last dimension are not a multiple of 2"},
		{func() (Tensor, error) { return x.T(), nil }, memory.Uint16, "side by side"},
		{func() (Tensor, error) { return OfHost([]float32{1}) }, memory.Int16, "side by side"},
		{func() (Tensor, error) {
			y, err := OfHost(make([]uint8, 6), 2, 3)
			require.NoError(t, err)
			return y.Narrow(1, 0, 2)
		}, memory.Uint16, "the stride 3 of dimension 0 does not fit"},
		{func() (Tensor, error) { return x, nil }, memory.Invalid, "that is not an element type"},
		{func() (Tensor, error) { return Tensor{}, nil }, memory.Int8, "there is no tensor"},
	} {
		y, err := tc.of()
		require.NoError(t, err)
		_, err = y.ViewDType(tc.as)
		require.ErrorContains(t, err, tc.says)
	}
}
