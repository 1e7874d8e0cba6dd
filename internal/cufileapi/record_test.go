package cufileapi

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as cufile.h declares them;
// header_test.go compares them with it.
var signatures = dltest.Signatures{
	"cuFileHandleRegister":     "#o8 p24",
	"cuFileHandleDeregister":   "-w",
	"cuFileBufRegister":        "#w w i",
	"cuFileBufDeregister":      "#w",
	"cuFileRead":               "#w w w w w",
	"cuFileWrite":              "#w w w w w",
	"cuFileDriverOpen":         "#",
	"cuFileDriverClose_v2":     "#",
	"cuFileGetVersion":         "#o4=1150",
	"cuFileSetParameterString": "#i s",
}

// The golden file shows for each method what C received and what the method returned.
func TestRecordedCalls(t *testing.T) {
	text := ""
	for _, result := range []Result{Success, CUDAFailed(cudadrv.ErrorInvalidContext)} {
		rec := dltest.NewRecorder(t, signatures, uint64(result))
		lib, err := newLib(rec.Resolve, "recorded")
		require.NoError(t, err)
		c := dltest.NewCalls(rec, LogDir, &Descr{Type: OpaqueFD, FD: 77, FSOps: 0xf5})
		dltest.Methods[API](c, lib)
		c.Call("BufRegister, relaxed", lib.BufRegister, cudadrv.DevicePtr(1), uintptr(2), RDMARelaxedOrdering)
		text += fmt.Sprintf("# C returns %v\n%s", result, c.Text())
	}
	dltest.Golden(t, "testdata/record.golden", text)
}

func TestCallsDoNotAllocate(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	var a API = lib
	for name, call := range map[string]func(){
		"Read":        func() { _, _ = a.Read(1, 2, 3, 4, 5) },
		"Write":       func() { _, _ = a.Write(1, 2, 3, 4, 5) },
		"BufRegister": func() { a.BufRegister(1, 2, 3) },
	} {
		require.Zero(t, testing.AllocsPerRun(200, call), name)
	}
}

const transferC = `
#include <errno.h>
#include <stddef.h>
#include <sys/types.h>
/* The size says what to return, the offset what to leave in errno. */
ssize_t cuFileRead(void *h, void *p, size_t size, off_t at, off_t dev) { if (at) errno = (int)at; return (ssize_t)size; }
ssize_t cuFileWrite(void *h, const void *p, size_t size, off_t at, off_t dev) { if (at) errno = (int)at; return -(ssize_t)size; }
`

// What Read and Write return is a count, an errno or a code.
func TestTransferResults(t *testing.T) {
	c := dltest.Load(t, transferC)
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(func(name string) (uintptr, bool) {
		if p, ok := c.Symbol(name); ok {
			return p, true
		}
		return rec.Resolve(name)
	}, "composed")
	require.NoError(t, err)
	for _, x := range []struct {
		returned, errno int64
		n               int64
		err             error
	}{
		{0, 0, 0, nil}, {4096, 0, 4096, nil}, {1 << 40, int64(syscall.EIO), 1 << 40, nil},
		{-1, int64(syscall.ENOSPC), 0, syscall.ENOSPC}, {-1, 0, 0, syscall.EIO},
		{-1, 5017, 0, InvalidMappingRange}, {-5027, 0, 0, HandleNotRegistered}, {-5011, int64(syscall.EIO), 0, CUDADriverError},
	} {
		n, err := lib.Read(1, 2, uintptr(x.returned), x.errno, 0)
		require.Equal(t, x.n, n, x)
		require.Equal(t, x.err, err, x)
		if x.returned <= 0 {
			n, err = lib.Write(1, 2, uintptr(-x.returned), x.errno, 0)
			require.Equal(t, x.n, n, x)
			require.Equal(t, x.err, err, x)
		}
	}
}

func TestSymbolTable(t *testing.T) {
	signatures.Require(t, dl.Since(symbols[:], minVersion))
	for f := range NumFuncs {
		require.GreaterOrEqual(t, f.Since(), int32(1000), f.Name())
		require.LessOrEqual(t, f.Since(), int32(1150), f.Name())
	}
}

func TestOpenRefusesOldLibrary(t *testing.T) {
	sigs := dltest.Signatures{}
	for f := range NumFuncs {
		if f.Since() < minVersion {
			sigs[f.Name()] = signatures[f.Name()]
		}
	}
	_, err := newLib(dltest.NewRecorder(t, sigs, 0).Resolve, "/lib/libcufile.so.1.3")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "cuFile at /lib/libcufile.so.1.3: Chorus needs 1.4 or newer")
	require.Equal(t, []string{"cuFileDriverClose_v2"}, e.Missing)
}

// A library of the oldest version that is accepted lacks what came later.
func TestMissingFunctions(t *testing.T) {
	sigs := dltest.Signatures{}
	for f := range NumFuncs {
		if f.Since() <= minVersion {
			sigs[f.Name()] = signatures[f.Name()]
		}
	}
	rec := dltest.NewRecorder(t, sigs, 0)
	lib, err := newLib(rec.Resolve, "/lib/libcufile.so.0")
	require.NoError(t, err)
	require.Equal(t, int32(minVersion), lib.Version())
	rec.Take()
	_, r := lib.GetVersion()
	require.Equal(t, MissingSymbol, r)
	require.Equal(t, MissingSymbol, lib.SetParameterString(LogDir, ""))
	require.Empty(t, rec.Take())
}

func TestVersionText(t *testing.T) {
	require.Equal(t, "1.15", VersionText(1150))
	require.Equal(t, "1.7", VersionText(1070))
}
