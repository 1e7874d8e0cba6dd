package cudadrv

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// minVersion is the oldest CUDA of the driver that Chorus runs on.
const (
	minVersion     = 12020
	minVersionText = "12.2 (R535)"
)

var spec = &dl.Spec{
	Name:    "the CUDA driver",
	Env:     env.LibCUDA,
	Sonames: []string{"libcuda.so.1"},
	Folders: []string{
		"/usr/local/nvidia/lib64", // containers
		"/usr/lib/wsl/lib",
		"/run/opengl-driver/lib", // NixOS
	},
}

// Lib is the installed driver, libcuda.so.1. It implements Driver.
type Lib struct {
	dl.Table[fn, Result]
	version int32
}

// Open loads the driver, once per process. The error is a *dl.Error when there
// is none and a *dl.VersionError when it is too old; both match
// errors.ErrUnsupported. Open does not call cuInit.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, missing := dl.NewTable[fn](find, path, symbols[:], ErrorNotSupported)
	l := &Lib{Table: t}
	l.version, _ = l.DriverGetVersion() // 0, so too old, if it fails
	if l.version < minVersion || len(missing) > 0 {
		return nil, &dl.VersionError{Library: "CUDA driver", Path: path, Loaded: versionText(l.version), Needed: minVersionText, Missing: missing}
	}
	return l, nil
}

// versionText writes a version code: 13000 is "13.0".
func versionText(code int32) string { return fmt.Sprintf("%d.%d", code/1000, code%1000/10) }

// Bound returns the driver for calls of threads that have any context or none:
// each call makes c current first, in the same change from Go to C.
func (l *Lib) Bound(c Context) Driver {
	return &Lib{Table: l.After(fnCtxSetCurrent, uintptr(c)), version: l.version}
}

var _ Driver = (*Lib)(nil)

// textBytes holds any device name or PCI address that the driver writes.
const textBytes = 256

// The methods of Lib have no comments: each is the C function of
// its name.

func (l *Lib) Init() Result { return l.Call(fnInit, dl.Get().In(0)) }

