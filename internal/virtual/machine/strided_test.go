package machine

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The runs of a layout cover its elements and no others.
func TestNeighboursCoverTheLayout(t *testing.T) {
	const seed = 5
	r := rand.New(rand.NewPCG(seed, seed))
	for round := range 2000 {
		width := 1 + r.IntN(3)
		var dims []Steps
		for range r.IntN(5) {
			dims = append(dims, Steps{1 + r.IntN(5), r.IntN(40)})
		}
		want, got := map[int]bool{}, map[int]bool{}
		each(dims, 0, func(at int) {
			for i := range width {
				want[at+i] = true
			}
		})
		run, outer := neighbours(width, dims)
		each(outer, 0, func(at int) {
			for i := range run {
				got[at+i] = true
			}
		})
		require.Equal(t, want, got, "seed %d, round %d: %v of width %d", seed, round, dims, width)
	}
}

// A transposed matrix is one run, and a column is a run for each row.
func TestNeighboursAreFew(t *testing.T) {
	run, outer := neighbours(1, []Steps{{1024, 1}, {1024, 1024}})
	require.Equal(t, 1024*1024, run)
	require.Empty(t, outer)
	run, outer = neighbours(2, []Steps{{8, 0}, {4, 100}, {3, 2}})
	require.Equal(t, 6, run)
	require.Equal(t, []Steps{{4, 100}}, outer)
}
