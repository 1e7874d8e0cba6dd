// Package cudadrv is the CUDA driver API: one method for each C function that Chorus uses,
// with the C names without their cu prefix, C types and no policy.
//
// Driver is the interface that the layers above program against. Lib calls libcuda.so.1;
// the virtual devices implement the same interface in host memory. In-parameters are
// passed by value, and out-parameters are returned as results, before the Result. CUDA
// defines which calls need a current context on the calling OS thread; the layers above
// bind one for every call that the interface does not mark as free of a context.
package cudadrv

import (
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

// Driver is the part of the CUDA driver API that Chorus uses.
//
// Calls marked "free" need no current context. A backend may refuse any other
// call with ErrorInvalidContext when the calling OS thread has not bound one
// with CtxSetCurrent since its previous call.
type Driver interface {
	Init() Result                                                             // free
	DriverGetVersion() (int32, Result)                                        // free; 13000 is CUDA 13.0
	DeviceGetCount() (int32, Result)                                          // free
	DeviceGet(ordinal int32) (Device, Result)                                 // free
	DeviceGetName(d Device) (string, Result)                                  // free
	DeviceGetUUID(d Device) (UUID, Result)                                    // free
	DeviceGetAttribute(a Attribute, d Device) (int32, Result)                 // free
	DeviceTotalMem(d Device) (uintptr, Result)                                // free
	DeviceGetPCIBusID(d Device) (string, Result)                              // free
	DeviceCanAccessPeer(d, peer Device) (int32, Result)                       // free
	DeviceGetDefaultMemPool(d Device) (MemPool, Result)                       // free
	DevicePrimaryCtxRetain(d Device) (Context, Result)                        // free
	DevicePrimaryCtxRelease(d Device) Result                                  // free
	DevicePrimaryCtxGetState(d Device) (flags uint32, active int32, r Result) // free
	CtxSetCurrent(c Context) Result                                           // free
	CtxGetCurrent() (Context, Result)                                         // free
	DeviceGetP2PAttribute(a P2PAttribute, src, dst Device) (int32, Result)    // free

	CtxSynchronize() Result
	CtxGetStreamPriorityRange() (least, greatest int32, r Result)
	CtxEnablePeerAccess(peer Context, flags uint32) Result

	ProfilerStart() Result
	ProfilerStop() Result

	MemGetInfo() (free, total uintptr, r Result)
	MemAlloc(bytes uintptr) (DevicePtr, Result)
	MemFree(p DevicePtr) Result
	// MemGetAddressRange finds the allocation, or the mapping, that p lies in.
	MemGetAddressRange(p DevicePtr) (base DevicePtr, bytes uintptr, r Result)
	// PointerGetAttribute asks what memory p lies in, whichever context is current.
	PointerGetAttribute(a PointerAttribute, p DevicePtr) (int32, Result)
	// IpcGetMemHandle names memory of MemAlloc for other processes.
	IpcGetMemHandle(p DevicePtr) (IpcMemHandle, Result)
	// IpcOpenMemHandle maps the memory of another process. Opening a handle again
	// returns the same address, to be closed as often.
	IpcOpenMemHandle(h IpcMemHandle, flags uint32) (DevicePtr, Result)
	IpcCloseMemHandle(p DevicePtr) Result

	MemAllocAsync(bytes uintptr, s Stream) (DevicePtr, Result)
	MemFreeAsync(p DevicePtr, s Stream) Result
	MemPoolGetAttribute(p MemPool, attr int32) (uint64, Result)     // free
	MemPoolSetAttribute(p MemPool, attr int32, value uint64) Result // free
	MemPoolSetAccess(p MemPool, peer Device) Result                 // free; read and write for one device
	MemPoolTrimTo(p MemPool, keep uintptr) Result                   // free

	MemGetAllocationGranularity(prop MemAllocationProp, option MemGranularity) (uintptr, Result)
	MemAddressReserve(bytes, alignment uintptr, hint DevicePtr) (DevicePtr, Result)
	MemAddressFree(p DevicePtr, bytes uintptr) Result
	// MemCreate allocates physical memory. It exists until the handle is released and all
	// mappings are removed.
	MemCreate(bytes uintptr, prop MemAllocationProp) (MemHandle, Result)
	MemRelease(h MemHandle) Result
	// MemMap maps physical memory into a reservation. No device has access yet.
	MemMap(p DevicePtr, bytes, offset uintptr, h MemHandle) Result
	// MemUnmap undoes whole mappings. It does not wait for what uses them.
	MemUnmap(p DevicePtr, bytes uintptr) Result
	MemSetAccess(p DevicePtr, bytes uintptr, access MemAccess, devices ...Device) Result
	// MemExportToShareableHandle returns a file descriptor that the caller closes.
	MemExportToShareableHandle(h MemHandle, t MemHandleType) (fd int32, r Result)
	// MemImportFromShareableHandle leaves the descriptor to the caller.
	MemImportFromShareableHandle(fd int32, t MemHandleType) (MemHandle, Result)

	MemHostAlloc(bytes uintptr, flags uint32) (unsafe.Pointer, Result)
	MemFreeHost(p unsafe.Pointer) Result
	// MemHostRegister page-locks memory that the caller has, which must not be
	// given back before MemHostUnregister.
	MemHostRegister(p unsafe.Pointer, bytes uintptr, flags uint32) Result
	MemHostUnregister(p unsafe.Pointer) Result

	MemcpyHtoDAsync(dst DevicePtr, src unsafe.Pointer, bytes uintptr, s Stream) Result
	MemcpyDtoHAsync(dst unsafe.Pointer, src DevicePtr, bytes uintptr, s Stream) Result
	MemcpyDtoDAsync(dst, src DevicePtr, bytes uintptr, s Stream) Result
	MemcpyPeerAsync(dst DevicePtr, dstCtx Context, src DevicePtr, srcCtx Context, bytes uintptr, s Stream) Result
	// Memcpy2DAsync copies rows of device memory, also to another device if the stream's
	// context has access to it.
	Memcpy2DAsync(c Memcpy2D, s Stream) Result
	MemsetD8Async(dst DevicePtr, value uint8, count uintptr, s Stream) Result

	StreamCreateWithPriority(flags uint32, priority int32) (Stream, Result)
	StreamDestroy(s Stream) Result
	StreamSynchronize(s Stream) Result
	StreamQuery(s Stream) Result
	StreamWaitEvent(s Stream, e Event, flags uint32) Result
	// StreamBatchMemOp enqueues waits for words of memory and writes of words, one after the other. The memory is of a
	// device or page-locked, and the stream's context has access to it.
	StreamBatchMemOp(s Stream, ops []StreamMemOp) Result
	StreamGetPriority(s Stream) (int32, Result)
	StreamGetCtx(s Stream) (Context, Result)
	// LaunchHostFunc calls the function from a thread of the driver when the
	// stream has come there. It must not call the driver.
	LaunchHostFunc(s Stream, f dl.Closure) Result

	EventCreate(flags uint32) (Event, Result)
	EventDestroy(e Event) Result
	EventRecord(e Event, s Stream) Result
	EventRecordWithFlags(e Event, s Stream, flags uint32) Result
	EventQuery(e Event) Result
	EventSynchronize(e Event) Result
	EventElapsedTime(start, end Event) (milliseconds float32, r Result)
	IpcGetEventHandle(e Event) (IpcEventHandle, Result)
	IpcOpenEventHandle(h IpcEventHandle) (Event, Result)

	ModuleLoadData(image []byte) (Module, Result)
	ModuleUnload(m Module) Result
	ModuleGetFunction(m Module, name string) (Function, Result)
	// LaunchKernel's params points at an array with the address of each
	// parameter's value; both are read before it returns.
	LaunchKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result
	LaunchCooperativeKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result
	FuncGetAttribute(a FuncAttribute, f Function) (int32, Result)
	FuncSetAttribute(f Function, a FuncAttribute, value int32) Result
	OccupancyMaxActiveBlocksPerMultiprocessor(f Function, blockSize int32, sharedBytes uintptr) (int32, Result)
	// OccupancyMaxPotentialBlockSize is for kernels whose dynamic shared memory
	// does not depend on the size of the block; a limit of 0 is none.
	OccupancyMaxPotentialBlockSize(f Function, sharedBytes uintptr, limit int32) (minGrid, block int32, r Result)

	// StreamBeginCapture records operations that are enqueued on the stream from now on
	// instead of running them. In the modes global and thread-local the same OS thread
	// must end the capture.
	StreamBeginCapture(s Stream, mode CaptureMode) Result
	StreamEndCapture(s Stream) (Graph, Result)
	StreamIsCapturing(s Stream) (CaptureStatus, Result)
	StreamGetCaptureInfo(s Stream) (status CaptureStatus, id uint64, r Result)
	// StreamGetCaptureGraph returns the graph that the stream is captured into,
	// or 0: it is not complete, and the driver's.
	StreamGetCaptureGraph(s Stream) (Graph, Result)
	ThreadExchangeStreamCaptureMode(mode CaptureMode) (CaptureMode, Result) // free; the previous one

	GraphGetNodes(g Graph) (uintptr, Result) // how many
	GraphInstantiateWithFlags(g Graph, flags uint64) (GraphExec, Result)
	GraphLaunch(e GraphExec, s Stream) Result
	GraphUpload(e GraphExec, s Stream) Result
	GraphExecUpdate(e GraphExec, g Graph) (GraphExecUpdateResult, Result)
	GraphExecDestroy(e GraphExec) Result
	GraphDestroy(g Graph) Result
	// UserObjectCreate returns an object with one reference that calls f when the
	// last one is released.
	UserObjectCreate(f dl.Closure) (UserObject, Result)
	UserObjectRelease(o UserObject, count uint32) Result
	// GraphRetainUserObject adds references of the graph to the object, or moves the
	// caller's references to the graph. An instantiated graph has its own references,
	// until its last launch has completed.
	GraphRetainUserObject(g Graph, o UserObject, count, flags uint32) Result
	GraphDebugDotPrint(g Graph, path string, flags uint32) Result
}

// A Use is a use of memory by an operation: [Ptr, Ptr+Bytes).
type Use struct {
	Ptr   DevicePtr
	Bytes uint64
	Write bool // it writes, and may read
}

// An Operation is work that a library, or a kernel with addresses in its memory, has enqueued.
type Operation struct {
	Name    string
	Context Context // of the stream
	Stream  Stream
	Uses    []Use
	// Meets means that the operation waits for operations of other devices, and they for it.
	Meets bool
}

// A Watcher is a driver that needs to know which memory operations use, although their calls
// do not tell. The sanitizer is a Watcher; CUDA and virtual devices are not.
type Watcher interface {
	Auditor
	// Describe stores the name of a kernel, and the function that lists the memory that a
	// launch uses. It gets the params of LaunchKernel.
	Describe(f Function, name string, uses func(params unsafe.Pointer) []Use)
	// Used reports an operation that was enqueued. No context need be bound.
	Used(o Operation)
}

// An Auditor is a driver that needs to know which pieces of its memory an allocator has
// allocated, because it detects accesses to other pieces. Virtual devices are Auditors,
// CUDA is not.
//
// The calls need no context and take effect in stream order: operations before a
// MemFreed may use the piece, and so may operations after a MemAllocated. Another stream may
// use a piece only after an event, as for any other use. If the stream is being captured,
// a piece named by either call stays usable from then on, since the graph uses it at every
// launch. A graph must not use a piece that was freed and allocated again, outside of a capture, since
// the operation was captured.
type Auditor interface {
	// MemAllocated reports that the piece was allocated. Memory without any reported piece may
	// be used freely.
	MemAllocated(p DevicePtr, bytes uintptr, s Stream) Result
	// MemFreed reports that the piece was freed.
	MemFreed(p DevicePtr, bytes uintptr, s Stream) Result
	// MemShare reports that operations on the allocated piece are ordered by what they write there or elsewhere, and not by
	// events: until MemFreed, an access without an order is no mistake.
	MemShare(p DevicePtr, bytes uintptr, s Stream) Result
	// HostAllocated reports that a piece of page-locked memory has a new owner. Operations that were enqueued before must
	// not use it any more.
	HostAllocated(p unsafe.Pointer, bytes uintptr)
}

// NameOf returns the C name of the function that call calls first, such as cuMemAlloc, for
// the error of a failed call. The name is then written only once, in the table of symbols.
// NameOf runs call again, on a driver that lacks every function: each driver call returns
// ErrorNotSupported and zeros. call must therefore only call the driver and store results
// that are used only after a success.
func NameOf(call func(drv Driver) Result) string {
	t, asked := dl.Empty[fn](int(numFns), ErrorNotSupported)
	call(&Lib{Table: t})
	if *asked < 0 {
		return "a call of the CUDA driver"
	}
	name, version, ok := strings.Cut(symbols[*asked].Name, "_v")
	if ok && len(version) != 1 {
		return symbols[*asked].Name
	}
	return name
}
