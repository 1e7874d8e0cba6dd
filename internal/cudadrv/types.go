package cudadrv

import (
	"unsafe"
)

// Handles and addresses as the driver returns them. They are integers and not pointers,
// because the garbage collector must ignore them.
type (
	Device    int32
	Context   uintptr
	Stream    uintptr
	Event     uintptr
	Module    uintptr
	Function  uintptr
	MemPool   uintptr
	DevicePtr uint64
)

// IpcEventHandle is CUipcEventHandle.
type IpcEventHandle [64]byte

// UUID is CUuuid.
type UUID [16]byte

// Attribute is CUdevice_attribute.
type Attribute int32

// P2PAttribute is CUdevice_P2PAttribute.
type P2PAttribute int32

// PointerAttribute is CUpointer_attribute.
type PointerAttribute int32

// The attributes of addresses that Chorus reads.
const (
	PointerMemoryType PointerAttribute = 2 // a CUmemorytype
	PointerDevice     PointerAttribute = 9 // the ordinal
)

// MemoryTypeDevice is the CUmemorytype of device memory. Managed memory has it, too.
const MemoryTypeDevice = 2

// Flags of the creating calls, with the values of cuda.h.
const (
	StreamDefault     uint32 = 0
	StreamNonBlocking uint32 = 1

	EventDefault       uint32 = 0
	EventBlockingSync  uint32 = 1
	EventDisableTiming uint32 = 2
	EventInterprocess  uint32 = 4

	EventExternal uint32 = 1 // of a record or wait in a capture

	MemHostAllocPortable uint32 = 1
)

// The device attributes that Chorus reads.
const (
	AttrMaxThreadsPerBlock          Attribute = 1
	AttrMaxSharedMemoryPerBlock     Attribute = 8
	AttrWarpSize                    Attribute = 10
	AttrClockRate                   Attribute = 13
	AttrMultiprocessorCount         Attribute = 16
	AttrPCIBusID                    Attribute = 33
	AttrPCIDeviceID                 Attribute = 34
	AttrMemoryClockRate             Attribute = 36
	AttrGlobalMemoryBusWidth        Attribute = 37
	AttrL2CacheSize                 Attribute = 38
	AttrMaxThreadsPerMultiprocessor Attribute = 39
	AttrPCIDomainID                 Attribute = 50
	AttrComputeCapabilityMajor      Attribute = 75
	AttrComputeCapabilityMinor      Attribute = 76
	AttrMaxSharedMemoryPerSM        Attribute = 81
	AttrCooperativeLaunch           Attribute = 95
	AttrMaxSharedMemoryOptin        Attribute = 97
	AttrHostRegisterSupported       Attribute = 99
	AttrVMMSupported                Attribute = 102 // virtual memory management
	AttrPosixFDHandleSupported      Attribute = 103
	AttrGPUDirectRDMAWithVMM        Attribute = 110
	AttrMemoryPoolsSupported        Attribute = 115
)

// The peer attributes that Chorus reads.
const (
	P2PPerformanceRank P2PAttribute = 1
	P2PAccessSupported P2PAttribute = 2
	P2PNativeAtomics   P2PAttribute = 3
)

// FuncAttribute is CUfunction_attribute.
type FuncAttribute int32

// The attributes of kernels that Chorus reads or sets.
const (
	FuncMaxThreadsPerBlock    FuncAttribute = 0
	FuncSharedBytes           FuncAttribute = 1
	FuncConstBytes            FuncAttribute = 2
	FuncLocalBytes            FuncAttribute = 3
	FuncRegisters             FuncAttribute = 4
	FuncMaxDynamicSharedBytes FuncAttribute = 8
)

// Handles of graphs.
type (
	Graph      uintptr
	GraphExec  uintptr
	UserObject uintptr
)

// CaptureMode is CUstreamCaptureMode: whose calls may spoil a capture.
type CaptureMode int32

// CaptureStatus is CUstreamCaptureStatus.
type CaptureStatus int32

// GraphExecUpdateResult is CUgraphExecUpdateResult: why an update failed.
type GraphExecUpdateResult int32

