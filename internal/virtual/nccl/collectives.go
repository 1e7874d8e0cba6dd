package nccl

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// configured is the issue as a call of a function with a configuration.
func (i issue) configured(f ncclapi.Func, cfg *ncclapi.CollConfig) *issue {
	i.f, i.cfg = f, cfg
	return &i
}

func allReduceOf(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncAllReduce, kind: kindAllReduce, send: send, recv: recv, count: count, t: t, op: op, comm: c, stream: s, sends: 1, recvs: 1}
}

func (l *lib) AllReduce(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := allReduceOf(send, recv, count, t, op, c, s)
	return i.submit(l)
}

func (l *lib) AllReduceConfig(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return allReduceOf(send, recv, count, t, op, c, s).configured(ncclapi.FuncAllReduceConfig, cfg).submit(l)
}

func broadcastOf(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncBroadcast, kind: kindBroadcast, send: send, recv: recv, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, sendAtRoot: true}
}

func (l *lib) Broadcast(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := broadcastOf(send, recv, count, t, root, c, s)
	return i.submit(l)
}

func (l *lib) BroadcastConfig(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return broadcastOf(send, recv, count, t, root, c, s).configured(ncclapi.FuncBroadcastConfig, cfg).submit(l)
}

func reduceOf(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, root int32, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncReduce, kind: kindReduce, send: send, recv: recv, count: count, t: t, op: op, root: root, comm: c, stream: s, sends: 1, recvs: 1, recvAtRoot: true}
}

func (l *lib) Reduce(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := reduceOf(send, recv, count, t, op, root, c, s)
	return i.submit(l)
}

func (l *lib) ReduceConfig(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, root int32, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return reduceOf(send, recv, count, t, op, root, c, s).configured(ncclapi.FuncReduceConfig, cfg).submit(l)
}

func allGatherOf(send, recv cudadrv.DevicePtr, sendCount uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncAllGather, kind: kindAllGather, send: send, recv: recv, count: sendCount, t: t, comm: c, stream: s, sends: 1, recvs: 1, perRankRecv: true}
}

func (l *lib) AllGather(send, recv cudadrv.DevicePtr, sendCount uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := allGatherOf(send, recv, sendCount, t, c, s)
	return i.submit(l)
}

func (l *lib) AllGatherConfig(send, recv cudadrv.DevicePtr, sendCount uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return allGatherOf(send, recv, sendCount, t, c, s).configured(ncclapi.FuncAllGatherConfig, cfg).submit(l)
}

func reduceScatterOf(send, recv cudadrv.DevicePtr, recvCount uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncReduceScatter, kind: kindReduceScatter, send: send, recv: recv, count: recvCount, t: t, op: op, comm: c, stream: s, sends: 1, recvs: 1, perRankSend: true}
}

func (l *lib) ReduceScatter(send, recv cudadrv.DevicePtr, recvCount uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := reduceScatterOf(send, recv, recvCount, t, op, c, s)
	return i.submit(l)
}

func (l *lib) ReduceScatterConfig(send, recv cudadrv.DevicePtr, recvCount uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return reduceScatterOf(send, recv, recvCount, t, op, c, s).configured(ncclapi.FuncReduceScatterConfig, cfg).submit(l)
}

func alltoAllOf(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncAlltoAll, kind: kindAlltoAll, send: send, recv: recv, count: count, t: t, comm: c, stream: s, sends: 1, recvs: 1, perRankSend: true, perRankRecv: true}
}

func (l *lib) AlltoAll(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := alltoAllOf(send, recv, count, t, c, s)
	return i.submit(l)
}

func (l *lib) AlltoAllConfig(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return alltoAllOf(send, recv, count, t, c, s).configured(ncclapi.FuncAlltoAllConfig, cfg).submit(l)
}

func gatherOf(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncGather, kind: kindGather, send: send, recv: recv, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, perRankRecv: true, recvAtRoot: true}
}

func (l *lib) Gather(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := gatherOf(send, recv, count, t, root, c, s)
	return i.submit(l)
}

func (l *lib) GatherConfig(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return gatherOf(send, recv, count, t, root, c, s).configured(ncclapi.FuncGatherConfig, cfg).submit(l)
}

func scatterOf(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) issue {
	return issue{f: ncclapi.FuncScatter, kind: kindScatter, send: send, recv: recv, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, perRankSend: true, sendAtRoot: true}
}

func (l *lib) Scatter(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := scatterOf(send, recv, count, t, root, c, s)
	return i.submit(l)
}

func (l *lib) ScatterConfig(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig) ncclapi.Result {
	return scatterOf(send, recv, count, t, root, c, s).configured(ncclapi.FuncScatterConfig, cfg).submit(l)
}

func (l *lib) Send(buf cudadrv.DevicePtr, count uintptr, t ncclapi.DType, peer int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncSend, kind: kindSend, send: buf, count: count, t: t, root: peer, comm: c, stream: s, sends: 1}
	return i.submit(l)
}

func (l *lib) Recv(buf cudadrv.DevicePtr, count uintptr, t ncclapi.DType, peer int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncRecv, kind: kindRecv, recv: buf, count: count, t: t, root: peer, comm: c, stream: s, recvs: 1}
	return i.submit(l)
}
