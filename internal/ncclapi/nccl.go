// Package ncclapi is the host API of NCCL: one method for each C function, with
// the C names less their nccl prefix, C widths and no policy.
//
// API is the interface that package nccl programs against. Lib calls the loaded
// libnccl.so.2; the virtual devices implement the same interface in host
// memory. A function that the loaded library lacks returns MissingSymbol, and
// Has tells beforehand.
package ncclapi

import (
	"strconv"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

// Handles as NCCL gives them out.
type (
	Comm   uintptr
	Window uintptr
	RegID  uintptr // the handle of ncclCommRegister
)

// UniqueID is ncclUniqueId.
type UniqueID [128]byte

// API is every host function of NCCL 2.28, and functions up to NCCL 2.32 that a library may lack.
//
// The results of calls that make a communicator are written through out. NCCL may write
// them as late as GroupEnd, so out must stay reachable until then and must not be on a
// stack: the caller keeps it in a separate heap object.
//
// Group state is kept for each OS thread. Buffers are device addresses; counts
// are in elements.
type API interface {
	Has(f Func) bool // whether the loaded library has the function

	GetVersion() (int32, Result)
	GetUniqueID() (UniqueID, Result)
	GetLastError(c Comm) string // c may be 0

	CommInitRankScalable(out *Comm, nranks, rank int32, ids []UniqueID, cfg *Config) Result
	CommSplit(c Comm, color, key int32, out *Comm, cfg *Config) Result
	CommShrink(c Comm, exclude []int32, out *Comm, cfg *Config, flags int32) Result
	CommFinalize(c Comm) Result
	CommDestroy(c Comm) Result
	CommAbort(c Comm) Result
	CommGetAsyncError(c Comm) (async Result, r Result)
	CommCount(c Comm) (int32, Result)
	CommUserRank(c Comm) (int32, Result)
	CommCuDevice(c Comm) (int32, Result)

	CommRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr) (RegID, Result)
	CommDeregister(c Comm, h RegID) Result
	CommWindowRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr, out *Window, flags int32) Result
	CommWindowDeregister(c Comm, w Window) Result
	MemAlloc(bytes uintptr) (cudadrv.DevicePtr, Result)
	MemFree(p cudadrv.DevicePtr) Result
	RedOpCreatePreMulSum(scalar unsafe.Pointer, t DType, residence int32, c Comm) (RedOp, Result)
	RedOpDestroy(op RedOp, c Comm) Result

	// Collective enqueues a collective or a transfer.
	Collective(c Call) Result
	GroupStart() Result
	GroupEnd() Result
	GroupSimulateEnd(info *SimInfo) Result

	// Newer than 2.28.3.
	CommRevoke(c Comm, flags int32) Result
	CommGetUniqueID(c Comm) (UniqueID, Result)
	CommGrow(c Comm, nranks int32, id *UniqueID, rank int32, out *Comm, cfg *Config) Result
	CommSuspend(c Comm, flags int32) Result
	CommResume(c Comm) Result
	CommMemStats(c Comm, stat int32) (uint64, Result)
	CommQueryProperties(c Comm, p *Properties) Result
	WinGetUserPtr(c Comm, w Window) (cudadrv.DevicePtr, Result)
	PutSignal(local cudadrv.DevicePtr, count uintptr, t DType, peer int32, w Window, offset uintptr, signal, ctx int32, flags uint32, c Comm, s cudadrv.Stream) Result
	Signal(peer, signal, ctx int32, flags uint32, c Comm, s cudadrv.Stream) Result
	WaitSignal(descs []SignalDesc, c Comm, s cudadrv.Stream) Result
	ParamGetParameter(key string) (string, Result)
	ParamGetAllParameterKeys() ([]string, Result)
	ParamBind(key string) (Param, Result)
	ParamGetI64(p Param) (int64, Result)
	ParamDumpAll() Result
	// DevCommCreate writes at most DevCommBytes to out.
	DevCommCreate(c Comm, reqs *DevCommRequirements, out *DevComm) Result
	DevCommDestroy(c Comm, d *DevComm) Result
	// The address of a window of another rank is 0 if the rank is not reachable by load and
	// store.
	GetPeerDevicePointer(w Window, offset uintptr, peer int32) (cudadrv.DevicePtr, Result)
	SetEncryption(cfg *EncryptionConfig) Result
}

