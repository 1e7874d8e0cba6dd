package cufileapi

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unsafe"

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
	constants := dltest.Constants(t, "cufile.go", "Result")
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

func findHeader(t *testing.T) *dltest.Header { return dltest.FindHeader(t, "cufile.h", "cuda.h") }

// require checks those of the values that the header, which may be older, knows.
func requireKnown(t *testing.T, h *dltest.Header, values map[string]int64) {
	t.Helper()
	known := map[string]int64{}
	for c, v := range values {
		all := true
		for _, word := range regexp.MustCompile(`[A-Za-z_]\w+`).FindAllString(c, -1) {
			all = all && (word == "sizeof" || word == "offsetof" || h.Mentions(word))
		}
		if all {
			known[c] = v
		}
	}
	require.NotEmpty(t, known)
	h.RequireValues(known)
}

func TestHeaderResults(t *testing.T) {
	h := findHeader(t)
	values := map[string]int64{}
	for r, e := range results {
		if r != MissingSymbol {
			values[e.name] = int64(r)
		}
	}
	requireKnown(t, h, values)
	for _, name := range h.Names(`CUFILE_OP\(\s*CUFILEOP_BASE_ERR\s*\+\s*\d+\s*,\s*(\w+)`) {
		require.Contains(t, values, name)
	}
}

func TestHeaderPrototypes(t *testing.T) { findHeader(t).RequirePrototypes(signatures) }

func TestHeaderConstants(t *testing.T) {
	requireKnown(t, findHeader(t), map[string]int64{
		"CU_FILE_HANDLE_TYPE_OPAQUE_FD": int64(OpaqueFD), "CU_FILE_HANDLE_TYPE_OPAQUE_WIN32": int64(OpaqueWin32),
		"CU_FILE_HANDLE_TYPE_USERSPACE_FS": int64(UserspaceFS), "CU_FILE_RDMA_REGISTER": int64(RDMARegister),
		"CU_FILE_RDMA_RELAXED_ORDERING": int64(RDMARelaxedOrdering),
		"CUFILE_PARAM_LOGGING_LEVEL":    int64(LoggingLevel),
		"CUFILE_PARAM_ENV_LOGFILE_PATH": int64(EnvLogfilePath),
		"CUFILE_PARAM_LOG_DIR":          int64(LogDir),
	})
}

func TestHeaderLayouts(t *testing.T) {
	requireKnown(t, findHeader(t), map[string]int64{
		"sizeof(CUfileError_t)":           int64(unsafe.Sizeof(Result(0))),
		"sizeof(CUfileDescr_t)":           int64(unsafe.Sizeof(Descr{})),
		"offsetof(CUfileDescr_t, fs_ops)": int64(unsafe.Offsetof(Descr{}.FSOps)),
	})
}

// The sizes and offsets of C, computed from the headers of CUDA 13.0 by a compiler.
func TestLayoutsAreThoseOfC(t *testing.T) {
	var d Descr
	require.EqualValues(t, 24, unsafe.Sizeof(d))
	require.EqualValues(t, 8, unsafe.Offsetof(d.FD))
	require.EqualValues(t, 16, unsafe.Offsetof(d.FSOps))
}

// The installed library has exactly the functions that the table says its version
// has.
func TestInstalledLibrary(t *testing.T) {
	l, err := Open()
	dltest.RequireInstalled(t, err)
	t.Logf("cuFile %s at %s", VersionText(l.Version()), l.Path())
	for f := range NumFuncs {
		require.Equal(t, l.Version() >= f.Since(), l.Has(f), "%s, since %s", f.Name(), VersionText(f.Since()))
	}
}
