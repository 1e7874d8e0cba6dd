package cufileapi

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

func TestResults(t *testing.T) {
	require.Equal(t, "CU_FILE_HANDLE_NOT_REGISTERED", HandleNotRegistered.Error())
	require.Equal(t, "the file descriptor is not registered", HandleNotRegistered.Meaning())
	require.Equal(t, "cufile error 5032", Result(5032).Error())
	require.Empty(t, Result(5032).Meaning())
	require.Equal(t, "missing symbol", MissingSymbol.Error())
	for r, e := range results {
		require.Equal(t, e.name, r.Error())
		require.NotEmpty(t, e.meaning, e.name)
		require.False(t, strings.HasSuffix(e.meaning, "."), e.name)
		require.True(t, r == MissingSymbol || strings.HasPrefix(e.name, "CU_FILE_"), e.name)
	}
}

// cufile.h has a code for each number from 5001 to 5050, but for two.
func TestEveryResultIsNamed(t *testing.T) {
	for v := Result(baseErr + 1); v <= IOMaxError; v++ {
		_, named := results[v]
		require.Equal(t, v != 5021 && v != 5032, named, "%d", v)
	}
	constants := dltest.Constants(t, "result.go", "Result")
	for name, v := range constants {
		require.Contains(t, results, Result(v), name)
	}
	require.Len(t, results, len(constants))
}

// A result has two halves, and errors.Is finds both.
func TestBothHalves(t *testing.T) {
	r := CUDAFailed(cudadrv.ErrorOutOfMemory)
	require.Equal(t, CUDADriverError, r.Code())
	require.Equal(t, cudadrv.ErrorOutOfMemory, r.CUDA())
	require.Equal(t, "CU_FILE_CUDA_DRIVER_ERROR: CUDA_ERROR_OUT_OF_MEMORY", r.Error())
	err := fmt.Errorf("gds: reading: %w", r)
	require.ErrorIs(t, err, CUDADriverError)
	require.ErrorIs(t, err, cudadrv.ErrorOutOfMemory)
	require.NotErrorIs(t, err, cudadrv.ErrorInvalidValue)
	require.NotErrorIs(t, err, InvalidValue)
	require.NoError(t, errors.Unwrap(IOError))
	require.ErrorIs(t, fmt.Errorf("gds: %w", IOError), IOError)
}
