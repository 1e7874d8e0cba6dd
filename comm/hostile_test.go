package comm

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// What another process tells is checked before anything is allocated or indexed by it.
func TestHostilePeers(t *testing.T) {
	for _, n := range []int64{-1, math.MinInt64, math.MaxInt64, MaxValueBytes + 1} {
		var e *ValueError
		require.ErrorAs(t, checkHeader("gather values", 3, n), &e)
		require.Equal(t, 3, e.Rank)
	}
	for _, n := range []int64{0, MaxValueBytes} {
		require.NoError(t, checkHeader("gather values", 3, n))
	}
	for _, hosts := range [][]int{nil, {0}, {0, 1, 2}} {
		require.ErrorIs(t, (&admission{Hosts: hosts}).check(2), ErrMismatch)
	}
	require.NoError(t, (&admission{Hosts: []int{0, 0}}).check(2))
	require.ErrorIs(t, (&admission{Refused: "no"}).check(2), ErrMismatch)
}
