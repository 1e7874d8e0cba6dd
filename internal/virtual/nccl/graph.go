package nccl

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// capture records the work of a group if its streams are being captured. done is
// false if no stream is being captured and there is no error. As in NCCL, all
// streams of a group must be in the same capture or in none. The machine is locked.
func (l *lib) capture(works []*work) (done bool, r ncclapi.Result) {
	x := works[0].s.Capture()
	for _, w := range works {
		switch {
		case w.s.Capture() != x:
			return true, l.refuse(ncclapi.InvalidUsage,
				"%s: all streams of a group must be captured into the same graph, or none", w.name)
		case w.s.Invalidated():
			return true, l.refuse(ncclapi.UnhandledCUDAError, "%s: the capture of %v was invalidated", w.name, w.s)
		}
	}
	if r := l.linkUp(works); r != ncclapi.Success {
		return true, r
	}
	if x == nil {
		return false, ncclapi.Success
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
	return true, ncclapi.Success
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

// linkUp simulates the connection setup of NCCL before the first collective and
// the first transfer of a communicator. NCCL then allocates and maps memory. The
// calling thread's capture mode, or a global capture on any thread, may forbid
// that. The machine is locked.
func (l *lib) linkUp(works []*work) ncclapi.Result {
	for _, w := range works {
		linked := &w.c.linked[0]
		if w.transfer() {
			linked = &w.c.linked[1]
		}
		if *linked || w.c.n == 1 {
			continue
		}
		if r := l.m.PermitsUnsafe(); r != cudadrv.Success {
			return l.refuse(ncclapi.InternalError, "%s: failed to connect with the other ranks: %v", w.name, r)
		}
		l.m.InvalidateGlobalCaptures()
		*linked = true
	}
	return ncclapi.Success
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
