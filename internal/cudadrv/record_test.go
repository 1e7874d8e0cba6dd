package cudadrv

import (
	"fmt"
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

// The golden file shows for each method what C received and what the method
// returned; every value below is different, so a swapped argument shows.
func TestRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0x1234_0000_0001) // the upper half is noise
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	rec.Take()

	var d Driver = lib
	data := []byte("abcd")
	src := unsafe.Pointer(&data[0])
	dst := unsafe.Pointer(new([4]byte))
	var b strings.Builder
	line := func(method string, results ...any) {
		fmt.Fprintf(&b, "%-26s %-66s %v\n", method, rec.Take(), results)
	}
	one := func(method string, r Result) { line(method, int32(r)) }
	two := func(method string, v any, r Result) { line(method, fmt.Sprintf("%v", v), int32(r)) }

	one("Init", d.Init())
	n, r := d.DriverGetVersion()
	two("DriverGetVersion", n, r)
	n, r = d.DeviceGetCount()
	two("DeviceGetCount", n, r)
	dev, r := d.DeviceGet(3)
	two("DeviceGet", dev, r)
	name, r := d.DeviceGetName(3)
	two("DeviceGetName", name, r)
	uuid, r := d.DeviceGetUUID(3)
	two("DeviceGetUUID", uuid, r)
	n, r = d.DeviceGetAttribute(AttrWarpSize, 3)
	two("DeviceGetAttribute", n, r)
	size, r := d.DeviceTotalMem(3)
	two("DeviceTotalMem", size, r)
	name, r = d.DeviceGetPCIBusID(3)
	two("DeviceGetPCIBusID", name, r)
	n, r = d.DeviceCanAccessPeer(3, 4)
	two("DeviceCanAccessPeer", n, r)
	pool, r := d.DeviceGetDefaultMemPool(3)
	two("DeviceGetDefaultMemPool", pool, r)
	ctx, r := d.DevicePrimaryCtxRetain(3)
	two("DevicePrimaryCtxRetain", ctx, r)
	one("DevicePrimaryCtxRelease", d.DevicePrimaryCtxRelease(3))
	flags, active, r := d.DevicePrimaryCtxGetState(3)
	two("DevicePrimaryCtxGetState", []int64{int64(flags), int64(active)}, r)
	n, r = d.DeviceGetP2PAttribute(P2PNativeAtomics, 5, 6)
	two("DeviceGetP2PAttribute", n, r)
	one("CtxSetCurrent", d.CtxSetCurrent(0xc1))
	ctx, r = d.CtxGetCurrent()
	two("CtxGetCurrent", ctx, r)
	one("CtxSynchronize", d.CtxSynchronize())
	least, greatest, r := d.CtxGetStreamPriorityRange()
	two("CtxGetStreamPriorityRange", []int32{least, greatest}, r)
	one("CtxEnablePeerAccess", d.CtxEnablePeerAccess(0xc1, 2))
	one("ProfilerStart", d.ProfilerStart())
	one("ProfilerStop", d.ProfilerStop())

	free, total, r := d.MemGetInfo()
	two("MemGetInfo", []uintptr{free, total}, r)
	p, r := d.MemAlloc(4096)
	two("MemAlloc", p, r)
	one("MemFree", d.MemFree(0xd1))
	p, r = d.MemAllocAsync(4096, 0x51)
	two("MemAllocAsync", p, r)
	one("MemFreeAsync", d.MemFreeAsync(0xd1, 0x51))
	one("MemPoolSetAttribute", d.MemPoolSetAttribute(0xb1, MemPoolAttrReleaseThreshold, 1<<63))
	one("MemPoolSetAccess", d.MemPoolSetAccess(0xb1, 5))
	one("MemPoolTrimTo", d.MemPoolTrimTo(0xb1, 4096))
	value, r := d.MemPoolGetAttribute(0xb1, MemPoolAttrUsedHigh)
	two("MemPoolGetAttribute", value, r)
	p, size, r = d.MemGetAddressRange(0xd1)
	two("MemGetAddressRange", []uint64{uint64(p), uint64(size)}, r)
	n, r = d.PointerGetAttribute(PointerDevice, 0xd1)
	two("PointerGetAttribute", n, r)
	mem, r := d.IpcGetMemHandle(0xd1)
	two("IpcGetMemHandle", fmt.Sprintf("%x…%x", mem[:8], mem[60:]), r)
	for i := range mem {
		mem[i] = byte(i + 1)
	}
	p, r = d.IpcOpenMemHandle(mem, IpcMemLazyEnablePeerAccess)
	two("IpcOpenMemHandle", p, r)
	one("IpcCloseMemHandle", d.IpcCloseMemHandle(0xd1))

	prop := MemAllocationProp{Device: 5, HandleTypes: MemHandlePosixFD, GPUDirectRDMACapable: true}
	size, r = d.MemGetAllocationGranularity(prop, MemGranularityRecommended)
	two("MemGetAllocationGranularity", size, r)
	p, r = d.MemAddressReserve(4096, 512, 0xd1)
	two("MemAddressReserve", p, r)
	one("MemAddressFree", d.MemAddressFree(0xd1, 4096))
	physical, r := d.MemCreate(4096, prop)
	two("MemCreate", physical, r)
	one("MemRelease", d.MemRelease(0xa1))
	one("MemMap", d.MemMap(0xd1, 4096, 512, 0xa1))
	one("MemUnmap", d.MemUnmap(0xd1, 4096))
	one("MemSetAccess", d.MemSetAccess(0xd1, 4096, MemAccessReadWrite, 5, 6))
	fd, r := d.MemExportToShareableHandle(0xa1, MemHandlePosixFD)
	two("MemExportToShareableHandle", fd, r)
	physical, r = d.MemImportFromShareableHandle(7, MemHandlePosixFD)
	two("MemImportFromShareableHandle", physical, r)

	host, r := d.MemHostAlloc(4096, MemHostAllocPortable)
	two("MemHostAlloc", host, r)
	one("MemFreeHost", d.MemFreeHost(src))
	one("MemHostRegister", d.MemHostRegister(src, 4096, MemHostRegisterPortable))
	one("MemHostUnregister", d.MemHostUnregister(src))
	one("MemcpyHtoDAsync", d.MemcpyHtoDAsync(0xd1, src, 4, 0x51))
	r = d.MemcpyDtoHAsync(dst, 0xd1, 4, 0x51)
	two("MemcpyDtoHAsync", *(*[4]byte)(dst), r)
	one("MemcpyDtoDAsync", d.MemcpyDtoDAsync(0xd1, 0xd2, 4, 0x51))
	one("MemcpyPeerAsync", d.MemcpyPeerAsync(0xd1, 0xc1, 0xd2, 0xc2, 4, 0x51))
	one("Memcpy2DAsync", d.Memcpy2DAsync(Memcpy2D{Dst: 0xd1, Src: 0xd2, DstPitch: 0xe1, SrcPitch: 0xe2, WidthInBytes: 0xb3, Height: 0xb4}, 0x51))
	one("MemsetD8Async", d.MemsetD8Async(0xd1, 0xff, 4, 0x51))

	s, r := d.StreamCreateWithPriority(StreamNonBlocking, -5)
	two("StreamCreateWithPriority", s, r)
	one("StreamDestroy", d.StreamDestroy(0x51))
	one("StreamSynchronize", d.StreamSynchronize(0x51))
	one("StreamQuery", d.StreamQuery(0x51))
	one("StreamWaitEvent", d.StreamWaitEvent(0x51, 0xe1, 1))
	one("StreamBatchMemOp", d.StreamBatchMemOp(0x51, []StreamMemOp{{At: 0xd1, Value: 0xa1, Waits: true}, {At: 0xd2, Value: 0xa2}}))
	e, r := d.EventCreate(EventDisableTiming)
	two("EventCreate", e, r)
	one("EventDestroy", d.EventDestroy(0xe1))
	one("EventRecord", d.EventRecord(0xe1, 0x51))
	one("EventRecordWithFlags", d.EventRecordWithFlags(0xe1, 0x51, 1))
	one("EventQuery", d.EventQuery(0xe1))
	one("EventSynchronize", d.EventSynchronize(0xe1))
	ms, r := d.EventElapsedTime(0xe1, 0xe2)
	two("EventElapsedTime", ms, r)

	priority, r := d.StreamGetPriority(0x51)
	two("StreamGetPriority", priority, r)
	ctx, r = d.StreamGetCtx(0x51)
	two("StreamGetCtx", ctx, r)
	one("LaunchHostFunc", d.LaunchHostFunc(0x51, 0xf2))
	ipc, r := d.IpcGetEventHandle(0xe1)
	two("IpcGetEventHandle", fmt.Sprintf("%x…%x", ipc[:8], ipc[60:]), r)
	for i := range ipc {
		ipc[i] = byte(i + 1)
	}
	e, r = d.IpcOpenEventHandle(ipc)
	two("IpcOpenEventHandle", e, r)

	m, r := d.ModuleLoadData([]byte(".version 8.0"))
	two("ModuleLoadData", m, r)
	m, r = d.ModuleLoadData([]byte(".version 8.0 and more")[:12]) // what follows in memory is not the module's
	two("ModuleLoadData, slice", m, r)
	m, r = d.ModuleLoadData(nil)
	two("ModuleLoadData, empty", m, r)
	one("ModuleUnload", d.ModuleUnload(0x31))
	f, r := d.ModuleGetFunction(0x31, "saxpy")
	two("ModuleGetFunction", f, r)
	one("LaunchKernel", d.LaunchKernel(0xf1, [3]uint32{11, 12, 13}, [3]uint32{21, 22, 23}, 31, 0x51, src))
	one("LaunchCooperativeKernel", d.LaunchCooperativeKernel(0xf1, [3]uint32{11, 12, 13}, [3]uint32{21, 22, 23}, 31, 0x51, src))
	v, r := d.FuncGetAttribute(FuncRegisters, 0xf1)
	two("FuncGetAttribute", v, r)
	one("FuncSetAttribute", d.FuncSetAttribute(0xf1, FuncMaxDynamicSharedBytes, 65536))
	v, r = d.OccupancyMaxActiveBlocksPerMultiprocessor(0xf1, 256, 4096)
	two("OccupancyMaxActiveBlocksPerMultiprocessor", v, r)
	grid, block, r := d.OccupancyMaxPotentialBlockSize(0xf1, 4096, 512)
	two("OccupancyMaxPotentialBlockSize", []int32{grid, block}, r)

	one("StreamBeginCapture", d.StreamBeginCapture(0x51, CaptureRelaxed))
	g, r := d.StreamEndCapture(0x51)
	two("StreamEndCapture", g, r)
	status, r := d.StreamIsCapturing(0x51)
	two("StreamIsCapturing", status, r)
	status, id, r := d.StreamGetCaptureInfo(0x51)
	two("StreamGetCaptureInfo", []uint64{uint64(status), id}, r)
	g, r = d.StreamGetCaptureGraph(0x51)
	two("StreamGetCaptureGraph", g, r)
	mode, r := d.ThreadExchangeStreamCaptureMode(CaptureRelaxed)
	two("ThreadExchangeStreamCaptureMode", mode, r)
	nodes, r := d.GraphGetNodes(0x61)
	two("GraphGetNodes", nodes, r)
	x, r := d.GraphInstantiateWithFlags(0x61, GraphInstantiateNodePriority)
	two("GraphInstantiateWithFlags", x, r)
	one("GraphLaunch", d.GraphLaunch(0x71, 0x51))
	one("GraphUpload", d.GraphUpload(0x71, 0x51))
	update, r := d.GraphExecUpdate(0x71, 0x61)
	two("GraphExecUpdate", update, r)
	one("GraphExecDestroy", d.GraphExecDestroy(0x71))
	one("GraphDestroy", d.GraphDestroy(0x61))
	object, r := d.UserObjectCreate(0xf2)
	two("UserObjectCreate", object, r)
	one("UserObjectRelease", d.UserObjectRelease(0x81, 3))
	one("GraphRetainUserObject", d.GraphRetainUserObject(0x61, 0x81, 3, GraphUserObjectMove))
	one("GraphDebugDotPrint", d.GraphDebugDotPrint(0x61, "graph.dot", GraphDotVerbose))

	require.Empty(t, rec.Uncalled(), "every function of the table has a line")
	dltest.Golden(t, "testdata/record.golden", b.String())
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

func TestSymbolTable(t *testing.T) {
	seen := map[string]bool{}
	for i, s := range symbols {
		require.NotEmpty(t, s.Name, "function %d", i)
		require.False(t, seen[s.Name], s.Name)
		require.Contains(t, signatures, s.Name)
		seen[s.Name] = true
	}
	require.Len(t, signatures, len(symbols))
}

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
