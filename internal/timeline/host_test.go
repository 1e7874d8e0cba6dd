package timeline

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOpenRangesAreLimited begins more ranges than the limit and ends all.
func TestOpenRangesAreLimited(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := start(t)
	require.Zero(t, r.Push("outermost"))
	for range maxDepth - 1 {
		r.Push("range")
	}
	require.Equal(t, maxDepth-1, r.Push("innermost"))
	for depth := maxDepth - 1; depth >= 0; depth-- {
		require.Equal(t, depth, r.Pop())
	}
	require.Equal(t, -1, r.Pop(), "the outermost range is forgotten")
	require.Empty(t, r.pushed)
}
