package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/sanitizer"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A signalKey identifies the signals of a rank.
type signalKey struct{ from, index, ctx int32 }

// signals are the signals that a rank has received with one key.
type signals struct {
	expected int               // by the waits that are enqueued
	came     int               // in all
	stamps   []sanitizer.Stamp // of the last signals: no wait has passed them
	seen     sanitizer.Clock   // of the signals before
}

// signalsOf returns the signals with a key, which it creates if there are none.
// The machine is locked.
func (c *comm) signalsOf(k signalKey) *signals {
	if c.signals[k] == nil {
		c.signals[k] = &signals{}
	}
	return c.signals[k]
}

// A remote is a call of a one-sided operation.
type remote struct {
	f          ncclapi.Func
	peer       int32
	index, ctx int32
	flags      uint32
	stream     cudadrv.Stream
}

// check returns the communicator and the stream of a call, and whether the stream hangs before it.
func (x *remote) check(l *lib, h ncclapi.Comm) (c *comm, s *machine.Stream, hang bool, r ncclapi.Result) {
	if !l.Has(x.f) {
		return nil, nil, false, ncclapi.MissingSymbol
	}
	planned := l.m.Fault(x.f.Name())
	if planned.Status != 0 {
		return nil, nil, false, l.refuse(ncclapi.Result(planned.Status), "the fault plan failed %s", x.f.Name())
	}
	if c, r = l.usable(x.f, h); r == ncclapi.Success {
		r = x.checkNumbers(c)
	}
	if r == ncclapi.Success {
		s, r = x.checkStream(c)
	}
	return c, s, planned.Hang, r
}

// checkNumbers checks a call except its stream. As in NCCL, it fails before the
// first registration of a window, which prepares the operations.
func (x *remote) checkNumbers(c *comm) ncclapi.Result {
	l, at := c.lib, fmt.Sprintf("%s at rank %d", x.f.Name(), c.rank)
	c.mu.Lock()
	windows := c.opened
	c.mu.Unlock()
	switch {
	case x.peer < 0 || int(x.peer) >= c.n:
		return l.refuse(ncclapi.InvalidArgument, "%s: rank %d is not one of %d ranks", at, x.peer, c.n)
	case x.index != 0 || x.ctx != 0 || x.flags != 0:
		return l.refuse(ncclapi.InvalidArgument, "%s: signal %d, context %d, flags %d: want 0", at, x.index, x.ctx, x.flags)
	case c.lsaSize() < c.n:
		return l.refuse(ncclapi.InvalidArgument, "%s: virtual devices do not support one-sided operations between processes", at)
	case windows == 0:
		return l.refuse(ncclapi.InvalidUsage, "%s: the communicator has no window yet", at)
	case l.groups.open() != nil:
		return l.refuse(ncclapi.InvalidUsage, "%s: virtual devices do not support one-sided operations in groups", at)
	}
	return ncclapi.Success
}

// checkStream returns the stream of a call.
func (x *remote) checkStream(c *comm) (*machine.Stream, ncclapi.Result) {
	l := c.lib
	l.m.Lock()
	defer l.m.Unlock()
	s, r := l.m.Stream(c.dev, x.stream)
	switch {
	case r != cudadrv.Success || s.Device() != c.dev:
		return nil, l.refuse(ncclapi.InvalidArgument, "%s: %#x is not a stream of device %d", x.f.Name(), uintptr(x.stream), c.dev.Ordinal())
	case s.Capturing():
		return nil, l.refuse(ncclapi.InvalidUsage, "%s: virtual devices do not capture one-sided operations", x.f.Name())
	case c.dev.Status() != cudadrv.Success:
		return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: %s", x.f.Name(), c.dev.Why())
	}
	return s, ncclapi.Success
}

// enqueueRemote enqueues an operation, which counts as running until it has
// completed. The machine is locked.
func (c *comm) enqueueRemote(s *machine.Stream, name string, hang bool, run func(o *machine.Op)) {
	s.AwaitRoom()
	c.mu.Lock()
	c.running++
	c.mu.Unlock()
	s.EnqueueAlways(name, func(o *machine.Op) {
		defer func() {
			c.mu.Lock()
			c.running--
			c.idle.Broadcast()
			c.mu.Unlock()
		}()
		m := o.Machine()
		m.Lock()
		lost := c.dev.Status() != cudadrv.Success
		m.Unlock()
		if hang {
			machine.Forever(c.stop)
		}
		if !lost && !isClosed(c.stop) {
			run(o)
		}
	})
}