// Func names a host function of NCCL, for Has and the symbol table.
type Func int

// The functions, ordered as in nccl.h, and then those of newer headers.
const (
	FuncGetVersion Func = iota
	FuncGetUniqueID
	FuncGetLastError
	FuncCommInitRankScalable
	FuncCommSplit
	FuncCommShrink
	FuncCommFinalize
	FuncCommDestroy
	FuncCommAbort
	FuncCommGetAsyncError
	FuncCommCount
	FuncCommUserRank
	FuncCommCuDevice
	FuncCommRegister
	FuncCommDeregister
	FuncCommWindowRegister
	FuncCommWindowDeregister
	FuncMemAlloc
	FuncMemFree
	FuncRedOpCreatePreMulSum
	FuncRedOpDestroy
	FuncAllReduce
	FuncBroadcast
	FuncReduce
	FuncAllGather
	FuncReduceScatter
	FuncAlltoAll
	FuncGather
	FuncScatter
	FuncSend
	FuncRecv
	FuncGroupStart
	FuncGroupEnd
	FuncGroupSimulateEnd
	FuncCommRevoke
	FuncCommGetUniqueID
	FuncCommGrow
	FuncCommSuspend
	FuncCommResume
	FuncCommMemStats
	FuncCommQueryProperties
	FuncWinGetUserPtr
	FuncPutSignal
	FuncSignal
	FuncWaitSignal
	FuncParamGetParameter
	FuncParamGetAllParameterKeys
	FuncGetPeerDevicePointer
	FuncAllReduceConfig
	FuncBroadcastConfig
	FuncReduceConfig
	FuncAllGatherConfig
	FuncReduceScatterConfig
	FuncAlltoAllConfig
	FuncGatherConfig
	FuncScatterConfig
	FuncSetEncryption
	FuncDevCommCreate
	FuncDevCommDestroy
	FuncParamBind
	FuncParamGetI64
	FuncParamDumpAll
	NumFuncs
)

