package sanitizer

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

type (
	ptr    = cudadrv.DevicePtr
	stream = cudadrv.Stream
	dtype  = ncclapi.DType
	redOp  = ncclapi.RedOp
	handle = ncclapi.Comm
	status = ncclapi.Result
)

// moves returns the uses of a call that reads sends times, and writes recvs times, count
// elements.
func moves(send, recv ptr, count uintptr, t dtype, sends, recvs int32) []cudadrv.Use {
	n := count * t.Size()
	return []cudadrv.Use{read(send, n*uintptr(sends)), write(recv, n*uintptr(recvs))}
}

// only returns 1 if the rank is the root, and otherwise 0.
func (c *comm) only(root int32) int32 {
	if c.rank == root {
		return 1
	}
	return 0
}

func (l *nccl) AllReduce(send, recv ptr, n uintptr, t dtype, op redOp, h handle, s stream) status {
	return l.submit(l.API.AllReduce(send, recv, n, t, op, h, s), "ncclAllReduce", h, s,
		func(*comm) []cudadrv.Use { return moves(send, recv, n, t, 1, 1) })
}

func (l *nccl) Broadcast(send, recv ptr, n uintptr, t dtype, root int32, h handle, s stream) status {
	return l.submit(l.API.Broadcast(send, recv, n, t, root, h, s), "ncclBroadcast", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.only(root), 1) })
}

func (l *nccl) Reduce(send, recv ptr, n uintptr, t dtype, op redOp, root int32, h handle, s stream) status {
	return l.submit(l.API.Reduce(send, recv, n, t, op, root, h, s), "ncclReduce", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, 1, c.only(root)) })
}

func (l *nccl) AllGather(send, recv ptr, n uintptr, t dtype, h handle, s stream) status {
	return l.submit(l.API.AllGather(send, recv, n, t, h, s), "ncclAllGather", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, 1, c.ranks) })
}

func (l *nccl) ReduceScatter(send, recv ptr, n uintptr, t dtype, op redOp, h handle, s stream) status {
	return l.submit(l.API.ReduceScatter(send, recv, n, t, op, h, s), "ncclReduceScatter", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.ranks, 1) })
}

func (l *nccl) AlltoAll(send, recv ptr, n uintptr, t dtype, h handle, s stream) status {
	return l.submit(l.API.AlltoAll(send, recv, n, t, h, s), "ncclAlltoAll", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.ranks, c.ranks) })
}

func (l *nccl) Gather(send, recv ptr, n uintptr, t dtype, root int32, h handle, s stream) status {
	return l.submit(l.API.Gather(send, recv, n, t, root, h, s), "ncclGather", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, 1, c.ranks*c.only(root)) })
}

func (l *nccl) Scatter(send, recv ptr, n uintptr, t dtype, root int32, h handle, s stream) status {
	return l.submit(l.API.Scatter(send, recv, n, t, root, h, s), "ncclScatter", h, s,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.ranks*c.only(root), 1) })
}

func (l *nccl) Send(buf ptr, n uintptr, t dtype, peer int32, h handle, s stream) status {
	return l.submit(l.API.Send(buf, n, t, peer, h, s), "ncclSend", h, s,
		func(*comm) []cudadrv.Use { return moves(buf, 0, n, t, 1, 0) })
}

func (l *nccl) Recv(buf ptr, n uintptr, t dtype, peer int32, h handle, s stream) status {
	return l.submit(l.API.Recv(buf, n, t, peer, h, s), "ncclRecv", h, s,
		func(*comm) []cudadrv.Use { return moves(0, buf, n, t, 0, 1) })
}

func (l *nccl) PutSignal(local ptr, n uintptr, t dtype, peer int32, w ncclapi.Window, offset uintptr, signal, ctx int32, flags uint32, h handle, s stream) status {
	return l.submit(l.API.PutSignal(local, n, t, peer, w, offset, signal, ctx, flags, h, s), "ncclPutSignal", h, s,
		func(*comm) []cudadrv.Use { return moves(local, 0, n, t, 1, 0) })
}

type callConfig = ncclapi.CollConfig

func (l *nccl) AllReduceConfig(send, recv ptr, n uintptr, t dtype, op redOp, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.AllReduceConfig(send, recv, n, t, op, h, s, cfg), "ncclAllReduceConfig", h, s, cfg,
		func(*comm) []cudadrv.Use { return moves(send, recv, n, t, 1, 1) })
}

func (l *nccl) BroadcastConfig(send, recv ptr, n uintptr, t dtype, root int32, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.BroadcastConfig(send, recv, n, t, root, h, s, cfg), "ncclBroadcastConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.only(root), 1) })
}

func (l *nccl) ReduceConfig(send, recv ptr, n uintptr, t dtype, op redOp, root int32, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.ReduceConfig(send, recv, n, t, op, root, h, s, cfg), "ncclReduceConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, 1, c.only(root)) })
}

func (l *nccl) AllGatherConfig(send, recv ptr, n uintptr, t dtype, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.AllGatherConfig(send, recv, n, t, h, s, cfg), "ncclAllGatherConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, 1, c.ranks) })
}

func (l *nccl) ReduceScatterConfig(send, recv ptr, n uintptr, t dtype, op redOp, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.ReduceScatterConfig(send, recv, n, t, op, h, s, cfg), "ncclReduceScatterConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.ranks, 1) })
}

func (l *nccl) AlltoAllConfig(send, recv ptr, n uintptr, t dtype, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.AlltoAllConfig(send, recv, n, t, h, s, cfg), "ncclAlltoAllConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.ranks, c.ranks) })
}

func (l *nccl) GatherConfig(send, recv ptr, n uintptr, t dtype, root int32, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.GatherConfig(send, recv, n, t, root, h, s, cfg), "ncclGatherConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, 1, c.ranks*c.only(root)) })
}

func (l *nccl) ScatterConfig(send, recv ptr, n uintptr, t dtype, root int32, h handle, s stream, cfg *callConfig) status {
	return l.submitConfig(l.API.ScatterConfig(send, recv, n, t, root, h, s, cfg), "ncclScatterConfig", h, s, cfg,
		func(c *comm) []cudadrv.Use { return moves(send, recv, n, t, c.ranks*c.only(root), 1) })
}
