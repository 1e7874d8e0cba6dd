package ncclapi

import "math"

// DType is ncclDataType_t.
type DType int32

// The element types, with the values of nccl.h.
const (
	Int8 DType = iota
	Uint8
	Int32
	Uint32
	Int64
	Uint64
	Float16
	Float32
	Float64
	BFloat16
	Float8E4M3
	Float8E5M2
)

// Size is the width of one element in bytes, or 0 for an unknown type.
func (t DType) Size() uintptr {
	switch t {
	case Int8, Uint8, Float8E4M3, Float8E5M2:
		return 1
	case Float16, BFloat16:
		return 2
	case Int32, Uint32, Float32:
		return 4
	case Int64, Uint64, Float64:
		return 8
	}
	return 0
}

// RedOp is ncclRedOp_t. Values of 5 and above are made by RedOpCreatePreMulSum.
type RedOp int32

// The reductions, with the values of nccl.h.
const (
	Sum RedOp = iota
	Prod
	Max
	Min
	Avg
)

// The location of the scalar of RedOpCreatePreMulSum.
const (
	ScalarDevice        int32 = 0
	ScalarHostImmediate int32 = 1
)

// Flags of CommShrink and CommWindowRegister.
const (
	ShrinkDefault        int32 = 0
	ShrinkAbort          int32 = 1
	WindowDefault        int32 = 0
	WindowCollSymmetric  int32 = 1
	WindowStrictOrdering int32 = 2
	WindowGINOnly        int32 = 4 // 2.32
)

// Undefined is NCCL_CONFIG_UNDEF_INT: the library chooses.
const Undefined = math.MinInt32

// ConfigMagic is the Magic of a Config that Stamp has filled in, and of the other structs that
// describe a choice.
const ConfigMagic = 0xcafebeef

const simInfoMagic = 0x74685283

// Config is ncclConfig_t in its newest known layout. New versions only append fields;
// Stamp sets how many bytes the loaded library reads.
type Config struct {
	Size                uintptr
	Magic               uint32
	Version             uint32
	Blocking            int32
	CGAClusterSize      int32
	MinCTAs             int32
	MaxCTAs             int32
	NetName             *byte
	SplitShare          int32
	TrafficClass        int32
	CommName            *byte
	CollnetEnable       int32
	CTAPolicy           int32
	ShrinkShare         int32
	NVLSCTAs            int32
	NChannelsPerNetPeer int32
	NVLinkCentricSched  int32
	GraphUsageMode      int32 // 2.29
	NumRMACtx           int32 // 2.29
	MaxP2PPeers         int32 // 2.30
	GraphStreamOrdering int32 // 2.30
	LaunchOrderImplicit int32 // 2.31
	NumRMASig           int32 // 2.31
	RMAEagerInit        int32 // 2.31
	HostCFTMode         int32 // 2.31
	NVLSHostMode        int32 // 2.32
	_                   uint32
}

// What CommMemStats tells, with the values of nccl.h.
const (
	StatGPUMemSuspend   int32 = 0 // bytes that CommSuspend gives back
	StatGPUMemSuspended int32 = 1 // 1 while they are given back
	StatGPUMemPersist   int32 = 2 // bytes that stay
	StatGPUMemTotal     int32 = 3
)

// Flags of CommRevoke and CommSuspend.
const (
	RevokeDefault int32 = 0
	SuspendMem    int32 = 1
)

// Properties is ncclCommProperties_t of 2.30; Stamp sets how many bytes the loaded library
// reads.
type Properties struct {
	Size             uintptr
	Magic            uint32
	Version          uint32
	Rank             int32
	NRanks           int32
	CUDADev          int32
	NVMLDev          int32
	DeviceAPISupport uint8
	MultimemSupport  uint8
	_                [2]uint8
	GINType          int32
	NLSATeams        int32
	HostRMASupport   uint8
	_                [3]uint8
	RailedGINType    int32
	_                uint32
}

// Param is an ncclParamHandle_t.
type Param uintptr

// SignalDesc is ncclWaitSignalDesc_t.
type SignalDesc struct {
	Ops    int32 // how many signals to wait for
	Peer   int32
	Signal int32
	Ctx    int32
}

// SimInfo is ncclSimInfo_t.
type SimInfo struct {
	Size          uintptr
	Magic         uint32
	Version       uint32
	EstimatedTime float32 // microseconds as NCCL's cost model has it; -1 when unknown
	_             uint32
}
