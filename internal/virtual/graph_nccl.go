package virtual

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// capture records the work of a group if its streams are being captured; done
// is false when none is and nothing is refused. As in NCCL, all of a group is of one
// capture or none. m.mu is held.
func (l *ncclLib) capture(works []*work) (done bool, r ncclapi.Result) {
	x := works[0].s.capture
	for _, w := range works {
		switch {
		case w.s.capture != x:
			return true, l.refuse(ncclapi.InvalidUsage,
				"%s: the streams of a group are captured into one graph, or none is captured", w.name)
		case x != nil && x.invalid:
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
		n := &node{name: list[0].name, works: list}
		var on []*stream
		for _, w := range list {
			n.lanes = append(n.lanes, x.lane(w.s))
			on = append(on, w.s)
		}
		x.add(n, on...)
	}
	return true, ncclapi.Success
}

// linkUp does what NCCL does before the first collective and the first transfer of a
// communicator: it allocates and maps memory, which the mode of a capture may forbid to
// the calling thread, and that of a global capture to the threads that NCCL starts for it.
// m.mu is held.
func (l *ncclLib) linkUp(works []*work) ncclapi.Result {
	for _, w := range works {
		linked := &w.c.linked[0]
		if w.transfer() {
			linked = &w.c.linked[1]
		}
		if *linked || w.c.n == 1 {
			continue
		}
		if r := l.m.permitsUnsafe(); r != cudadrv.Success {
			return l.refuse(ncclapi.InternalError, "%s: failed to connect with the other ranks: %v", w.name, r)
		}
		for _, x := range l.m.captures {
			x.invalid = x.invalid || x.mode == cudadrv.CaptureGlobal
		}
		*linked = true
	}
	return ncclapi.Success
}

// mayManage spoils the captures that forbid the calling thread to allocate, free and ask,
// as NCCL does when it makes and ends communicators.
func (l *ncclLib) mayManage(f ncclapi.Func) ncclapi.Result {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	if r := l.m.permitsUnsafe(); r != cudadrv.Success {
		return l.refuse(ncclapi.UnhandledCUDAError, "%s: %v", f.Name(), r)
	}
	return ncclapi.Success
}

// captured reports whether a live graph has operations of the communicator:
// NCCL would wait for the graph's end in its own.
func (c *comm) captured() bool {
	c.lib.m.mu.Lock()
	defer c.lib.m.mu.Unlock()
	return c.graphs > 0
}