// The capture modes and the capture states of a stream.
const (
	CaptureGlobal      CaptureMode = 0
	CaptureThreadLocal CaptureMode = 1
	CaptureRelaxed     CaptureMode = 2

	CaptureNone        CaptureStatus = 0
	CaptureActive      CaptureStatus = 1
	CaptureInvalidated CaptureStatus = 2
)

// Flags of the graph calls, with the values of cuda.h.
const (
	GraphInstantiateAutoFree     uint64 = 1
	GraphInstantiateNodePriority uint64 = 8

	GraphDotVerbose uint32 = 1

	// GraphUserObjectMove gives the caller's references to the graph.
	GraphUserObjectMove uint32 = 1

	userObjectNoDestructorSync = 1 // the only flag, and required
)

// The reasons of GraphExecUpdate.
const (
	GraphUpdateSuccess                   GraphExecUpdateResult = 0
	GraphUpdateError                     GraphExecUpdateResult = 1
	GraphUpdateTopologyChanged           GraphExecUpdateResult = 2
	GraphUpdateNodeTypeChanged           GraphExecUpdateResult = 3
	GraphUpdateFunctionChanged           GraphExecUpdateResult = 4
	GraphUpdateParametersChanged         GraphExecUpdateResult = 5
	GraphUpdateNotSupported              GraphExecUpdateResult = 6
	GraphUpdateUnsupportedFunctionChange GraphExecUpdateResult = 7
	GraphUpdateAttributesChanged         GraphExecUpdateResult = 8
)

var graphUpdateMeanings = [...]string{
	"", "an unspecified error", "the graphs differ in their nodes or dependencies", "a node is of another type",
	"a kernel is of another device or context", "a parameter changed in a way that updates do not support",
	"something in the graph cannot be updated", "a kernel changed in a way that updates do not support",
	"a node's attributes changed in a way that updates do not support",
}

// Meaning explains why an update failed, in a clause without a full stop.
func (r GraphExecUpdateResult) Meaning() string {
	if r < 0 || int(r) >= len(graphUpdateMeanings) {
		return ""
	}
	return graphUpdateMeanings[r]
}

// graphExecUpdateResultInfo is CUgraphExecUpdateResultInfo.
type graphExecUpdateResultInfo struct {
	Result        GraphExecUpdateResult
	ErrorNode     uintptr
	ErrorFromNode uintptr
}

// MemHandle is CUmemGenericAllocationHandle: physical memory without an address.
type MemHandle uint64

// MemHandleType is CUmemAllocationHandleType: how physical memory can be shared
// with another process.
type MemHandleType int32

// The ways of sharing.
const (
	MemHandleNone    MemHandleType = 0
	MemHandlePosixFD MemHandleType = 1
)

// MemAllocationProp says what physical memory is asked for: pinned memory of a
// device. It stands for CUmemAllocationProp.
type MemAllocationProp struct {
	Device      Device
	HandleTypes MemHandleType
	// GPUDirectRDMACapable lets network cards use the memory.
	GPUDirectRDMACapable bool
}

// MemGranularity is CUmemAllocationGranularity_flags.
type MemGranularity int32

// The granularities.
const (
	MemGranularityMinimum     MemGranularity = 0
	MemGranularityRecommended MemGranularity = 1
)

// MemAccess is CUmemAccess_flags: the access of a device to mapped memory.
type MemAccess int32

// The kinds of access.
const (
	MemAccessNone      MemAccess = 0
	MemAccessRead      MemAccess = 1
	MemAccessReadWrite MemAccess = 3
)

// IpcMemHandle is CUipcMemHandle.
type IpcMemHandle [64]byte

// IpcMemLazyEnablePeerAccess is the flag of IpcOpenMemHandle, and required.
const IpcMemLazyEnablePeerAccess uint32 = 1

// MemHostRegisterPortable page-locks registered memory for every context.
const MemHostRegisterPortable uint32 = 1

// The attributes of memory pools, all of 64 bits. The marks of the highest use
// can be set to 0 to begin again.
const (
	MemPoolAttrReleaseThreshold int32 = 4
	MemPoolAttrReservedCurrent  int32 = 5
	MemPoolAttrReservedHigh     int32 = 6
	MemPoolAttrUsedCurrent      int32 = 7
	MemPoolAttrUsedHigh         int32 = 8
)

