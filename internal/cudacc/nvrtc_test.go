package cudacc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as nvrtc.h declares them.
var signatures = dltest.Signatures{
	"nvrtcVersion":              "o4 o4",
	"nvrtcGetNumSupportedArchs": "o4=2",
	"nvrtcGetSupportedArchs":    "O8=386547056715",
	"nvrtcCreateProgram":        "o8 s s i p8 p8",
	"nvrtcCompileProgram":       "w i a",
	"nvrtcGetCUBINSize":         "w o8=5",
	"nvrtcGetCUBIN":             "w o5=474214462819",
	"nvrtcGetPTXSize":           "w o8=4",
	"nvrtcGetPTX":               "w o4=5788752",
	"nvrtcGetProgramLogSize":    "w o8=4",
	"nvrtcGetProgramLog":        "w o4=6778732",
	"nvrtcDestroyProgram":       "p8",
}

func TestRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0x1234_0000_0000) // the upper half is noise
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	c := dltest.NewCalls(rec)
	dltest.Methods[NVRTC](c, lib)
	c.Call("CompileProgram, without options", lib.CompileProgram, NVRTCProgram(1), []string(nil))
	dltest.Golden(t, "testdata/record.golden", c.Text())
}

// A failure to tell the size is the result, and nothing is fetched.
func TestGetFails(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 6)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	code, r := lib.GetCUBIN(0xa1)
	require.Nil(t, code)
	require.Equal(t, ErrorCompilation, r)
	require.Equal(t, "nvrtcGetCUBINSize(0xa1, out8)", rec.Take())
}

func TestOpenRefusesOtherLibrary(t *testing.T) {
	lib := dltest.Load(t, "int nvrtcVersion(int *a, int *b) { return 0; }")
	_, err := newLib(lib.Symbol, "/lib/libnvrtc.so.12")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.Len(t, e.Missing, len(symbols)-1)
	require.ErrorContains(t, err, "NVRTC at /lib/libnvrtc.so.12: Chorus needs 12.0 or newer")
}

func TestTables(t *testing.T) {
	signatures.Require(t, symbols[:])
	require.Equal(t, "NVRTC_SUCCESS", Success.Error())
	require.Equal(t, "NVRTC_ERROR_COMPILATION", ErrorCompilation.Error())
	require.Equal(t, "nvrtcResult 99", Result(99).Error())
	require.Equal(t, "nvrtcResult -1", Result(-1).Error())
}

func TestHeader(t *testing.T) {
	h := dltest.FindHeader(t, "nvrtc.h")
	h.RequirePrototypes(signatures)
	table := map[string]int64{}
	for v, name := range names {
		table[name] = int64(v)
	}
	h.RequireResults(`NVRTC_(?:SUCCESS|ERROR_[A-Z_]+)`, table)
}

// NVRTC compiles without a GPU, so the installed one is tried wherever it is.
func TestInstalledLibrary(t *testing.T) {
	lib, err := OpenNVRTC()
	if err != nil {
		t.Skip(err)
	}
	major, minor, r := lib.Version()
	require.Equal(t, Success, r)
	t.Logf("NVRTC %d.%d at %s", major, minor, lib.Path())

	archs, r := lib.SupportedArchs()
	require.Equal(t, Success, r)
	require.Contains(t, archs, int32(90))
	require.IsIncreasing(t, archs)

	compile := func(source string) (NVRTCProgram, Result) {
		p, r := lib.CreateProgram(source, "test.cu")
		require.Equal(t, Success, r)
		t.Cleanup(func() { require.Equal(t, Success, lib.DestroyProgram(p)) })
		return p, lib.CompileProgram(p, []string{"-arch=sm_80", "-DVALUE=7"})
	}
	p, r := compile(`extern "C" __global__ void seven(int *p) { *p = VALUE; }`)
	require.Equal(t, Success, r)
	cubin, r := lib.GetCUBIN(p)
	require.Equal(t, Success, r)
	require.Equal(t, "\x7fELF", string(cubin[:4]))

	p, r = compile(`this is not CUDA`)
	require.Equal(t, ErrorCompilation, r)
	log, r := lib.GetProgramLog(p)
	require.Equal(t, Success, r)
	require.Contains(t, log, "test.cu(1): error")
}
