package cudadrv

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