func (l *Lib) DriverGetVersion() (int32, Result) {
	v, r := l.Call1(fnDriverGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) DeviceGetCount() (int32, Result) {
	n, r := l.Call1(fnDeviceGetCount, dl.Get().Out())
	return int32(n), r
}

func (l *Lib) DeviceGet(ordinal int32) (Device, Result) {
	d, r := l.Call1(fnDeviceGet, dl.Get().Out().In(uintptr(ordinal)))
	return Device(d), r
}

func (l *Lib) DeviceGetName(d Device) (string, Result) {
	b := make([]byte, textBytes)
	r := l.Call(fnDeviceGetName, dl.Get().Ptr(unsafe.Pointer(&b[0])).In(textBytes, uintptr(d)))
	return dl.CString(b), r
}

func (l *Lib) DeviceGetUUID(d Device) (UUID, Result) {
	u := new(UUID)
	r := l.Call(fnDeviceGetUUID, dl.Get().Ptr(unsafe.Pointer(u)).In(uintptr(d)))
	return *u, r
}

func (l *Lib) DeviceGetAttribute(a Attribute, d Device) (int32, Result) {
	v, r := l.Call1(fnDeviceGetAttribute, dl.Get().Out().In(uintptr(a), uintptr(d)))
	return int32(v), r
}

func (l *Lib) DeviceTotalMem(d Device) (uintptr, Result) {
	n, r := l.Call1(fnDeviceTotalMem, dl.Get().Out().In(uintptr(d)))
	return uintptr(n), r
}

func (l *Lib) DeviceGetPCIBusID(d Device) (string, Result) {
	b := make([]byte, textBytes)
	r := l.Call(fnDeviceGetPCIBusID, dl.Get().Ptr(unsafe.Pointer(&b[0])).In(textBytes, uintptr(d)))
	return dl.CString(b), r
}

func (l *Lib) DeviceCanAccessPeer(d, peer Device) (int32, Result) {
	v, r := l.Call1(fnDeviceCanAccessPeer, dl.Get().Out().In(uintptr(d), uintptr(peer)))
	return int32(v), r
}

func (l *Lib) DeviceGetDefaultMemPool(d Device) (MemPool, Result) {
	p, r := l.Call1(fnDeviceGetDefaultMemPool, dl.Get().Out().In(uintptr(d)))
	return MemPool(p), r
}

func (l *Lib) DevicePrimaryCtxRetain(d Device) (Context, Result) {
	c, r := l.Call1(fnDevicePrimaryCtxRetain, dl.Get().Out().In(uintptr(d)))
	return Context(c), r
}

func (l *Lib) DevicePrimaryCtxRelease(d Device) Result {
	return l.Call(fnDevicePrimaryCtxRelease, dl.Get().In(uintptr(d)))
}

func (l *Lib) DevicePrimaryCtxGetState(d Device) (flags uint32, active int32, r Result) {
	v, w, r := l.Call2(fnDevicePrimaryCtxGetState, dl.Get().In(uintptr(d)).Out().Out())
	return uint32(v), int32(w), r
}

func (l *Lib) DeviceGetP2PAttribute(a P2PAttribute, src, dst Device) (int32, Result) {
	v, r := l.Call1(fnDeviceGetP2PAttribute, dl.Get().Out().In(uintptr(a), uintptr(src), uintptr(dst)))
	return int32(v), r
}

func (l *Lib) CtxSetCurrent(c Context) Result {
	return l.Call(fnCtxSetCurrent, dl.Get().In(uintptr(c)))
}

func (l *Lib) CtxGetCurrent() (Context, Result) {
	c, r := l.Call1(fnCtxGetCurrent, dl.Get().Out())
	return Context(c), r
}

func (l *Lib) CtxSynchronize() Result { return l.Call(fnCtxSynchronize, dl.Get()) }

func (l *Lib) CtxGetStreamPriorityRange() (least, greatest int32, r Result) {
	v, w, r := l.Call2(fnCtxGetStreamPriorityRange, dl.Get().Out().Out())
	return int32(v), int32(w), r
}

func (l *Lib) CtxEnablePeerAccess(peer Context, flags uint32) Result {
	return l.Call(fnCtxEnablePeerAccess, dl.Get().In(uintptr(peer), uintptr(flags)))
}

func (l *Lib) ProfilerStart() Result { return l.Call(fnProfilerStart, dl.Get()) }

func (l *Lib) ProfilerStop() Result { return l.Call(fnProfilerStop, dl.Get()) }

func (l *Lib) StreamBeginCapture(s Stream, mode CaptureMode) Result {
	return l.Call(fnStreamBeginCapture, dl.Get().In(uintptr(s), uintptr(mode)))
}

func (l *Lib) StreamEndCapture(s Stream) (Graph, Result) {
	g, r := l.Call1(fnStreamEndCapture, dl.Get().In(uintptr(s)).Out())
	return Graph(g), r
}

func (l *Lib) StreamIsCapturing(s Stream) (CaptureStatus, Result) {
	v, r := l.Call1(fnStreamIsCapturing, dl.Get().In(uintptr(s)).Out())
	return CaptureStatus(v), r
}

func (l *Lib) StreamGetCaptureInfo(s Stream) (status CaptureStatus, id uint64, r Result) {
	v, id, r := l.Call2(fnStreamGetCaptureInfo, dl.Get().In(uintptr(s)).Out().Out().In(0, 0, 0)) // no graph, no dependencies
	return CaptureStatus(v), id, r
}

func (l *Lib) StreamGetCaptureGraph(s Stream) (Graph, Result) {
	_, g, r := l.Call2(fnStreamGetCaptureInfo, dl.Get().In(uintptr(s)).Out().In(0).Out().In(0, 0)) // no id, no dependencies
	return Graph(g), r
}

func (l *Lib) ThreadExchangeStreamCaptureMode(mode CaptureMode) (CaptureMode, Result) {
	v, r := l.Call1(fnThreadExchangeStreamCaptureMode, dl.Get().InOut(uint64(mode)))
	return CaptureMode(v), r
}

func (l *Lib) GraphGetNodes(g Graph) (uintptr, Result) {
	n, r := l.Call1(fnGraphGetNodes, dl.Get().In(uintptr(g), 0).Out()) // no array: only the number
	return uintptr(n), r
}

func (l *Lib) GraphInstantiateWithFlags(g Graph, flags uint64) (GraphExec, Result) {
	e, r := l.Call1(fnGraphInstantiateWithFlags, dl.Get().Out().In(uintptr(g), uintptr(flags)))
	return GraphExec(e), r
}

func (l *Lib) GraphLaunch(e GraphExec, s Stream) Result {
	return l.Call(fnGraphLaunch, dl.Get().In(uintptr(e), uintptr(s)))
}

func (l *Lib) GraphUpload(e GraphExec, s Stream) Result {
	return l.Call(fnGraphUpload, dl.Get().In(uintptr(e), uintptr(s)))
}

func (l *Lib) GraphExecUpdate(e GraphExec, g Graph) (GraphExecUpdateResult, Result) {
	info := new(graphExecUpdateResultInfo)
	r := l.Call(fnGraphExecUpdate, dl.Get().In(uintptr(e), uintptr(g)).Ptr(unsafe.Pointer(info)))
	return info.Result, r
}

func (l *Lib) GraphExecDestroy(e GraphExec) Result {
	return l.Call(fnGraphExecDestroy, dl.Get().In(uintptr(e)))
}

func (l *Lib) GraphDestroy(g Graph) Result { return l.Call(fnGraphDestroy, dl.Get().In(uintptr(g))) }

func (l *Lib) UserObjectCreate(f dl.Closure) (UserObject, Result) {
	const references = 1
	o, r := l.Call1(fnUserObjectCreate, dl.Get().Out().In(uintptr(f), dl.ReleaseClosure(), references, userObjectNoDestructorSync))
	return UserObject(o), r
}

func (l *Lib) UserObjectRelease(o UserObject, count uint32) Result {
	return l.Call(fnUserObjectRelease, dl.Get().In(uintptr(o), uintptr(count)))
}

func (l *Lib) GraphRetainUserObject(g Graph, o UserObject, count, flags uint32) Result {
	return l.Call(fnGraphRetainUserObject, dl.Get().In(uintptr(g), uintptr(o), uintptr(count), uintptr(flags)))
}

func (l *Lib) GraphDebugDotPrint(g Graph, path string, flags uint32) Result {
	return l.Call(fnGraphDebugDotPrint, dl.Get().In(uintptr(g)).String(path).In(uintptr(flags)))
}

func (l *Lib) MemGetInfo() (free, total uintptr, r Result) {
	v, w, r := l.Call2(fnMemGetInfo, dl.Get().Out().Out())
	return uintptr(v), uintptr(w), r
}

func (l *Lib) MemAlloc(bytes uintptr) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAlloc, dl.Get().Out().In(bytes))
	return DevicePtr(p), r
}

