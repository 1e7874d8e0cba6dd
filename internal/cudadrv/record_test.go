package cudadrv

import (
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as cuda.h declares them;
// header_test.go compares them with it.
var signatures = dltest.Signatures{
	"cuInit":                            "i",
	"cuDriverGetVersion":                "o4=13000",
	"cuDeviceGetCount":                  "o4",
	"cuDeviceGet":                       "o4 i",
	"cuDeviceGetName":                   "o5=808464968 i i",
	"cuDeviceGetUuid_v2":                "o16 i",
	"cuDeviceGetAttribute":              "o4 i i",
	"cuDeviceTotalMem_v2":               "o8 i",
	"cuDeviceGetPCIBusId":               "o8=52975774022192 i i",
	"cuDeviceCanAccessPeer":             "o4 i i",
	"cuDeviceGetDefaultMemPool":         "o8 i",
	"cuDevicePrimaryCtxRetain":          "o8 i",
	"cuDevicePrimaryCtxRelease_v2":      "i",
	"cuDevicePrimaryCtxGetState":        "i o4 o4",
	"cuDeviceGetP2PAttribute":           "o4 i i i",
	"cuCtxSetCurrent":                   "w",
	"cuCtxGetCurrent":                   "o8",
	"cuCtxSynchronize":                  "",
	"cuCtxGetStreamPriorityRange":       "o4 o4",
	"cuCtxEnablePeerAccess":             "w i",
	"cuProfilerStart":                   "",
	"cuProfilerStop":                    "",
	"cuMemGetInfo_v2":                   "o8 o8",
	"cuMemAlloc_v2":                     "o8 w",
	"cuMemFree_v2":                      "w",
	"cuMemAllocAsync":                   "o8 w w",
	"cuMemFreeAsync":                    "w w",
	"cuMemPoolSetAttribute":             "w i p8",
	"cuMemPoolSetAccess":                "w p12 w",
	"cuMemPoolTrimTo":                   "w w",
	"cuMemHostAlloc":                    "o8 w i",
	"cuMemFreeHost":                     "p4",
	"cuMemGetAddressRange_v2":           "o8 o8 w",
	"cuPointerGetAttribute":             "o4 i w",
	"cuIpcGetMemHandle":                 "o64 w",
	"cuIpcOpenMemHandle_v2":             "o8 T i",
	"cuIpcCloseMemHandle":               "w",
	"cuMemPoolGetAttribute":             "w i o8",
	"cuMemGetAllocationGranularity":     "o8 p32 i",
	"cuMemAddressReserve":               "o8 w w w w",
	"cuMemAddressFree":                  "w w",
	"cuMemCreate":                       "o8 w p32 w",
	"cuMemRelease":                      "w",
	"cuMemMap":                          "w w w w w",
	"cuMemUnmap":                        "w w",
	"cuMemSetAccess":                    "w w p24 w",
	"cuMemExportToShareableHandle":      "o4 w i w",
	"cuMemImportFromShareableHandle":    "o8 w i",
	"cuMemHostRegister_v2":              "p4 w i",
	"cuMemHostUnregister":               "p4",
	"cuMemcpyHtoDAsync_v2":              "w p4 w w",
	"cuMemcpyDtoHAsync_v2":              "o4 w w w",
	"cuMemcpyDtoDAsync_v2":              "w w w w",
	"cuMemcpyPeerAsync":                 "w w w w w w",
	"cuMemcpy2DAsync_v2":                "p128 w",
	"cuMemsetD8Async":                   "w b w w",
	"cuStreamCreateWithPriority":        "o8 i i",
	"cuStreamDestroy_v2":                "w",
	"cuStreamSynchronize":               "w",
	"cuStreamQuery":                     "w",
	"cuStreamWaitEvent":                 "w w i",
	"cuStreamBatchMemOp_v2":             "w i p96 i",
	"cuStreamGetPriority":               "w o4",
	"cuStreamGetCtx":                    "w o8",
	"cuLaunchHostFunc":                  "w f w",
	"cuIpcGetEventHandle":               "o64 w",
	"cuIpcOpenEventHandle":              "o8 T",
	"cuUserObjectCreate":                "o8 w f i i",
	"cuUserObjectRelease":               "w i",
	"cuGraphRetainUserObject":           "w w i i",
	"cuEventCreate":                     "o8 i",
	"cuEventDestroy_v2":                 "w",
	"cuEventRecord":                     "w w",
	"cuEventRecordWithFlags":            "w w i",
	"cuEventQuery":                      "w",
	"cuEventSynchronize":                "w",
	"cuEventElapsedTime":                "o4=1069547520 w w",
	"cuModuleLoadData":                  "o8 s",
	"cuModuleUnload":                    "w",
	"cuModuleGetFunction":               "o8 w s",
	"cuLaunchKernel":                    "w i i i i i i i w p4 p4",
	"cuStreamBeginCapture_v2":           "w i",
	"cuStreamEndCapture":                "w o8",
	"cuStreamIsCapturing":               "w o4",
	"cuStreamGetCaptureInfo_v2":         "w o4 o8 o8 w w",
	"cuThreadExchangeStreamCaptureMode": "p4",
	"cuGraphGetNodes":                   "w w o8",
	"cuGraphInstantiateWithFlags":       "o8 w w",
	"cuGraphLaunch":                     "w w",
	"cuGraphUpload":                     "w w",
	"cuGraphExecUpdate_v2":              "w w o24=2",
	"cuGraphExecDestroy":                "w",
	"cuGraphDestroy":                    "w",
	"cuGraphDebugDotPrint":              "w s i",

	"cuLaunchCooperativeKernel":                   "w i i i i i i i w p4",
	"cuFuncGetAttribute":                          "o4 i w",
	"cuFuncSetAttribute":                          "w i i",
	"cuOccupancyMaxActiveBlocksPerMultiprocessor": "o4 w i w",
	"cuOccupancyMaxPotentialBlockSize":            "o4 o4 w w w i",
}

// The golden file shows for each method what C received and what the method returned.
func TestRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0x1234_0000_0001) // the upper half is noise
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	c := dltest.NewCalls(rec, AttrWarpSize, P2PNativeAtomics, PointerDevice, FuncMaxDynamicSharedBytes, CaptureRelaxed,
		MemHandlePosixFD, MemGranularityRecommended, MemAccessReadWrite)
	dltest.Methods[Driver](c, lib)
	c.Call("ModuleLoadData, slice", lib.ModuleLoadData, []byte(".version 8.0 and more")[:12]) // what follows in memory is not the module's
	c.Call("ModuleLoadData, empty", lib.ModuleLoadData, []byte(nil))
	c.Call("MemHostAlloc, portable", lib.MemHostAlloc, uintptr(1), MemHostAllocPortable)
	c.Call("MemHostRegister, portable", lib.MemHostRegister, unsafe.Pointer(new(int32)), uintptr(1), MemHostRegisterPortable)
	c.Call("MemPoolSetAttribute, threshold", lib.MemPoolSetAttribute, MemPool(1), MemPoolAttrReleaseThreshold)
	c.Call("MemPoolGetAttribute, highest use", lib.MemPoolGetAttribute, MemPool(1), MemPoolAttrUsedHigh)
	c.Call("IpcOpenMemHandle, lazy", lib.IpcOpenMemHandle, IpcMemHandle{}, IpcMemLazyEnablePeerAccess)
	c.Call("StreamCreateWithPriority, non-blocking", lib.StreamCreateWithPriority, StreamNonBlocking)
	c.Call("EventCreate, without timing", lib.EventCreate, EventDisableTiming)
	c.Call("GraphInstantiateWithFlags, priority", lib.GraphInstantiateWithFlags, Graph(1), GraphInstantiateNodePriority)
	c.Call("GraphRetainUserObject, move", lib.GraphRetainUserObject, Graph(1), UserObject(2), uint32(3), GraphUserObjectMove)
	c.Call("GraphDebugDotPrint, verbose", lib.GraphDebugDotPrint, Graph(1), "graph.dot", GraphDotVerbose)
	dltest.Golden(t, "testdata/record.golden", c.Text())
}

