package strided

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// Shared and Apart are never wrong, also for strides that repeat, of windows that overlap themselves.
func TestSharingIsNeverWrong(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	some := func() *Array {
		x := &Array{DType: memory.Float32}
		for range rng.IntN(4) {
			x.Shape, x.Strides = append(x.Shape, 1+rng.IntN(4)), append(x.Strides, rng.IntN(9))
		}
		return x
	}
	places := func(x *Array) map[int]bool {
		at := []int{0}
		for i, n := range x.Shape {
			var more []int
			for _, p := range at {
				for k := range n {
					more = append(more, p+k*x.Strides[i])
				}
			}
			at = more
		}
		m := map[int]bool{}
		for _, p := range at {
			m[p] = true
		}
		return m
	}
	count := map[Sharing]int{}
	for range 100000 {
		x, y, distance := some(), some(), rng.IntN(41)-20
		common := false
		in := places(x)
		for p := range places(y) {
			common = common || in[p+distance]
		}
		got := sharing(x, y, int64(4*distance))
		count[got]++
		require.False(t, got == Shared && !common || got == Apart && common,
			"%v %v and %v %v at %d: %v", x.Shape, x.Strides, y.Shape, y.Strides, distance, got)
	}
	require.Less(t, count[Unknown], 5000, "%v", count)
}
