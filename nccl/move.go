package nccl

import (
	"runtime"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/ranks"
)

// move gives copies to NCCL in one group of NCCL. Package ranks documents it. The communicators
// are locked.
func (g *group) move(list []ranks.Move) error {
	runtime.LockOSThread() // a group of NCCL belongs to a thread
	defer runtime.UnlockOSThread()
	if !g.capturing() {
		return g.moveRelaxed(list)
	}
	return relaxed(g.ops[0].comm.dev, func() error { return g.moveRelaxed(list) })
}

// moveRelaxed is move in the thread's current capture mode.
func (g *group) moveRelaxed(list []ranks.Move) error {
	c := g.ops[0].comm
	if err := c.check("ncclGroupStart", c.api.GroupStart()); err != nil {
		return err
	}
	for i := range list {
		o := &g.ops[list[i].Operation]
		if err := o.comm.check(list[i].Kind.String(), o.callMove(&list[i])); err != nil {
			c.api.GroupEnd()
			return err
		}
	}
	return c.check("ncclGroupEnd", c.api.GroupEnd())
}

// callMove calls NCCL's function for one copy.
func (o *operation) callMove(m *ranks.Move) ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	dst, src, n := cudadrv.DevicePtr(m.Dst), cudadrv.DevicePtr(m.Src), uintptr(m.Bytes)
	switch m.Kind {
	case flight.Send:
		return api.Send(src, n, ncclapi.Uint8, int32(m.Peer), h, s)
	case flight.Recv:
		return api.Recv(dst, n, ncclapi.Uint8, int32(m.Peer), h, s)
	}
	return api.AllGather(src, dst, n, ncclapi.Uint8, h, s)
}