func (l *Lib) MemFree(p DevicePtr) Result { return l.Call(fnMemFree, dl.Get().In(uintptr(p))) }

func (l *Lib) MemGetAddressRange(p DevicePtr) (base DevicePtr, bytes uintptr, r Result) {
	v, w, r := l.Call2(fnMemGetAddressRange, dl.Get().Out().Out().In(uintptr(p)))
	return DevicePtr(v), uintptr(w), r
}

func (l *Lib) PointerGetAttribute(a PointerAttribute, p DevicePtr) (int32, Result) {
	v, r := l.Call1(fnPointerGetAttribute, dl.Get().Out().In(uintptr(a), uintptr(p)))
	return int32(v), r
}

func (l *Lib) IpcGetMemHandle(p DevicePtr) (IpcMemHandle, Result) {
	h := new(IpcMemHandle)
	r := l.Call(fnIpcGetMemHandle, dl.Get().Ptr(unsafe.Pointer(h)).In(uintptr(p)))
	return *h, r
}

func (l *Lib) IpcOpenMemHandle(h IpcMemHandle, flags uint32) (DevicePtr, Result) {
	p, r := l.Call1(fnIpcOpenMemHandle, dl.Get().Out().Struct64((*[64]byte)(&h)).In(uintptr(flags)))
	return DevicePtr(p), r
}

func (l *Lib) IpcCloseMemHandle(p DevicePtr) Result {
	return l.Call(fnIpcCloseMemHandle, dl.Get().In(uintptr(p)))
}

func (l *Lib) MemHostAlloc(bytes uintptr, flags uint32) (unsafe.Pointer, Result) {
	p, r := l.Call1(fnMemHostAlloc, dl.Get().Out().In(bytes, uintptr(flags)))
	return dl.Pointer(p), r
}

