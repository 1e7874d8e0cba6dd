package ncclapi

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as nccl.h declares them;
// header_test.go compares them with it.
var signatures = dltest.Signatures{
	"ncclGetVersion":           "o4=22803",
	"ncclGetUniqueId":          "o128",
	"ncclGetLastError":         "*w",
	"ncclCommInitRankScalable": "o8 i i i p256 p16",
	"ncclCommSplit":            "w i i o8 p16",
	"ncclCommShrink":           "w p8 i o8 p16 i",
	"ncclCommFinalize":         "w",
	"ncclCommDestroy":          "w",
	"ncclCommAbort":            "w",
	"ncclCommGetAsyncError":    "w o4=6",
	"ncclCommCount":            "w o4",
	"ncclCommUserRank":         "w o4",
	"ncclCommCuDevice":         "w o4",
	"ncclCommRegister":         "w w w o8",
	"ncclCommDeregister":       "w w",
	"ncclCommWindowRegister":   "w w w o8 i",
	"ncclCommWindowDeregister": "w w",
	"ncclMemAlloc":             "o8 w",
	"ncclMemFree":              "w",
	"ncclRedOpCreatePreMulSum": "o4 p4 i i w",
	"ncclRedOpDestroy":         "i w",
	"ncclAllReduce":            "=w w w i i w w",
	"ncclBroadcast":            "=w w w i i w w",
	"ncclReduce":               "=w w w i i i w w",
	"ncclAllGather":            "=w w w i w w",
	"ncclReduceScatter":        "=w w w i i w w",
	"ncclAlltoAll":             "=w w w i w w",
	"ncclGather":               "=w w w i i w w",
	"ncclScatter":              "=w w w i i w w",
	"ncclSend":                 "=w w i i w w",
	"ncclRecv":                 "=w w i i w w",
	"ncclGroupStart":           "=",
	"ncclGroupEnd":             "=",
	"ncclGroupSimulateEnd":     "p24",
	"ncclCommRevoke":           "w i",
	"ncclCommGetUniqueId":      "w o128",
	"ncclCommGrow":             "w i p128 i o8 p16",
	"ncclCommSuspend":          "w i",
	"ncclCommResume":           "w",
	"ncclCommMemStats":         "w i o8",
	"ncclCommQueryProperties":  "w p16",
	"ncclWinGetUserPtr":        "w w o8",
	"ncclPutSignal":            "w w i i w w i i i w w",
	"ncclSignal":               "i i i i w w",
	"ncclWaitSignal":           "i p32 w w",

	"ncclParamGetParameter":        "s o8=0 o4",
	"ncclParamGetAllParameterKeys": "o8=0 o4",

	"ncclDevCommCreate":  "w p56 o4096",
	"ncclDevCommDestroy": "w p16",
	"ncclParamBind":      "o8=0 s",
	"ncclParamGetI64":    "w o8",
	"ncclParamDumpAll":   "",

	"ncclGetPeerDevicePointer": "w w i o8",
	"ncclAllReduceConfig":      "w w w i i w w p72",
	"ncclBroadcastConfig":      "w w w i i w w p72",
	"ncclReduceConfig":         "w w w i i i w w p72",
	"ncclAllGatherConfig":      "w w w i w w p72",
	"ncclReduceScatterConfig":  "w w w i i w w p72",
	"ncclAlltoAllConfig":       "w w w i w w p72",
	"ncclGatherConfig":         "w w w i i w w p72",
	"ncclScatterConfig":        "w w w i i w w p72",
	"ncclSetEncryption":        "p20",
}

// The golden file shows for each method, and each function that Collective can call, what C received and what the
// method returned.
func TestRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0x1234_0000_0001) // the upper half is noise
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	reqs, call := NewDevCommRequirements(23007), NewCollConfig(23203)
	reqs.BarrierCount, reqs.LSABarrierCount, reqs.LSALLA2ABlockCount, reqs.LSALLA2ASlotCount = 2, 3, 4, 5
	call.MinCTAs, call.MaxCTAs, call.NVLSCTAs, call.CGAClusterSize, call.CTAPolicy = 2, 8, 3, 4, 1
	call.UserProfilerTag, call.LaunchCompletionEvent = 0x77, 0xe1
	c := dltest.NewCalls(rec, NewConfig(lib.Version()), NewSimInfo(lib.Version()), NewProperties(23007), reqs,
		NewEncryptionConfig(23203, "a key"), BFloat16)
	dltest.Methods[API](c, lib, "Has", "Collective")
	c.Call("CommWindowRegister, symmetric", lib.CommWindowRegister, Comm(1), cudadrv.DevicePtr(2), uintptr(3), new(Window), WindowCollSymmetric)
	c.Call("CommShrink, abort", lib.CommShrink, Comm(1), []int32{2, 3}, new(Comm), (*Config)(nil), ShrinkAbort)
	c.Call("CommMemStats, total", lib.CommMemStats, Comm(1), StatGPUMemTotal)
	c.Call("RedOpCreatePreMulSum, host", lib.RedOpCreatePreMulSum, unsafe.Pointer(new(float32)), Float32, ScalarHostImmediate)
	for f, about := range Collectives {
		if about.Arguments == "" {
			continue
		}
		x := Call{Func: Func(f), Send: 0xd1, Recv: 0xd2, Count: 1<<40 + 3, Type: BFloat16, Op: Avg, Root: 6, Comm: 0xc1, Stream: 0x51}
		c.Call("Collective", lib.Collective, x)
		if about.Configured != 0 {
			x.Config = call
			c.Call("Collective", lib.Collective, x)
		}
	}
	dltest.Golden(t, "testdata/record.golden", c.Text())
}

