package nccl

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A window is this rank's memory of a window.
type window struct {
	number uint64 // the same on all ranks
	p      cudadrv.DevicePtr
	bytes  uintptr

	symmetric bool
}

// sinceGINOnly is the first version with WindowGINOnly.
const sinceGINOnly = 23203

// windowFlags returns the flags that the version knows; those for networks have
// no effect.
func (l *lib) windowFlags() int32 {
	known := ncclapi.WindowCollSymmetric | ncclapi.WindowStrictOrdering
	if l.cfg.Version >= sinceGINOnly {
		known |= ncclapi.WindowGINOnly
	}
	return known
}

func (l *lib) WinGetUserPtr(h ncclapi.Comm, w ncclapi.Window) (cudadrv.DevicePtr, ncclapi.Result) {
	const f = ncclapi.FuncWinGetUserPtr
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return 0, r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	win, ok := c.windows[w]
	if !ok {
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: %#x is not a window of the communicator", f.Name(), uintptr(w))
	}
	return win.p, ncclapi.Success
}

// lsaSize returns the number of ranks that access each other's memory by load and store: all
// ranks if they are on one machine, and else one.
func (c *comm) lsaSize() int {
	for _, m := range c.members {
		if m.Process != c.lib.process {
			return 1
		}
	}
	return c.n
}

func (l *lib) GetPeerDevicePointer(w ncclapi.Window, offset uintptr, peer int32) (cudadrv.DevicePtr, ncclapi.Result) {
	const f = ncclapi.FuncGetPeerDevicePointer
	c, win, r := l.openWindow(f, w, offset)
	switch {
	case r != ncclapi.Success:
		return 0, r
	case peer < 0 || int(peer) >= c.n:
		return 0, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: rank %d is not one of %d ranks", f.Name(), c.rank, peer, c.n)
	case int(peer) != c.rank && c.lsaSize() == 1:
		return 0, ncclapi.Success
	}
	return l.peerWindow(f, c, win, int(peer), offset)
}

// openWindow returns an open window and its communicator, which the calls do
// not name because ids of windows are unique.
func (l *lib) openWindow(f ncclapi.Func, w ncclapi.Window, offset uintptr) (*comm, window, ncclapi.Result) {
	if r := l.enter(f); r != ncclapi.Success {
		return nil, window{}, r
	}
	for _, c := range l.live() {
		win, ok := c.window(func(h ncclapi.Window, _ window) bool { return h == w })
		if !ok {
			continue
		}
		if offset >= win.bytes {
			return nil, win, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: byte %d: the window has %d", f.Name(), c.rank, offset, win.bytes)
		}
		return c, win, ncclapi.Success
	}
	return nil, window{}, l.refuse(ncclapi.InvalidArgument, "%s: %#x is not a window", f.Name(), uintptr(w))
}

// peerWindow returns an address in the window of a rank on the same machine.
func (l *lib) peerWindow(f ncclapi.Func, c *comm, win window, peer int, offset uintptr) (cudadrv.DevicePtr, ncclapi.Result) {
	for _, p := range l.live() {
		if p.token != c.token || p.rank != peer {
			continue
		}
		theirs, ok := p.window(func(_ ncclapi.Window, x window) bool { return x.number == win.number })
		if !ok {
			break
		}
		l.m.Lock()
		defer l.m.Unlock()
		if b, _ := l.m.Find(theirs.p); peer != c.rank && (b == nil || !b.Public()) {
			return 0, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: the window of rank %d is not memory of ncclMemAlloc, so other devices cannot access it", f.Name(), c.rank, peer)
		}
		return theirs.p + cudadrv.DevicePtr(offset), ncclapi.Success
	}
	return 0, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: rank %d has closed the window", f.Name(), c.rank, peer)
}

// live returns the communicators that were not destroyed.
func (l *lib) live() []*comm {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]*comm, 0, len(l.comms))
	for _, c := range l.comms {
		list = append(list, c)
	}
	return list
}

// window returns the window for which is returns true.
func (c *comm) window(is func(h ncclapi.Window, w window) bool) (window, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for h, w := range c.windows {
		if is(h, w) {
			return w, true
		}
	}
	return window{}, false
}

// symmetric describes an operand that other ranks access in a symmetric window: the window, and the
// operand's offset in it. c.mu is held.
func (c *comm) symmetric(p cudadrv.DevicePtr, n uint64) (at place, ok bool) {
	for _, w := range c.windows {
		if w.symmetric && n > 0 && w.contains(p, n) {
			return place{w.number, uint64(p - w.p)}, true
		}
	}
	return place{}, false
}

// setPlaces sets the places of the operands, which must be the same on all ranks, if the operation
// may use NCCL's symmetric kernels: if both operands lie in symmetric windows.
func (w *work) setPlaces() {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.windows) == 0 {
		return
	}
	send, ok := c.symmetric(w.send, w.sendBytes)
	recv, both := c.symmetric(w.recv, w.recvBytes)
	if !ok || !both {
		return
	}
	switch w.sig.Kind {
	case kindAllReduce:
		w.sig.Send, w.sig.Recv = send, recv
	case kindAllGather: // the source may be the rank's part of the destination
		w.sig.Recv = recv
	case kindReduceScatter:
		w.sig.Send = send
	}
}
