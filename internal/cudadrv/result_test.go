package cudadrv

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

func TestResults(t *testing.T) {
	names := map[string]bool{}
	for r, e := range results {
		require.Equal(t, e.name, r.Error())
		require.True(t, r == Success || strings.HasPrefix(e.name, "CUDA_ERROR_"), e.name)
		require.False(t, names[e.name], e.name)
		require.NotEmpty(t, r.Meaning(), e.name)
		require.False(t, strings.HasSuffix(r.Meaning(), "."), e.name)
		names[e.name] = true
	}
	require.Equal(t, "CUDA_ERROR_12345", Result(12345).Error())
	require.Empty(t, Result(12345).Meaning())
	require.True(t, ErrorIllegalAddress.Sticky())
	require.False(t, ErrorOutOfMemory.Sticky())
}

func TestEveryResultIsNamed(t *testing.T) {
	constants := dltest.Constants(t, "result.go", "Result")
	for name, v := range constants {
		require.Contains(t, results, Result(v), name)
	}
	require.Len(t, results, len(constants))
}