// A bound driver makes the context current before each call, on one thread, and
// leaves the call out where that fails.
func TestBound(t *testing.T) {
	for _, c := range []struct {
		result       uint64
		stream, copy string
	}{
		{0, "cuCtxSetCurrent(0x77); cuStreamQuery(0x88)",
			"cuCtxSetCurrent(0x77); cuMemcpyPeerAsync(0x1, 0x2, 0x3, 0x4, 0x5, 0x6)"},
		{201, "cuCtxSetCurrent(0x77)", "cuCtxSetCurrent(0x77)"},
	} {
		rec := dltest.NewRecorder(t, signatures, c.result)
		lib, err := newLib(rec.Resolve, "recorded")
		require.NoError(t, err)
		rec.Take()
		runtime.LockOSThread() // for processors on which these are two calls
		defer runtime.UnlockOSThread()
		d := lib.Bound(0x77)
		require.EqualValues(t, c.result, d.StreamQuery(0x88))
		require.Equal(t, c.stream, rec.Take())
		require.EqualValues(t, c.result, d.MemcpyPeerAsync(1, 2, 3, 4, 5, 6))
		require.Equal(t, c.copy, rec.Take())
		_, r := d.MemAlloc(9)
		require.EqualValues(t, c.result, r)
		require.True(t, strings.HasPrefix(rec.Take(), "cuCtxSetCurrent(0x77)"))
		require.EqualValues(t, c.result, lib.StreamQuery(0x99))
		require.Equal(t, "cuStreamQuery(0x99)", rec.Take(), "the frame of a bound call binds nothing later")
		require.Zero(t, testing.AllocsPerRun(200, func() { d.StreamQuery(1) }))
	}
}

