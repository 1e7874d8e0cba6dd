package training

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestShare(t *testing.T) {
	for size := 1; size <= 7; size++ {
		next := 0
		for r := range size {
			from, to := Share(BatchRows, r, size)
			require.Equal(t, next, from)
			require.InDelta(t, float64(BatchRows)/float64(size), to-from, 1)
			next = to
		}
		require.Equal(t, BatchRows, next)
	}
}
