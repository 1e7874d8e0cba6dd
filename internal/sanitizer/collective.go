package sanitizer

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

func (l *nccl) Collective(c ncclapi.Call) ncclapi.Result {
	return l.submit(l.API.Collective(c), c.Called().Name(), c.Comm, c.Stream, c.Config, func(on *comm) []cudadrv.Use {
		d := &ncclapi.Collectives[c.Func]
		return moves(&c, on.extent(d.Sends, d.SendRoot, c.Root), on.extent(d.Recvs, d.RecvRoot, c.Root))
	})
}

// extent returns how many Counts of a call a rank reads or writes.
func (c *comm) extent(x ncclapi.Extent, atRoot bool, root int32) int32 {
	switch {
	case x == ncclapi.None || atRoot && c.rank != root:
		return 0
	case x == ncclapi.EachRank:
		return c.ranks
	}
	return 1
}

// moves returns the uses of a call that reads and writes so many Counts.
func moves(c *ncclapi.Call, sends, recvs int32) []cudadrv.Use {
	n := c.Count * c.Type.Size()
	return []cudadrv.Use{read(c.Send, n*uintptr(sends)), write(c.Recv, n*uintptr(recvs))}
}

func (l *nccl) PutSignal(local cudadrv.DevicePtr, n uintptr, t ncclapi.DType, peer int32, w ncclapi.Window, offset uintptr, signal, ctx int32, flags uint32, h ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	return l.submit(l.API.PutSignal(local, n, t, peer, w, offset, signal, ctx, flags, h, s), "ncclPutSignal", h, s, nil,
		func(*comm) []cudadrv.Use { return moves(&ncclapi.Call{Send: local, Count: n, Type: t}, 1, 0) })
}
