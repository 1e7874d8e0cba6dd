package nccl

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// capture records the work of a group if its streams are being captured, and reports whether
// they are. The machine is locked.
func capture(works []*work) bool {
	x := works[0].s.Capture()
	if x == nil {
		return false
	}
	for _, list := range inLaunches(works) {
		name, uses, captured := list[0].name, [2]cudadrv.DevicePtr{}, true
		if alone(list) {
			name, uses, captured = list[0].nodeOfOneRank()
		}
		if !captured {
			continue
		}
		var on []*machine.Stream
		for _, w := range list {
			on = append(on, w.s)
		}
		x.AddLaunch(name, uses, graphWork(list), on)
	}
	return true
}

// A graphWork is the work of one launch in a graph.
type graphWork []*work

func (g graphWork) Hold(delta int) {
	for _, w := range g {
		w.c.graphs += delta
	}
}

func (g graphWork) Enqueue(on []*machine.Stream) {
	works := make([]*work, len(g))
	for i, w := range g {
		fresh := *w
		fresh.s = on[i]
		works[i] = &fresh
	}
	enqueueWork(works)
}

// nodeOfOneRank returns the node that NCCL captures for a collective of one rank, and reports
// whether there is one (ncclLaunchOneRank of NCCL 2.28): a kernel if it multiplies the
// elements, and else a copy. It captures nothing for no elements, nor for a copy in place.
func (w *work) nodeOfOneRank() (name string, uses [2]cudadrv.DevicePtr, captured bool) {
	average := w.sig.Kind.reduces() && ncclapi.RedOp(w.sig.Op) == ncclapi.Avg
	switch multiplies := w.scaled != nil || average && reciprocal(w.dtype(), 1) != nil; {
	case w.sig.Count == 0 || !multiplies && w.send == w.recv:
		return "", uses, false
	case multiplies:
		return "kernel of " + w.name, uses, true
	}
	return "memcpy of " + w.name, [2]cudadrv.DevicePtr{w.recv, w.send}, true
}

// mayManage invalidates the captures that forbid the calling thread to allocate,
// free and query, like NCCL when it creates and destroys communicators.
func (l *lib) mayManage(f ncclapi.Func) ncclapi.Result {
	l.m.Lock()
	defer l.m.Unlock()
	if r := l.m.PermitsUnsafe(); r != cudadrv.Success {
		return l.refuse(ncclapi.UnhandledCUDAError, "%s: %v", f.Name(), r)
	}
	return ncclapi.Success
}

// captured reports whether a live graph has operations of the communicator. NCCL
// would wait for the end of the graph.
func (c *comm) captured() bool {
	c.lib.m.Lock()
	defer c.lib.m.Unlock()
	return c.graphs > 0
}