// symbols has the C name and the NCCL version that first had the function.
// Those of 2.23 and before are required; Open fails without them.
var symbols = [NumFuncs]dl.Versioned{
	FuncGetVersion:           {"ncclGetVersion", 20000},
	FuncGetUniqueID:          {"ncclGetUniqueId", 20000},
	FuncGetLastError:         {"ncclGetLastError", 21304},
	FuncCommInitRankScalable: {"ncclCommInitRankScalable", 22304},
	FuncCommSplit:            {"ncclCommSplit", 21801},
	FuncCommShrink:           {"ncclCommShrink", 22703},
	FuncCommFinalize:         {"ncclCommFinalize", 21403},
	FuncCommDestroy:          {"ncclCommDestroy", 20000},
	FuncCommAbort:            {"ncclCommAbort", 20402},
	FuncCommGetAsyncError:    {"ncclCommGetAsyncError", 20402},
	FuncCommCount:            {"ncclCommCount", 20000},
	FuncCommUserRank:         {"ncclCommUserRank", 20000},
	FuncCommCuDevice:         {"ncclCommCuDevice", 20000},
	FuncCommRegister:         {"ncclCommRegister", 21901},
	FuncCommDeregister:       {"ncclCommDeregister", 21901},
	FuncCommWindowRegister:   {"ncclCommWindowRegister", 22703},
	FuncCommWindowDeregister: {"ncclCommWindowDeregister", 22703},
	FuncMemAlloc:             {"ncclMemAlloc", 21901},
	FuncMemFree:              {"ncclMemFree", 21901},
	FuncRedOpCreatePreMulSum: {"ncclRedOpCreatePreMulSum", 21104},
	FuncRedOpDestroy:         {"ncclRedOpDestroy", 21104},
	FuncAllReduce:            {"ncclAllReduce", 20000},
	FuncBroadcast:            {"ncclBroadcast", 20202},
	FuncReduce:               {"ncclReduce", 20000},
	FuncAllGather:            {"ncclAllGather", 20000},
	FuncReduceScatter:        {"ncclReduceScatter", 20000},
	FuncAlltoAll:             {"ncclAlltoAll", 22803},
	FuncGather:               {"ncclGather", 22803},
	FuncScatter:              {"ncclScatter", 22803},
	FuncSend:                 {"ncclSend", 20703},
	FuncRecv:                 {"ncclRecv", 20703},
	FuncGroupStart:           {"ncclGroupStart", 20000},
	FuncGroupEnd:             {"ncclGroupEnd", 20000},
	FuncGroupSimulateEnd:     {"ncclGroupSimulateEnd", 22203},
	FuncCommRevoke:           {"ncclCommRevoke", 22807},
	FuncCommGetUniqueID:      {"ncclCommGetUniqueId", 22902},
	FuncCommGrow:             {"ncclCommGrow", 22902},
	FuncCommSuspend:          {"ncclCommSuspend", 22907},
	FuncCommResume:           {"ncclCommResume", 22907},
	FuncCommMemStats:         {"ncclCommMemStats", 22907},
	FuncCommQueryProperties:  {"ncclCommQueryProperties", 22902},
	FuncWinGetUserPtr:        {"ncclWinGetUserPtr", 22902},
	FuncPutSignal:            {"ncclPutSignal", 22902},
	FuncSignal:               {"ncclSignal", 22902},
	FuncWaitSignal:           {"ncclWaitSignal", 22902},

	FuncParamGetParameter:        {"ncclParamGetParameter", 23004},
	FuncParamGetAllParameterKeys: {"ncclParamGetAllParameterKeys", 23004},

	FuncGetPeerDevicePointer: {"ncclGetPeerDevicePointer", 22902},
	FuncAllReduceConfig:      {"ncclAllReduceConfig", 23102},
	FuncBroadcastConfig:      {"ncclBroadcastConfig", 23102},
	FuncReduceConfig:         {"ncclReduceConfig", 23102},
	FuncAllGatherConfig:      {"ncclAllGatherConfig", 23102},
	FuncReduceScatterConfig:  {"ncclReduceScatterConfig", 23102},
	FuncAlltoAllConfig:       {"ncclAlltoAllConfig", 23102},
	FuncGatherConfig:         {"ncclGatherConfig", 23102},
	FuncScatterConfig:        {"ncclScatterConfig", 23102},
	FuncSetEncryption:        {"ncclSetEncryption", 23203},

	FuncDevCommCreate:  {"ncclDevCommCreate", 22803},
	FuncDevCommDestroy: {"ncclDevCommDestroy", 22803},
	FuncParamBind:      {"ncclParamBind", 23004},
	FuncParamGetI64:    {"ncclParamGetI64", 23004},
	FuncParamDumpAll:   {"ncclParamDumpAll", 23004},
}

// A Call is a call of one of NCCL's collectives or transfers. A function ignores what it has no argument for.
type Call struct {
	Func       Func // without a configuration, such as FuncAllReduce
	Send, Recv cudadrv.DevicePtr
	Count      uintptr
	Type       DType
	Op         RedOp
	Root       int32 // or the peer
	Comm       Comm
	Stream     cudadrv.Stream
	Config     *CollConfig // nil for the function without one
}

// A Collective is what is known of a function that a Call can have.
type Collective struct {
	Arguments string // in C's order, a letter each: s Send, r Recv, n Count, t Type, o Op, p Root, c Comm, q Stream
	// Sends and Recvs are the numbers of Counts that a rank reads and writes: none, one, or one for each rank.
	Sends, Recvs Extent
	// SendRoot and RecvRoot say that only the root uses the buffer.
	SendRoot, RecvRoot bool
	Configured         Func // the function with a configuration; 0 if there is none
}

// An Extent is the length of a buffer of a collective.
type Extent uint8

// The extents.
const (
	None Extent = iota
	One
	EachRank
)

