package cufileapi

import "github.com/gochorus/chorus/internal/cudadrv"

// Descr is CUfileDescr_t of a file descriptor.
type Descr struct {
	Type  int32
	_     int32
	FD    int32 // of a union with a pointer
	_     int32
	FSOps uintptr // of file systems in user space
}

// The kinds of a Descr.
const (
	OpaqueFD    int32 = 1
	OpaqueWin32 int32 = 2
	UserspaceFS int32 = 3
)

// Flags of BufRegister.
const (
	RDMARegister        int32 = 1
	RDMARelaxedOrdering int32 = 2
)

// DrvProps is CUfileDrvProps_t; its three flag words have a bit for each of the
// constants below.
type DrvProps struct {
	MajorVersion            uint32 // of nvidia-fs, 0 if it is not loaded
	MinorVersion            uint32
	PollThreshSize          uintptr // KB
	MaxDirectIOSize         uintptr // KB
	DStatusFlags            uint32
	DControlFlags           uint32
	FFlags                  uint32
	MaxDeviceCacheSize      uint32 // KB
	PerBufferCacheSize      uint32 // KB
	MaxDevicePinnedMemSize  uint32 // KB
	MaxBatchIOSize          uint32
	MaxBatchIOTimeoutMillis uint32
}

// Bits of DStatusFlags: the file systems and devices that nvidia-fs serves.
const (
	LustreSupported       = 0
	WekaFSSupported       = 1
	NFSSupported          = 2
	GPFSSupported         = 3
	NVMeSupported         = 4
	NVMeOFSupported       = 5
	SCSISupported         = 6
	ScaleFluxCSDSupported = 7
	NVMeshSupported       = 8
	BeeGFSSupported       = 9
	NVMeP2PSupported      = 11
	ScateFSSupported      = 12
)

// Bits of DControlFlags.
const (
	UsePollMode     = 0
	AllowCompatMode = 1
)

// Bits of FFlags.
const (
	DynRoutingSupported = 0
	BatchIOSupported    = 1
	StreamsSupported    = 2
	ParallelIOSupported = 3
)

// IOParams is CUfileIOParams_t, one transfer of a batch.
type IOParams struct {
	Mode       int32 // BatchMode
	_          int32
	DevPtrBase cudadrv.DevicePtr
	FileOffset int64
	DevOffset  int64
	Size       uintptr
	Handle     Handle
	Opcode     int32
	_          int32
	Cookie     uintptr // comes back in the event: a number, never the address of a Go object
}

// BatchMode is the only mode of IOParams.
const BatchMode int32 = 1

// Opcodes of IOParams.
const (
	OpRead  int32 = 0
	OpWrite int32 = 1
)

// IOEvents is CUfileIOEvents_t, what became of a transfer of a batch.
type IOEvents struct {
	Cookie uintptr
	Status Status
	_      int32
	Ret    uintptr // bytes, or an error as a negative number: see Transferred
}

// Status is CUfileStatus_t.
type Status int32

// The states of a transfer.
const (
	Waiting  Status = 0x01
	Pending  Status = 0x02
	Invalid  Status = 0x04
	Canceled Status = 0x08
	Complete Status = 0x10
	TimedOut Status = 0x20
	Failed   Status = 0x40
)

// Timespec is struct timespec.
type Timespec struct{ Sec, Nsec int64 }

// Flags of StreamRegister: the properties of a transfer that are known when it is
// enqueued.
const (
	FixedBufOffset    uint32 = 1
	FixedFileOffset   uint32 = 2
	FixedFileSize     uint32 = 4
	PageAlignedInputs uint32 = 8 // the offsets and sizes are multiples of 4096
)
