package ncclapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

// A call that passes a struct uses a frame, which keeps the struct alive and in its place.

func (l *Lib) AllReduceConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncAllReduceConfig, dl.Get().
		In(uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) BroadcastConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncBroadcastConfig, dl.Get().
		In(uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) ReduceConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncReduceConfig, dl.Get().
		In(uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(root), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) AllGatherConfig(send, recv cudadrv.DevicePtr, sendCount uintptr, t DType, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncAllGatherConfig, dl.Get().
		In(uintptr(send), uintptr(recv), sendCount, uintptr(t), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) ReduceScatterConfig(send, recv cudadrv.DevicePtr, recvCount uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncReduceScatterConfig, dl.Get().
		In(uintptr(send), uintptr(recv), recvCount, uintptr(t), uintptr(op), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) AlltoAllConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncAlltoAllConfig, dl.Get().
		In(uintptr(send), uintptr(recv), count, uintptr(t), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) GatherConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncGatherConfig, dl.Get().
		In(uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) ScatterConfig(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream, cfg *CollConfig) Result {
	return l.Call(FuncScatterConfig, dl.Get().
		In(uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(c), uintptr(s)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) SetEncryption(cfg *EncryptionConfig) Result {
	return l.Call(FuncSetEncryption, dl.Get().Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) GetPeerDevicePointer(w Window, offset uintptr, peer int32) (cudadrv.DevicePtr, Result) {
	p, r := l.Call1(FuncGetPeerDevicePointer, dl.Get().In(uintptr(w), offset, uintptr(peer)).Out())
	return cudadrv.DevicePtr(p), r
}