func TestCallsDoNotAllocate(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	var d Driver = lib
	params := unsafe.Pointer(new([4]byte))
	for name, call := range map[string]func(){
		"MemAllocAsync":   func() { d.MemAllocAsync(4096, 1) },
		"EventRecord":     func() { d.EventRecord(1, 2) },
		"MemcpyHtoDAsync": func() { d.MemcpyHtoDAsync(1, params, 4, 2) },
		"LaunchKernel":    func() { d.LaunchKernel(1, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, 2, params) },
		"GraphLaunch":     func() { d.GraphLaunch(1, 2) },
		"LaunchHostFunc":  func() { d.LaunchHostFunc(1, 2) },

		"LaunchCooperativeKernel": func() { d.LaunchCooperativeKernel(1, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, 2, params) },
	} {
		require.Zero(t, testing.AllocsPerRun(200, call), name)
	}
}

func TestSymbolTable(t *testing.T) { signatures.Require(t, symbols[:]) }

// An old driver lacks functions and says its version.
func TestOpenRefusesOldDriver(t *testing.T) {
	old := dltest.Load(t, "int cuDriverGetVersion(int *v) { *v = 11040; return 0; }")
	_, err := newLib(old.Symbol, "/lib/libcuda.so.470")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.ErrorContains(t, err, "CUDA driver 11.4 at /lib/libcuda.so.470: Chorus needs 12.2 (R535) or newer; this one lacks cuInit, ")
	require.NotContains(t, e.Missing, "cuMemAllocAsync", "optional")
	require.Contains(t, e.Missing, "cuMemAlloc_v2")
}

func TestOptionalFunctions(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0)
	lib, err := newLib(func(name string) (uintptr, bool) {
		for _, s := range symbols {
			if s.Name == name && s.Optional {
				return 0, false
			}
		}
		return rec.Resolve(name)
	}, "recorded")
	require.NoError(t, err)
	rec.Take()
	_, r := lib.MemAllocAsync(1, 0)
	require.Equal(t, ErrorNotSupported, r)
	require.Equal(t, ErrorNotSupported, lib.MemFreeAsync(1, 0))
	require.Empty(t, rec.Take())
}

func BenchmarkLib(b *testing.B) {
	so, err := dl.Open(&dl.Spec{Name: "the C library", Sonames: []string{"libc.so.6"}})
	if err != nil {
		b.Skip(err)
	}
	abs, _ := so.Symbol("abs") // as short as a C function gets
	t, _ := dl.NewTable[fn](func(string) (uintptr, bool) { return abs, true }, "", symbols[:], ErrorNotSupported)
	lib := &Lib{Table: t}
	var d Driver = lib
	bound := lib.Bound(0) // abs(0) is a success, so that the call follows
	for name, call := range map[string]func(){
		"LaunchKernel, bound": func() { bound.LaunchKernel(1, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, 2, nil) },

		"EventRecord":   func() { d.EventRecord(1, 2) },
		"MemAllocAsync": func() { d.MemAllocAsync(4096, 1) },
		"LaunchKernel":  func() { d.LaunchKernel(1, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, 2, nil) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				call()
			}
		})
	}
}