func (l *Lib) MemFreeHost(p unsafe.Pointer) Result { return l.Call(fnMemFreeHost, dl.Get().Ptr(p)) }

func (l *Lib) MemHostRegister(p unsafe.Pointer, bytes uintptr, flags uint32) Result {
	return l.Call(fnMemHostRegister, dl.Get().Ptr(p).In(bytes, uintptr(flags)))
}

func (l *Lib) MemHostUnregister(p unsafe.Pointer) Result {
	return l.Call(fnMemHostUnregister, dl.Get().Ptr(p))
}

func (l *Lib) MemcpyHtoDAsync(dst DevicePtr, src unsafe.Pointer, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyHtoDAsync, dl.Get().In(uintptr(dst)).Ptr(src).In(bytes, uintptr(s)))
}

func (l *Lib) MemcpyDtoHAsync(dst unsafe.Pointer, src DevicePtr, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyDtoHAsync, dl.Get().Ptr(dst).In(uintptr(src), bytes, uintptr(s)))
}

func (l *Lib) MemcpyDtoDAsync(dst, src DevicePtr, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyDtoDAsync, dl.Get().In(uintptr(dst), uintptr(src), bytes, uintptr(s)))
}

func (l *Lib) MemcpyPeerAsync(dst DevicePtr, dstCtx Context, src DevicePtr, srcCtx Context, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyPeerAsync, dl.Get().In(uintptr(dst), uintptr(dstCtx), uintptr(src), uintptr(srcCtx), bytes, uintptr(s)))
}

func (l *Lib) Memcpy2DAsync(c Memcpy2D, s Stream) Result {
	return l.Call(fnMemcpy2DAsync, dl.Get().Ptr(unsafe.Pointer(c.c())).In(uintptr(s)))
}

func (l *Lib) MemsetD8Async(dst DevicePtr, value uint8, count uintptr, s Stream) Result {
	return l.Call(fnMemsetD8Async, dl.Get().In(uintptr(dst), uintptr(value), count, uintptr(s)))
}

func (l *Lib) ModuleLoadData(image []byte) (Module, Result) {
	if n := len(image); n == 0 || image[n-1] != 0 {
		// PTX is text that ends at its NUL; a cubin knows its own size.
		image = append(image[:n:n], 0)
	}
	m, r := l.Call1(fnModuleLoadData, dl.Get().Out().Ptr(unsafe.Pointer(&image[0])))
	return Module(m), r
}

func (l *Lib) ModuleUnload(m Module) Result { return l.Call(fnModuleUnload, dl.Get().In(uintptr(m))) }

func (l *Lib) ModuleGetFunction(m Module, name string) (Function, Result) {
	f, r := l.Call1(fnModuleGetFunction, dl.Get().Out().In(uintptr(m)).String(name))
	return Function(f), r
}

func (l *Lib) LaunchKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result {
	return l.Call(fnLaunchKernel, launchFrame(f, grid, block, sharedBytes, s, params).In(0)) // no extra
}

func (l *Lib) LaunchCooperativeKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result {
	return l.Call(fnLaunchCooperativeKernel, launchFrame(f, grid, block, sharedBytes, s, params))
}

func launchFrame(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) *dl.Frame {
	return dl.Get().In(uintptr(f),
		uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]),
		uintptr(block[0]), uintptr(block[1]), uintptr(block[2]),
		uintptr(sharedBytes), uintptr(s)).Ptr(params)
}

func (l *Lib) FuncGetAttribute(a FuncAttribute, f Function) (int32, Result) {
	v, r := l.Call1(fnFuncGetAttribute, dl.Get().Out().In(uintptr(a), uintptr(f)))
	return int32(v), r
}

func (l *Lib) FuncSetAttribute(f Function, a FuncAttribute, value int32) Result {
	return l.Call(fnFuncSetAttribute, dl.Get().In(uintptr(f), uintptr(a), uintptr(value)))
}

func (l *Lib) OccupancyMaxActiveBlocksPerMultiprocessor(f Function, blockSize int32, sharedBytes uintptr) (int32, Result) {
	n, r := l.Call1(fnOccupancyMaxActiveBlocksPerMultiprocessor, dl.Get().Out().In(uintptr(f), uintptr(blockSize), sharedBytes))
	return int32(n), r
}

