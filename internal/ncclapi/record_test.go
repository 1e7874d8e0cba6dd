package ncclapi

import (
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

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
	"ncclCommShrink":           "w p12 i o8 p16 i",
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

// The golden file shows for each method what C received and what the method
// returned; every value below is different, so a swapped argument shows.
func TestRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0x1234_0000_0001) // the upper half is noise
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	rec.Take()

	var a API = lib
	cfg, sim := NewConfig(lib.Version()), NewSimInfo(lib.Version())
	var id UniqueID
	for i := range id {
		id[i] = byte(i)
	}
	scalar := float32(0.5)
	var b strings.Builder
	line := func(method string, results ...any) {
		// A run of 128 bytes of an id is told by its ends.
		call := strings.NewReplacer(fmt.Sprintf("%x", id[4:124]), "…").Replace(rec.Take())
		fmt.Fprintf(&b, "%-22s %-86s %v\n", method, call, results)
	}
	one := func(method string, r Result) { line(method, int32(r)) }
	two := func(method string, v any, r Result) { line(method, v, int32(r)) }
	made := func(method string, make func(out *Comm) Result) {
		out := new(Comm)
		r := make(out)
		two(method, fmt.Sprintf("%#x", *out), r)
	}

	n, r := a.GetVersion()
	two("GetVersion", n, r)
	got, r := a.GetUniqueID()
	two("GetUniqueID", fmt.Sprintf("%x…%x", got[:8], got[124:]), r)
	line("GetLastError", a.GetLastError(0xc1))

	made("CommInitRankScalable", func(out *Comm) Result { return a.CommInitRankScalable(out, 8, 3, []UniqueID{id, id}, cfg) })
	made("CommSplit", func(out *Comm) Result { return a.CommSplit(0xc1, -1, 5, out, cfg) })
	made("CommShrink", func(out *Comm) Result { return a.CommShrink(0xc1, []int32{1, 2, 4}, out, cfg, ShrinkAbort) })
	one("CommFinalize", a.CommFinalize(0xc1))
	one("CommDestroy", a.CommDestroy(0xc1))
	one("CommAbort", a.CommAbort(0xc1))
	async, r := a.CommGetAsyncError(0xc1)
	two("CommGetAsyncError", async, r)
	n, r = a.CommCount(0xc1)
	two("CommCount", n, r)
	n, r = a.CommUserRank(0xc1)
	two("CommUserRank", n, r)
	n, r = a.CommCuDevice(0xc1)
	two("CommCuDevice", n, r)
	reg, r := a.CommRegister(0xc1, 0xd1, 4096)
	two("CommRegister", reg, r)
	one("CommDeregister", a.CommDeregister(0xc1, 0xa1))
	win := new(Window)
	r = a.CommWindowRegister(0xc1, 0xd1, 4096, win, WindowCollSymmetric)
	two("CommWindowRegister", *win, r)
	one("CommWindowDeregister", a.CommWindowDeregister(0xc1, 0xb1))
	p, r := a.MemAlloc(4096)
	two("MemAlloc", p, r)
	one("MemFree", a.MemFree(0xd1))
	op, r := a.RedOpCreatePreMulSum(unsafe.Pointer(&scalar), Float32, ScalarHostImmediate, 0xc1)
	two("RedOpCreatePreMulSum", op, r)
	one("RedOpDestroy", a.RedOpDestroy(5, 0xc1))

	one("AllReduce", a.Collective(Call{Func: FuncAllReduce, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Op: Avg, Comm: 0xc1, Stream: 0x51}))
	one("Broadcast", a.Collective(Call{Func: FuncBroadcast, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51}))
	one("Reduce", a.Collective(Call{Func: FuncReduce, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Op: Avg, Root: 6, Comm: 0xc1, Stream: 0x51}))
	one("AllGather", a.Collective(Call{Func: FuncAllGather, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Comm: 0xc1, Stream: 0x51}))
	one("ReduceScatter", a.Collective(Call{Func: FuncReduceScatter, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Op: Avg, Comm: 0xc1, Stream: 0x51}))
	one("AlltoAll", a.Collective(Call{Func: FuncAlltoAll, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Comm: 0xc1, Stream: 0x51}))
	one("Gather", a.Collective(Call{Func: FuncGather, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51}))
	one("Scatter", a.Collective(Call{Func: FuncScatter, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51}))
	one("Send", a.Collective(Call{Func: FuncSend, Send: 0xd1, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51}))
	one("Recv", a.Collective(Call{Func: FuncRecv, Recv: 0xd1, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51}))
	one("GroupStart", a.GroupStart())
	one("GroupEnd", a.GroupEnd())
	one("GroupSimulateEnd", a.GroupSimulateEnd(sim))

	one("CommRevoke", a.CommRevoke(0xc1, 2))
	got, r = a.CommGetUniqueID(0xc1)
	two("CommGetUniqueID", fmt.Sprintf("%x…%x", got[:8], got[124:]), r)
	made("CommGrow", func(out *Comm) Result { return a.CommGrow(0xc1, 8, &id, -1, out, cfg) })
	one("CommSuspend", a.CommSuspend(0xc1, 1))
	one("CommResume", a.CommResume(0xc1))
	stat, r := a.CommMemStats(0xc1, StatGPUMemTotal)
	two("CommMemStats", stat, r)
	one("CommQueryProperties", a.CommQueryProperties(0xc1, NewProperties(23007)))
	p, r = a.WinGetUserPtr(0xc1, 0xb1)
	two("WinGetUserPtr", p, r)
	one("PutSignal", a.PutSignal(0xd1, 100, BFloat16, 6, 0xb1, 64, 1, 2, 3, 0xc1, 0x51))
	one("Signal", a.Signal(6, 1, 2, 3, 0xc1, 0x51))
	one("WaitSignal", a.WaitSignal([]SignalDesc{{7, 6, 1, 2}, {8, 5, 3, 4}}, 0xc1, 0x51))
	text, r := a.ParamGetParameter("NCCL_DEBUG")
	two("ParamGetParameter", text, r)
	keys, r := a.ParamGetAllParameterKeys()
	two("ParamGetAllParameterKeys", keys, r)

	param, r := a.ParamBind("NCCL_DEBUG")
	two("ParamBind", param, r)
	value, r := a.ParamGetI64(0xe7)
	two("ParamGetI64", value, r)
	one("ParamDumpAll", a.ParamDumpAll())
	reqs := NewDevCommRequirements(23007)
	reqs.BarrierCount, reqs.LSABarrierCount, reqs.LSALLA2ABlockCount, reqs.LSALLA2ASlotCount = 2, 3, 4, 5
	dev := new(DevComm)
	one("DevCommCreate", a.DevCommCreate(0xc1, reqs, dev))
	one("DevCommDestroy", a.DevCommDestroy(0xc1, dev))

	p, r = a.GetPeerDevicePointer(0xb1, 64, 6)
	two("GetPeerDevicePointer", p, r)
	call := NewCollConfig(23203)
	call.MinCTAs, call.MaxCTAs, call.NVLSCTAs, call.CGAClusterSize, call.CTAPolicy = 2, 8, 3, 4, 1
	call.UserProfilerTag, call.LaunchCompletionEvent = 0x77, 0xe1
	one("AllReduceConfig", a.Collective(Call{Func: FuncAllReduce, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Op: Avg, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("BroadcastConfig", a.Collective(Call{Func: FuncBroadcast, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("ReduceConfig", a.Collective(Call{Func: FuncReduce, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Op: Avg, Root: 6, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("AllGatherConfig", a.Collective(Call{Func: FuncAllGather, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("ReduceScatterConfig", a.Collective(Call{Func: FuncReduceScatter, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Op: Avg, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("AlltoAllConfig", a.Collective(Call{Func: FuncAlltoAll, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("GatherConfig", a.Collective(Call{Func: FuncGather, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("ScatterConfig", a.Collective(Call{Func: FuncScatter, Send: 0xd1, Recv: 0xd2, Count: 100, Type: BFloat16, Root: 6, Comm: 0xc1, Stream: 0x51, Config: call}))
	one("SetEncryption", a.SetEncryption(NewEncryptionConfig(23203, "a key")))

	require.Empty(t, rec.Uncalled(), "every function of the table has a line")
	dltest.Golden(t, "testdata/record.golden", b.String())
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
	seen := map[string]bool{}
	for f := range NumFuncs {
		require.NotEmpty(t, f.Name(), "function %d", int(f))
		require.GreaterOrEqual(t, f.Since(), int32(20000), f.Name())
		require.False(t, seen[f.Name()], f.Name())
		require.Contains(t, signatures, f.Name())
		seen[f.Name()] = true
	}
	require.Len(t, signatures, int(NumFuncs))
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
