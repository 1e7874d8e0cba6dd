package nccl

import (
	"fmt"
	"math/bits"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// An issue is a call of a collective, a send or a receive.
type issue struct {
	f           ncclapi.Func
	kind        kind
	send, recv  cudadrv.DevicePtr
	count       uintptr
	sends       int // the send buffer has sends·count elements
	recvs       int // the receive buffer has recvs·count elements
	t           ncclapi.DType
	op          ncclapi.RedOp
	root        int32
	comm        ncclapi.Comm
	stream      cudadrv.Stream
	perRankSend bool // multiply sends by the number of ranks
	perRankRecv bool
	sendAtRoot  bool // the send buffer is used at the root only
	recvAtRoot  bool
	cfg         *ncclapi.CollConfig // nil unless f has a configuration
}

// sinceFloat8 is the first version with 8-bit floats.
const sinceFloat8 = 22403

// submit validates a call and issues it.
func (i *issue) submit(l *lib) ncclapi.Result {
	if !l.Has(i.f) {
		return ncclapi.MissingSymbol
	}
	x := l.m.FaultOn(l.deviceOf(i.comm), i.f.Name())
	if x.Status != 0 && !x.Async {
		return l.submit(nil, l.refuse(ncclapi.Result(x.Status), "the fault plan failed %s", i.f.Name()))
	}
	w, r := i.check(l)
	if r == ncclapi.Success {
		w.hang, w.late, w.wrong, w.slow = x.Hang, ncclapi.Result(x.Status), x.Wrong, x.Slow
	}
	return l.submit(w, r)
}

// check validates a call and makes it the work of a rank.
func (i *issue) check(l *lib) (*work, ncclapi.Result) {
	if bad := i.checkConfig(l.cfg.Version); bad != "" {
		return nil, l.refuse(ncclapi.InvalidArgument, "%s: %s", i.f.Name(), bad)
	}
	c, r := l.usable(i.f, i.comm)
	if r != ncclapi.Success {
		return nil, r
	}
	w := &work{name: i.f.Name(), c: c, send: i.send, recv: i.recv}
	w.sig = signature{Count: uint64(i.count), Op: int32(i.op), Root: i.root, Kind: i.kind, DType: uint8(i.t)}
	w.configure(i.cfg)
	bad := i.checkNumbers(l, c, w)
	if bad == "" {
		l.m.Lock()
		defer l.m.Unlock()
		if bad = i.checkStream(l, c, w); bad == "" && w.s.Device().Status() != cudadrv.Success {
			return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: %s", i.f.Name(), w.s.Device().Why())
		}
	}
	if bad == "" {
		bad = w.checkEvent()
	}
	if bad == "" {
		bad = c.checkBuffer("sendbuff", i.send, w.sendBytes, i.t)
	}
	if bad == "" {
		bad = c.checkBuffer("recvbuff", i.recv, w.recvBytes, i.t)
	}
	if bad == "" && c.n == 1 && i.kind.reduces() && (w.scaled != nil || i.op == ncclapi.Avg) && i.t >= ncclapi.Float8E4M3 {
		bad = "NCCL has no kernel that multiplies " + dtypeName(i.t) + " of a single rank"
	}
	if bad != "" {
		return nil, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: %s", i.f.Name(), c.rank, bad)
	}
	w.setPlaces()
	return w, ncclapi.Success
}

// checkNumbers returns the error in the arguments that are not addresses, or "". It stores
// the reduction and the sizes of the buffers.
func (i *issue) checkNumbers(l *lib, c *comm, w *work) string {
	if i.t.Size() == 0 || i.t >= ncclapi.Float8E4M3 && l.cfg.Version < sinceFloat8 {
		return fmt.Sprintf("%d is not a data type", i.t)
	}
	if (i.kind.rooted() || i.kind >= kindSend) && (i.root < 0 || int(i.root) >= c.n) {
		return fmt.Sprintf("rank %d is not one of %d ranks", i.root, c.n)
	}
	if i.kind.reduces() {
		var ok bool
		if w.scaled, ok = c.redop(i.op, i.t); !ok {
			return fmt.Sprintf("%d is not a reduction of this communicator for %s", i.op, dtypeName(i.t))
		}
		if w.scaled != nil {
			w.sig.Op = scaledOp
		}
	}
	if i.kind == kindAlltoAll && i.send == i.recv && i.count > 0 {
		return "the buffers must not be the same"
	}
	var over bool
	if w.sendBytes, over = i.bytes(c, i.sends, i.perRankSend, i.sendAtRoot); !over {
		w.recvBytes, over = i.bytes(c, i.recvs, i.perRankRecv, i.recvAtRoot)
	}
	if over {
		return fmt.Sprintf("%d elements are more than any memory has", i.count)
	}
	return ""
}

// checkStream returns the error in the stream, or "", and stores the stream. The machine is
// locked.
func (i *issue) checkStream(l *lib, c *comm, w *work) string {
	s, r := l.m.Stream(c.dev, i.stream)
	switch {
	case r != cudadrv.Success:
		return fmt.Sprintf("%#x is not a stream", uintptr(i.stream))
	case s.Device() != c.dev:
		return fmt.Sprintf("the stream is of device %d, the communicator of device %d", s.Device().Ordinal(), c.dev.Ordinal())
	}
	w.s = s
	return ""
}

// bytes returns the size of one of the buffers at this rank.
func (i *issue) bytes(c *comm, blocks int, perRank, atRoot bool) (n uint64, overflow bool) {
	if perRank {
		blocks *= c.n
	}
	if atRoot && int(i.root) != c.rank {
		blocks = 0
	}
	high, n := bits.Mul64(uint64(i.count), uint64(i.t.Size()))
	if high == 0 {
		high, n = bits.Mul64(n, uint64(blocks))
	}
	// Sizes beyond an int64 never fit in memory.
	return n, high != 0 || n>>62 != 0 || uint64(i.count)>>62 != 0
}

// checkBuffer returns the mistake in a buffer, or "". The machine is locked.
func (c *comm) checkBuffer(name string, p cudadrv.DevicePtr, n uint64, t ncclapi.DType) string {
	if n == 0 {
		return ""
	}
	if p == 0 {
		return name + " is null"
	}
	if uintptr(p)%t.Size() != 0 {
		return fmt.Sprintf("%s %#x is not aligned to the %d bytes of %s", name, uint64(p), t.Size(), dtypeName(t))
	}
	b, _ := c.lib.m.Find(p)
	switch {
	case b == nil || b.Device() == nil:
		return fmt.Sprintf("%s %#x is not a device address", name, uint64(p))
	case b.Freed():
		return fmt.Sprintf("%s %#x lies in %v that was freed", name, uint64(p), b)
	case b.Owner(p) != c.dev:
		return fmt.Sprintf("%s %#x lies in %v, the communicator is on device %d", name, uint64(p), b, c.dev.Ordinal())
	case n > b.Room(p):
		return fmt.Sprintf("%s %#x needs %d bytes and has %d: it lies in %v", name, uint64(p), n, b.Room(p), b)
	}
	if why := b.Barred(p, n, c.dev); why != "" {
		return fmt.Sprintf("%s %#x, %d bytes, %s", name, uint64(p), n, why)
	}
	return ""
}