// Collectives has the functions that a Call can have.
var Collectives = [NumFuncs]Collective{
	FuncAllReduce:     {Arguments: "srntocq", Sends: One, Recvs: One, Configured: FuncAllReduceConfig},
	FuncBroadcast:     {Arguments: "srntpcq", Sends: One, Recvs: One, SendRoot: true, Configured: FuncBroadcastConfig},
	FuncReduce:        {Arguments: "srntopcq", Sends: One, Recvs: One, RecvRoot: true, Configured: FuncReduceConfig},
	FuncAllGather:     {Arguments: "srntcq", Sends: One, Recvs: EachRank, Configured: FuncAllGatherConfig},
	FuncReduceScatter: {Arguments: "srntocq", Sends: EachRank, Recvs: One, Configured: FuncReduceScatterConfig},
	FuncAlltoAll:      {Arguments: "srntcq", Sends: EachRank, Recvs: EachRank, Configured: FuncAlltoAllConfig},
	FuncGather:        {Arguments: "srntpcq", Sends: One, Recvs: EachRank, RecvRoot: true, Configured: FuncGatherConfig},
	FuncScatter:       {Arguments: "srntpcq", Sends: EachRank, Recvs: One, SendRoot: true, Configured: FuncScatterConfig},
	FuncSend:          {Arguments: "sntpcq", Sends: One},
	FuncRecv:          {Arguments: "rntpcq", Recvs: One},
}

// Called returns the C function that the call calls.
func (c *Call) Called() Func {
	if c.Config != nil {
		return Collectives[c.Func].Configured
	}
	return c.Func
}

// Name is the C name, such as ncclCommSplit.
func (f Func) Name() string { return symbols[f].Name }

// Since is the version code of the first NCCL that has the function, or 20000
// for those that every NCCL 2 has.
func (f Func) Since() int32 { return symbols[f].Since }

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

// The modes of EncryptionConfig.
const (
	EncryptionNone int32 = 0
	EncryptionPSK  int32 = 1
)

// MinPSK is the minimum length of a pre-shared key in bytes.
const MinPSK = 32

// EncryptionConfig is ncclEncryptionConfig_t.
type EncryptionConfig struct {
	Size    uintptr
	Magic   uint32
	Version uint32
	Mode    int32
	_       uint32
	PSK     *byte // a NUL-terminated string
}

// NewEncryptionConfig returns an EncryptionConfig for a pre-shared key without NUL bytes.
func NewEncryptionConfig(version int32, psk string) *EncryptionConfig {
	c := &EncryptionConfig{Magic: ConfigMagic, Version: uint32(min(version, newestKnown)), Mode: EncryptionPSK}
	c.Size, c.PSK = unsafe.Sizeof(*c), &append([]byte(psk), 0)[0]
	return c
}

// Result is ncclResult_t. Its Error text is the C name.
type Result int32

// The results, with the values of nccl.h. MissingSymbol is Chorus's own: the
// loaded library does not have the function.
const (
	MissingSymbol      Result = -1
	Success            Result = 0
	UnhandledCUDAError Result = 1
	SystemError        Result = 2
	InternalError      Result = 3
	InvalidArgument    Result = 4
	InvalidUsage       Result = 5
	RemoteError        Result = 6
	InProgress         Result = 7
	Timeout            Result = 8
)

var results = map[Result]struct{ name, meaning string }{
	MissingSymbol:      {"missing symbol", "the loaded NCCL does not have this function"},
	Success:            {"ncclSuccess", "no error"},
	UnhandledCUDAError: {"ncclUnhandledCudaError", "a CUDA call inside NCCL failed"},
	SystemError:        {"ncclSystemError", "a call of the operating system failed inside NCCL"},
	InternalError:      {"ncclInternalError", "NCCL failed inside, or its memory was overwritten"},
	InvalidArgument:    {"ncclInvalidArgument", "an argument has an invalid value"},
	InvalidUsage:       {"ncclInvalidUsage", "the call does not fit the state of the communicator or the other ranks"},
	RemoteError:        {"ncclRemoteError", "another rank, or the connection to it, failed"},
	InProgress:         {"ncclInProgress", "the operation is still in progress"},
	Timeout:            {"ncclTimeout", "the operation timed out"},
}

// Error returns the C name, such as ncclInvalidUsage.
func (r Result) Error() string {
	if e, ok := results[r]; ok {
		return e.name
	}
	return "ncclResult " + strconv.Itoa(int(r))
}

// Meaning explains the result in a sentence without a full stop.
func (r Result) Meaning() string { return results[r].meaning }
