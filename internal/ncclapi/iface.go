package ncclapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
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

	CommRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr) (RegID, Result)
	CommDeregister(c Comm, h RegID) Result
	CommWindowRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr, out *Window, flags int32) Result
	CommWindowDeregister(c Comm, w Window) Result
	MemAlloc(bytes uintptr) (cudadrv.DevicePtr, Result)
	MemFree(p cudadrv.DevicePtr) Result
	RedOpCreatePreMulSum(scalar unsafe.Pointer, t DType, residence int32, c Comm) (RedOp, Result)
	RedOpDestroy(op RedOp, c Comm) Result

	AllReduce(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream) Result
	Broadcast(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream) Result
	Reduce(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, root int32, c Comm, s cudadrv.Stream) Result
	AllGather(send, recv cudadrv.DevicePtr, sendCount uintptr, t DType, c Comm, s cudadrv.Stream) Result
	ReduceScatter(send, recv cudadrv.DevicePtr, recvCount uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream) Result
	AlltoAll(send, recv cudadrv.DevicePtr, count uintptr, t DType, c Comm, s cudadrv.Stream) Result
	Gather(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream) Result
	Scatter(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream) Result
	Send(buf cudadrv.DevicePtr, count uintptr, t DType, peer int32, c Comm, s cudadrv.Stream) Result
	Recv(buf cudadrv.DevicePtr, count uintptr, t DType, peer int32, c Comm, s cudadrv.Stream) Result

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
	// The collectives with a configuration, which C reads during the call.
	AllReduceConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	BroadcastConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	ReduceConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	AllGatherConfig(send, recv cudadrv.DevicePtr, sendCount uintptr, t DType, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	ReduceScatterConfig(send, recv cudadrv.DevicePtr, recvCount uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	AlltoAllConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	GatherConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	ScatterConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result
	SetEncryption(cfg *EncryptionConfig) Result
}