const (
	memAllocationTypePinned = 1
	memLocationTypeDevice   = 1
)

// memLocation is CUmemLocation.
type memLocation struct {
	Type int32
	ID   int32
}

// memAllocationProp is CUmemAllocationProp.
type memAllocationProp struct {
	Type                 int32
	RequestedHandleTypes int32
	Location             memLocation
	Win32HandleMetaData  unsafe.Pointer
	CompressionType      uint8
	GPUDirectRDMACapable uint8
	Usage                uint16
	_                    [4]uint8
}

// c converts p to the driver's struct.
func (p MemAllocationProp) c() *memAllocationProp {
	c := &memAllocationProp{Type: memAllocationTypePinned, RequestedHandleTypes: int32(p.HandleTypes),
		Location: memLocation{memLocationTypeDevice, int32(p.Device)}}
	if p.GPUDirectRDMACapable {
		c.GPUDirectRDMACapable = 1
	}
	return c
}

// memAccessDesc is CUmemAccessDesc.
type memAccessDesc struct {
	Location memLocation
	Flags    int32
}

// memPoolProps is CUmemPoolProps.
type memPoolProps struct {
	AllocType               int32
	HandleTypes             int32
	Location                memLocation
	Win32SecurityAttributes unsafe.Pointer
	MaxSize                 uintptr // 0 is the system's limit; before CUDA 12.3 reserved
	Usage                   uint16  // before CUDA 12.8 reserved
	_                       [54]uint8
}

// Memcpy2D is a copy of rows of device memory, which begin a pitch apart. It stands for
// CUDA_MEMCPY2D.
type Memcpy2D struct {
	Dst, Src           DevicePtr
	DstPitch, SrcPitch uintptr // in bytes, from WidthInBytes to MaxPitch
	WidthInBytes       uintptr
	Height             uintptr // rows
}

// MaxPitch is the most that a pitch can be on every device
// (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
const MaxPitch = 1<<31 - 1

const memoryTypeUnified = 4

// memcpy2D is CUDA_MEMCPY2D.
type memcpy2D struct {
	SrcXInBytes, SrcY uintptr
	SrcMemoryType     int32
	SrcHost           unsafe.Pointer
	SrcDevice         DevicePtr
	SrcArray          uintptr
	SrcPitch          uintptr
	DstXInBytes, DstY uintptr
	DstMemoryType     int32
	DstHost           unsafe.Pointer
	DstDevice         DevicePtr
	DstArray          uintptr
	DstPitch          uintptr
	WidthInBytes      uintptr
	Height            uintptr
}

// c converts c to the driver's struct. The driver determines the devices from the
// addresses.
func (c Memcpy2D) c() *memcpy2D {
	return &memcpy2D{SrcMemoryType: memoryTypeUnified, SrcDevice: c.Src, SrcPitch: c.SrcPitch,
		DstMemoryType: memoryTypeUnified, DstDevice: c.Dst, DstPitch: c.DstPitch,
		WidthInBytes: c.WidthInBytes, Height: c.Height}
}

// A StreamMemOp is an operation of a stream on a word of memory. It stands for CUstreamBatchMemOpParams.
type StreamMemOp struct {
	At    DevicePtr // a multiple of 4
	Value uint32
	Waits bool // until the word has a bit that Value has, too; otherwise the stream writes Value, after its earlier writes
}

// streamMemOp is CUstreamWriteValue or CUstreamWaitValue of the union CUstreamBatchMemOpParams.
type streamMemOp struct {
	Operation uint32
	_         uint32
	Address   DevicePtr
	Value     uint32
	_         uint32
	Flags     uint32
	_         uint32
	Alias     DevicePtr
	_         uint64
}

const (
	streamMemOpWaitValue32  = 1
	streamMemOpWriteValue32 = 2
	streamWaitValueAnd      = 2
)

func (o StreamMemOp) c() streamMemOp {
	c := streamMemOp{Operation: streamMemOpWriteValue32, Address: o.At, Value: o.Value}
	if o.Waits {
		c.Operation, c.Flags = streamMemOpWaitValue32, streamWaitValueAnd
	}
	return c
}
