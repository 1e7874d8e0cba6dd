package ncclapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

func TestResults(t *testing.T) {
	names := map[string]bool{}
	for r, e := range results {
		require.Equal(t, e.name, r.Error())
		require.NotEmpty(t, r.Meaning(), e.name)
		require.False(t, names[e.name], e.name)
		names[e.name] = true
	}
	require.Equal(t, "ncclResult 99", Result(99).Error())
}

func TestEveryResultIsNamed(t *testing.T) {
	constants := dltest.Constants(t, "nccl.go", "Result")
	for name, v := range constants {
		require.Contains(t, results, Result(v), name)
	}
	require.Len(t, results, len(constants))
}

func TestDTypeSize(t *testing.T) {
	for d := Int8; d <= Float8E5M2; d++ {
		require.NotZero(t, d.Size(), int32(d))
	}
	require.Zero(t, (Float8E5M2 + 1).Size())
}
