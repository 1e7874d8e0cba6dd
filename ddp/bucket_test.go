package ddp

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// Buckets are cut along the backward pass, the first one smaller.
func TestSplit(t *testing.T) {
	for _, c := range []struct {
		lens         []int
		first, bytes int
		order        []int
		want         [][]int
	}{
		{[]int{10, 10, 10, 10}, 40, 80, backwards(4), [][]int{{3}, {1, 2}, {0}}},
		{[]int{10, 10, 10, 10}, 1, 1, backwards(4), [][]int{{3}, {2}, {1}, {0}}},
		{[]int{10, 10, 10, 10}, 1 << 20, 1 << 20, backwards(4), [][]int{{0, 1, 2, 3}}},
		{[]int{1, 1000, 1, 1}, 8, 16, backwards(4), [][]int{{2, 3}, {1}, {0}}},
		{[]int{0, 0}, 4, 4, backwards(2), [][]int{{0, 1}}},
		{[]int{10, 10, 10, 10}, 40, 80, []int{1, 3, 0, 2}, [][]int{{1}, {0, 3}, {2}}},
	} {
		var got [][]int
		for _, b := range split(c.lens, floats(len(c.lens)), c.order, c.first, c.bytes) {
			got = append(got, b.grads)
		}
		require.Equal(t, c.want, got, "%v in %d and %d bytes", c.lens, c.first, c.bytes)
	}
	b := split([]int{5, 3, 4}, floats(3), backwards(3), 1<<20, 1<<20)[0]
	require.Equal(t, []int{0, 8, 12}, b.at, "each gradient begins at a multiple of 16 bytes")
	require.Equal(t, 16, b.len)
}

// A bucket has one type. Buckets are in the order in which they become complete, and the first
// one of each type is smaller.
func TestSplitByType(t *testing.T) {
	types := []memory.DType{memory.Float32, memory.BFloat16, memory.Float32, memory.BFloat16, memory.Float32, memory.Float32}
	var got [][]int
	for _, b := range split([]int{10, 20, 10, 20, 10, 10}, types, backwards(6), 40, 80) {
		for _, i := range b.grads {
			require.Equal(t, b.dtype, types[i])
		}
		got = append(got, b.grads)
	}
	require.Equal(t, [][]int{{5}, {3}, {2, 4}, {1}, {0}}, got)
}

func floats(n int) []memory.DType { return slices.Repeat([]memory.DType{memory.Float32}, n) }