func (l *Lib) OccupancyMaxPotentialBlockSize(f Function, sharedBytes uintptr, limit int32) (minGrid, block int32, r Result) {
	v, w, r := l.Call2(fnOccupancyMaxPotentialBlockSize, dl.Get().Out().Out().In(uintptr(f), 0, sharedBytes, uintptr(limit))) // no callback
	return int32(v), int32(w), r
}

func (l *Lib) MemAllocAsync(bytes uintptr, s Stream) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAllocAsync, dl.Get().Out().In(bytes, uintptr(s)))
	return DevicePtr(p), r
}

func (l *Lib) MemFreeAsync(p DevicePtr, s Stream) Result {
	return l.Call(fnMemFreeAsync, dl.Get().In(uintptr(p), uintptr(s)))
}

func (l *Lib) MemPoolGetAttribute(p MemPool, attr int32) (uint64, Result) {
	return l.Call1(fnMemPoolGetAttribute, dl.Get().In(uintptr(p), uintptr(attr)).Out())
}

func (l *Lib) MemPoolSetAttribute(p MemPool, attr int32, value uint64) Result {
	return l.Call(fnMemPoolSetAttribute, dl.Get().In(uintptr(p), uintptr(attr)).InOut(value))
}

func (l *Lib) MemPoolSetAccess(p MemPool, peer Device) Result {
	desc := &memAccessDesc{memLocation{memLocationTypeDevice, int32(peer)}, int32(MemAccessReadWrite)}
	return l.Call(fnMemPoolSetAccess, dl.Get().In(uintptr(p)).Ptr(unsafe.Pointer(desc)).In(1))
}

func (l *Lib) MemPoolTrimTo(p MemPool, keep uintptr) Result {
	return l.Call(fnMemPoolTrimTo, dl.Get().In(uintptr(p), keep))
}

func (l *Lib) StreamCreateWithPriority(flags uint32, priority int32) (Stream, Result) {
	s, r := l.Call1(fnStreamCreateWithPriority, dl.Get().Out().In(uintptr(flags), uintptr(priority)))
	return Stream(s), r
}

func (l *Lib) StreamDestroy(s Stream) Result { return l.Call(fnStreamDestroy, dl.Get().In(uintptr(s))) }

func (l *Lib) StreamSynchronize(s Stream) Result {
	return l.Call(fnStreamSynchronize, dl.Get().In(uintptr(s)))
}

func (l *Lib) StreamQuery(s Stream) Result { return l.Call(fnStreamQuery, dl.Get().In(uintptr(s))) }

func (l *Lib) StreamBatchMemOp(s Stream, ops []StreamMemOp) Result {
	list := make([]streamMemOp, len(ops))
	for i, o := range ops {
		list[i] = o.c()
	}
	return l.Call(fnStreamBatchMemOp, dl.Get().In(uintptr(s), uintptr(len(list))).Ptr(unsafe.Pointer(unsafe.SliceData(list))).In(0))
}

func (l *Lib) StreamWaitEvent(s Stream, e Event, flags uint32) Result {
	return l.Call(fnStreamWaitEvent, dl.Get().In(uintptr(s), uintptr(e), uintptr(flags)))
}

func (l *Lib) StreamGetPriority(s Stream) (int32, Result) {
	p, r := l.Call1(fnStreamGetPriority, dl.Get().In(uintptr(s)).Out())
	return int32(p), r
}

func (l *Lib) StreamGetCtx(s Stream) (Context, Result) {
	c, r := l.Call1(fnStreamGetCtx, dl.Get().In(uintptr(s)).Out())
	return Context(c), r
}

func (l *Lib) LaunchHostFunc(s Stream, f dl.Closure) Result {
	return l.Call(fnLaunchHostFunc, dl.Get().In(uintptr(s), dl.CallClosure(), uintptr(f)))
}

func (l *Lib) EventCreate(flags uint32) (Event, Result) {
	e, r := l.Call1(fnEventCreate, dl.Get().Out().In(uintptr(flags)))
	return Event(e), r
}

func (l *Lib) EventDestroy(e Event) Result { return l.Call(fnEventDestroy, dl.Get().In(uintptr(e))) }