func TestCallsDoNotAllocate(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	var a API = lib
	cfg := NewCollConfig(23203)
	for name, call := range map[string]func(){
		"AllReduce": func() {
			a.Collective(Call{Func: FuncAllReduce, Send: 1, Recv: 2, Count: 3, Type: Float32, Op: Sum, Comm: 4, Stream: 5})
		},
		"Reduce": func() {
			a.Collective(Call{Func: FuncReduce, Send: 1, Recv: 2, Count: 3, Type: Float32, Op: Sum, Root: 0, Comm: 4, Stream: 5})
		},
		"AllReduceConfig": func() {
			a.Collective(Call{Func: FuncAllReduce, Send: 1, Recv: 2, Count: 3, Type: Float32, Op: Sum, Comm: 4, Stream: 5, Config: cfg})
		},
		"GroupStart": func() { a.GroupStart() },
		"AsyncError": func() { a.CommGetAsyncError(1) },
	} {
		require.Zero(t, testing.AllocsPerRun(200, call), name)
	}
}

func TestSymbolTable(t *testing.T) {
	signatures.Require(t, dl.Since(symbols[:], minVersion))
	for f := range NumFuncs {
		require.GreaterOrEqual(t, f.Since(), int32(20000), f.Name())
	}
}

func TestOpenRefusesOldLibrary(t *testing.T) {
	old := dltest.Load(t, "int ncclGetVersion(int *v) { *v = 21903; return 0; }")
	_, err := newLib(old.Symbol, "/lib/libnccl.so.2.19.3")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.ErrorContains(t, err, "NCCL 2.19.3 at /lib/libnccl.so.2.19.3: Chorus needs 2.23 or newer")
	require.Contains(t, e.Missing, "ncclAllReduce")
	require.NotContains(t, e.Missing, "ncclCommGrow", "of a newer version")
}

// A library of the oldest version that is accepted lacks what came later.
func TestMissingFunctions(t *testing.T) {
	sigs := dltest.Signatures{}
	for f := range NumFuncs {
		if f.Since() <= minVersion {
			sigs[f.Name()] = signatures[f.Name()]
		}
	}
	sigs["ncclGetVersion"] = "o4=22304"
	rec := dltest.NewRecorder(t, sigs, 0)
	lib, err := newLib(rec.Resolve, "/lib/libnccl.so.2")
	require.NoError(t, err)
	require.Equal(t, int32(22304), lib.Version())
	require.Equal(t, "/lib/libnccl.so.2", lib.Path())
	rec.Take()

	require.True(t, lib.Has(FuncAllReduce))
	require.False(t, lib.Has(FuncAlltoAll))
	require.Equal(t, MissingSymbol, lib.Collective(Call{Func: FuncAlltoAll, Send: 1, Recv: 2, Count: 3, Type: Float32, Comm: 4, Stream: 5}))
	require.Equal(t, MissingSymbol, lib.CommShrink(1, nil, new(Comm), nil, 0))
	_, r := lib.CommGetUniqueID(1)
	require.Equal(t, MissingSymbol, r)
	require.Empty(t, rec.Take())
}

func TestVersionText(t *testing.T) {
	require.Equal(t, "2.28.3", VersionText(22803))
	require.Equal(t, "2.8.4", VersionText(2804))
	v, err := ParseVersion("2.28.3")
	require.NoError(t, err)
	require.EqualValues(t, 22803, v)
	_, err = ParseVersion("2.19.3")
	require.ErrorContains(t, err, "from 2.23.4")
	_, err = ParseVersion("new")
	require.ErrorContains(t, err, "such as 2.28.3")
}
