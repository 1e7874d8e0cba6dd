package cufileapi

import (
	"regexp"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

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