func (l *lib) PutSignal(local cudadrv.DevicePtr, count uintptr, t ncclapi.DType, peer int32, w ncclapi.Window, offset uintptr, signal, ctx int32, flags uint32, h ncclapi.Comm, stream cudadrv.Stream) ncclapi.Result {
	x := &remote{ncclapi.FuncPutSignal, peer, signal, ctx, flags, stream}
	c, s, hang, r := x.check(l, h)
	if r != ncclapi.Success {
		return r
	}
	n := uint64(count) * uint64(t.Size())
	mine, ok := c.window(func(h ncclapi.Window, _ window) bool { return h == w })
	switch {
	case !ok:
		return l.refuse(ncclapi.InvalidArgument, "%s: %#x is not a window of the communicator", x.f.Name(), uintptr(w))
	case t.Size() == 0 || count > mine.bytes || uint64(offset)+n > uint64(mine.bytes):
		return l.refuse(ncclapi.InvalidArgument, "%s at rank %d: %d elements of type %d at byte %d: the window has %d bytes", x.f.Name(), c.rank, count, t, offset, mine.bytes)
	}
	if _, ok := c.window(func(_ ncclapi.Window, w window) bool { return w.contains(local, n) }); !ok {
		return l.refuse(ncclapi.InvalidArgument, "%s at rank %d: the source at %#x does not lie in a window", x.f.Name(), c.rank, uint64(local))
	}
	l.m.Lock()
	defer l.m.Unlock()
	c.enqueueRemote(s, x.f.Name(), hang, func(o *machine.Op) {
		if c.put(o, x, mine, local, offset, n) {
			c.signal(o, x)
		}
	})
	return ncclapi.Success
}

// contains reports whether n bytes at p lie in the window.
func (w window) contains(p cudadrv.DevicePtr, n uint64) bool {
	return p >= w.p && uint64(p-w.p)+n <= uint64(w.bytes)
}

// put copies into the window of another rank, and reports whether it could.
func (c *comm) put(o *machine.Op, x *remote, mine window, local cudadrv.DevicePtr, offset uintptr, n uint64) bool {
	to, r := c.lib.peerWindow(x.f, c, mine, int(x.peer), offset)
	if r != ncclapi.Success {
		c.fail(&failure{ncclapi.RemoteError, c.lib.GetLastError(0)})
		return false
	}
	m := o.Machine()
	m.Lock()
	src, t := o.Touch(local, n, false)
	var dst []byte
	if t == nil {
		dst, t = o.Touch(to, n, true)
	}
	m.Unlock()
	if t != nil {
		o.Fail(t)
		c.failDevice(t.Text)
		return false
	}
	copy(dst, src)
	return true
}

// signal delivers a signal to another rank, so that what the stream did before
// precedes what follows the rank's wait.
func (c *comm) signal(o *machine.Op, x *remote) {
	for _, p := range c.lib.live() {
		if p.token == c.token && p.rank == int(x.peer) {
			m := o.Machine()
			m.Lock()
			defer m.Unlock()
			k := p.signalsOf(signalKey{int32(c.rank), x.index, x.ctx})
			k.came++
			k.stamps = append(k.stamps, o.Now())
			close(p.signalled)
			p.signalled = make(chan struct{})
			return
		}
	}
	c.fail(&failure{ncclapi.RemoteError, fmt.Sprintf("%s of rank %d: rank %d has left", x.f.Name(), c.rank, x.peer)})
}

func (l *lib) Signal(peer, signal, ctx int32, flags uint32, h ncclapi.Comm, stream cudadrv.Stream) ncclapi.Result {
	x := &remote{ncclapi.FuncSignal, peer, signal, ctx, flags, stream}
	c, s, hang, r := x.check(l, h)
	if r != ncclapi.Success {
		return r
	}
	l.m.Lock()
	defer l.m.Unlock()
	c.enqueueRemote(s, x.f.Name(), hang, func(o *machine.Op) { c.signal(o, x) })
	return ncclapi.Success
}

// WaitSignal blocks the stream until the signals have come that this call and the calls
// before it expect.
func (l *lib) WaitSignal(descs []ncclapi.SignalDesc, h ncclapi.Comm, stream cudadrv.Stream) ncclapi.Result {
	if len(descs) == 0 && l.Has(ncclapi.FuncWaitSignal) {
		return l.refuse(ncclapi.InvalidArgument, "ncclWaitSignal: no signals")
	}
	for _, d := range descs {
		x := &remote{ncclapi.FuncWaitSignal, d.Peer, d.Signal, d.Ctx, 0, stream}
		c, s, hang, r := x.check(l, h)
		if r != ncclapi.Success {
			return r
		}
		if d.Ops < 1 {
			return l.refuse(ncclapi.InvalidArgument, "%s at rank %d: %d signals", x.f.Name(), c.rank, d.Ops)
		}
		c.waitSignal(s, x, hang, int(d.Ops))
	}
	return ncclapi.Success
}

// waitSignal enqueues the wait for n more signals.
func (c *comm) waitSignal(s *machine.Stream, x *remote, hang bool, n int) {
	c.lib.m.Lock()
	defer c.lib.m.Unlock()
	k := c.signalsOf(signalKey{x.peer, x.index, x.ctx})
	k.expected += n
	until := k.expected
	c.enqueueRemote(s, x.f.Name(), hang, func(o *machine.Op) {
		m := o.Machine()
		m.Lock()
		defer m.Unlock()
		for k.came < until {
			next := c.signalled
			m.Unlock()
			select {
			case <-next:
			case <-c.stop:
			}
			m.Lock()
			if isClosed(c.stop) {
				return
			}
		}
		o.AfterAll(k.passed(until))
	})
}

// passed returns the joined clock of the first signals, as many as until says.
// The machine is locked.
func (k *signals) passed(until int) sanitizer.Clock {
	for k.came-len(k.stamps) < until {
		k.seen = k.seen.JoinStamp(k.stamps[0])
		k.stamps = k.stamps[1:]
	}
	return k.seen
}