func (l *Lib) EventRecord(e Event, s Stream) Result {
	return l.Call(fnEventRecord, dl.Get().In(uintptr(e), uintptr(s)))
}

func (l *Lib) EventRecordWithFlags(e Event, s Stream, flags uint32) Result {
	return l.Call(fnEventRecordWithFlags, dl.Get().In(uintptr(e), uintptr(s), uintptr(flags)))
}

func (l *Lib) EventQuery(e Event) Result { return l.Call(fnEventQuery, dl.Get().In(uintptr(e))) }

func (l *Lib) EventSynchronize(e Event) Result {
	return l.Call(fnEventSynchronize, dl.Get().In(uintptr(e)))
}

func (l *Lib) EventElapsedTime(start, end Event) (milliseconds float32, r Result) {
	v, r := l.Call1(fnEventElapsedTime, dl.Get().Out().In(uintptr(start), uintptr(end)))
	return math.Float32frombits(uint32(v)), r
}

func (l *Lib) IpcGetEventHandle(e Event) (IpcEventHandle, Result) {
	h := new(IpcEventHandle)
	r := l.Call(fnIpcGetEventHandle, dl.Get().Ptr(unsafe.Pointer(h)).In(uintptr(e)))
	return *h, r
}

func (l *Lib) IpcOpenEventHandle(h IpcEventHandle) (Event, Result) {
	e, r := l.Call1(fnIpcOpenEventHandle, dl.Get().Out().Struct64((*[64]byte)(&h)))
	return Event(e), r
}

func (l *Lib) MemGetAllocationGranularity(prop MemAllocationProp, option MemGranularity) (uintptr, Result) {
	n, r := l.Call1(fnMemGetAllocationGranularity, dl.Get().Out().Ptr(unsafe.Pointer(prop.c())).In(uintptr(option)))
	return uintptr(n), r
}

func (l *Lib) MemAddressReserve(bytes, alignment uintptr, hint DevicePtr) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAddressReserve, dl.Get().Out().In(bytes, alignment, uintptr(hint), 0))
	return DevicePtr(p), r
}

func (l *Lib) MemAddressFree(p DevicePtr, bytes uintptr) Result {
	return l.Call(fnMemAddressFree, dl.Get().In(uintptr(p), bytes))
}

func (l *Lib) MemCreate(bytes uintptr, prop MemAllocationProp) (MemHandle, Result) {
	h, r := l.Call1(fnMemCreate, dl.Get().Out().In(bytes).Ptr(unsafe.Pointer(prop.c())).In(0))
	return MemHandle(h), r
}

func (l *Lib) MemRelease(h MemHandle) Result { return l.Call(fnMemRelease, dl.Get().In(uintptr(h))) }

func (l *Lib) MemMap(p DevicePtr, bytes, offset uintptr, h MemHandle) Result {
	return l.Call(fnMemMap, dl.Get().In(uintptr(p), bytes, offset, uintptr(h), 0))
}

func (l *Lib) MemUnmap(p DevicePtr, bytes uintptr) Result {
	return l.Call(fnMemUnmap, dl.Get().In(uintptr(p), bytes))
}

func (l *Lib) MemSetAccess(p DevicePtr, bytes uintptr, access MemAccess, devices ...Device) Result {
	if len(devices) == 0 {
		return ErrorInvalidValue
	}
	descs := make([]memAccessDesc, len(devices))
	for i, d := range devices {
		descs[i] = memAccessDesc{memLocation{memLocationTypeDevice, int32(d)}, int32(access)}
	}
	return l.Call(fnMemSetAccess, dl.Get().In(uintptr(p), bytes).Ptr(unsafe.Pointer(&descs[0])).In(uintptr(len(descs))))
}

func (l *Lib) MemExportToShareableHandle(h MemHandle, t MemHandleType) (int32, Result) {
	fd, r := l.Call1(fnMemExportToShareableHandle, dl.Get().Out().In(uintptr(h), uintptr(t), 0))
	return int32(fd), r
}

func (l *Lib) MemImportFromShareableHandle(fd int32, t MemHandleType) (MemHandle, Result) {
	h, r := l.Call1(fnMemImportFromShareableHandle, dl.Get().Out().In(uintptr(fd), uintptr(t)))
	return MemHandle(h), r
}
