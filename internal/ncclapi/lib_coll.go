package ncclapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

// words are the arguments of a call for each operation.
type words = [dl.DirectWords]uintptr

func (l *Lib) MemAlloc(bytes uintptr) (cudadrv.DevicePtr, Result) {
	p, r := l.Call1(FuncMemAlloc, dl.Get().Out().In(bytes))
	return cudadrv.DevicePtr(p), r
}

func (l *Lib) MemFree(p cudadrv.DevicePtr) Result {
	return l.Call(FuncMemFree, dl.Get().In(uintptr(p)))
}

func (l *Lib) RedOpCreatePreMulSum(scalar unsafe.Pointer, t DType, residence int32, c Comm) (RedOp, Result) {
	op, r := l.Call1(FuncRedOpCreatePreMulSum, dl.Get().Out().Ptr(scalar).In(uintptr(t), uintptr(residence), uintptr(c)))
	return RedOp(op), r
}

func (l *Lib) RedOpDestroy(op RedOp, c Comm) Result {
	return l.Call(FuncRedOpDestroy, dl.Get().In(uintptr(op), uintptr(c)))
}

func (l *Lib) AllReduce(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncAllReduce, words{uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(c), uintptr(s)})
}

func (l *Lib) Broadcast(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncBroadcast, words{uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(c), uintptr(s)})
}

func (l *Lib) Reduce(send, recv cudadrv.DevicePtr, count uintptr, t DType, op RedOp, root int32, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncReduce, words{uintptr(send), uintptr(recv), count, uintptr(t), uintptr(op), uintptr(root), uintptr(c), uintptr(s)})
}

func (l *Lib) AllGather(send, recv cudadrv.DevicePtr, sendCount uintptr, t DType, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncAllGather, words{uintptr(send), uintptr(recv), sendCount, uintptr(t), uintptr(c), uintptr(s)})
}

func (l *Lib) ReduceScatter(send, recv cudadrv.DevicePtr, recvCount uintptr, t DType, op RedOp, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncReduceScatter, words{uintptr(send), uintptr(recv), recvCount, uintptr(t), uintptr(op), uintptr(c), uintptr(s)})
}

func (l *Lib) AlltoAll(send, recv cudadrv.DevicePtr, count uintptr, t DType, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncAlltoAll, words{uintptr(send), uintptr(recv), count, uintptr(t), uintptr(c), uintptr(s)})
}

func (l *Lib) Gather(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncGather, words{uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(c), uintptr(s)})
}

func (l *Lib) Scatter(send, recv cudadrv.DevicePtr, count uintptr, t DType, root int32, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncScatter, words{uintptr(send), uintptr(recv), count, uintptr(t), uintptr(root), uintptr(c), uintptr(s)})
}

func (l *Lib) Send(buf cudadrv.DevicePtr, count uintptr, t DType, peer int32, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncSend, words{uintptr(buf), count, uintptr(t), uintptr(peer), uintptr(c), uintptr(s)})
}

func (l *Lib) Recv(buf cudadrv.DevicePtr, count uintptr, t DType, peer int32, c Comm, s cudadrv.Stream) Result {
	return l.Direct(FuncRecv, words{uintptr(buf), count, uintptr(t), uintptr(peer), uintptr(c), uintptr(s)})
}

func (l *Lib) GroupStart() Result { return l.Direct(FuncGroupStart, words{}) }

func (l *Lib) GroupEnd() Result { return l.Direct(FuncGroupEnd, words{}) }

func (l *Lib) GroupSimulateEnd(info *SimInfo) Result {
	return l.Call(FuncGroupSimulateEnd, dl.Get().Ptr(unsafe.Pointer(info)))
}

func (l *Lib) PutSignal(local cudadrv.DevicePtr, count uintptr, t DType, peer int32, w Window, offset uintptr, signal, ctx int32, flags uint32, c Comm, s cudadrv.Stream) Result {
	return l.Call(FuncPutSignal, dl.Get().
		In(uintptr(local), count, uintptr(t), uintptr(peer), uintptr(w), offset, uintptr(signal), uintptr(ctx), uintptr(flags), uintptr(c), uintptr(s)))
}

func (l *Lib) Signal(peer, signal, ctx int32, flags uint32, c Comm, s cudadrv.Stream) Result {
	return l.Call(FuncSignal, dl.Get().
		In(uintptr(peer), uintptr(signal), uintptr(ctx), uintptr(flags), uintptr(c), uintptr(s)))
}

func (l *Lib) WaitSignal(descs []SignalDesc, c Comm, s cudadrv.Stream) Result {
	return l.Call(FuncWaitSignal, dl.Get().
		In(uintptr(len(descs))).Ptr(unsafe.Pointer(unsafe.SliceData(descs))).In(uintptr(c), uintptr(s)))
}
