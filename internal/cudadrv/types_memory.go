package cudadrv

import "unsafe"

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

// MemHostRegisterPortable makes registered memory page-locked for every context.
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
