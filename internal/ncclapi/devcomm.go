package ncclapi

import "unsafe"

// DevCommBytes is more than sizeof(ncclDevComm) of every version.
const DevCommBytes = 4096

// DevComm is memory for an ncclDevComm, whose size depends on the version.
type DevComm [DevCommBytes / 8]uint64

// FirstDevComm is the first version whose DevCommRequirements say their size and version. NCCL
// 2.28 cannot detect that a struct has another layout.
const FirstDevComm = 22902

// DevCommRequirements is the part of ncclDevCommRequirements_t that all versions from
// FirstDevComm on have. NCCL copies Size bytes over its defaults.
type DevCommRequirements struct {
	Size                uintptr
	Magic               uint32
	Version             uint32
	Resources           uintptr // list
	Teams               uintptr // list
	LSAMultimem         uint8
	_                   [3]uint8
	BarrierCount        int32
	LSABarrierCount     int32
	RailGINBarrierCount int32
	LSALLA2ABlockCount  int32
	LSALLA2ASlotCount   int32
}

// NewDevCommRequirements returns requirements of nothing, for a library of the given version.
func NewDevCommRequirements(version int32) *DevCommRequirements {
	return &DevCommRequirements{Size: unsafe.Sizeof(DevCommRequirements{}), Magic: ConfigMagic, Version: uint32(version)}
}
