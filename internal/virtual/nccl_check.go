package virtual

import (
	"fmt"
	"math/bits"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// An issue is one call of a collective, a send or a receive.
type issue struct {
	f           ncclapi.Func
	kind        kind
	send, recv  cudadrv.DevicePtr
	count       uintptr
	sends       int // the size of the send buffer is sends·count elements
	recvs       int // that of the receive buffer likewise
	t           ncclapi.DType
	op          ncclapi.RedOp
	root        int32
	comm        ncclapi.Comm
	stream      cudadrv.Stream
	perRankSend bool // multiply sends by the number of ranks
	perRankRecv bool
	sendAtRoot  bool // the buffer is used at the root only
	recvAtRoot  bool
}

// sinceFloat8 is the first version that has 8-bit floats.
const sinceFloat8 = 22403

// submit checks a call and issues it.
func (i *issue) submit(l *ncclLib) ncclapi.Result {
	if !l.Has(i.f) {
		return ncclapi.MissingSymbol
	}
	x := l.m.faults.next(i.f.Name())
	if x.status != 0 && !x.async {
		return l.submit(nil, l.refuse(ncclapi.Result(x.status), "the fault plan failed %s", i.f.Name()))
	}
	w, r := i.check(l)
	if r == ncclapi.Success {
		w.hang, w.late = x.hang, ncclapi.Result(x.status)
	}
	return l.submit(w, r)
}

func (i *issue) check(l *ncclLib) (*work, ncclapi.Result) {
	c, r := l.usable(i.f, i.comm)
	if r != ncclapi.Success {
		return nil, r
	}
	invalid := func(format string, args ...any) (*work, ncclapi.Result) {
		return nil, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: %s", i.f.Name(), c.rank, fmt.Sprintf(format, args...))
	}
	w := &work{name: i.f.Name(), c: c, send: i.send, recv: i.recv}
	w.sig = signature{Count: uint64(i.count), Op: int32(i.op), Root: i.root, Kind: i.kind, DType: uint8(i.t)}
	if i.t.Size() == 0 || i.t >= ncclapi.Float8E4M3 && l.m.cfg.NCCL < sinceFloat8 {
		return invalid("%d is no data type", i.t)
	}
	if (i.kind.rooted() || i.kind >= kindSend) && (i.root < 0 || int(i.root) >= c.n) {
		return invalid("rank %d is not one of %d ranks", i.root, c.n)
	}
	if i.kind.reduces() {
		var ok bool
		if w.scaled, ok = c.redop(i.op, i.t); !ok {
			return invalid("%d is no reduction of this communicator for %s", i.op, dtypeName(i.t))
		}
		if w.scaled != nil {
			w.sig.Op = scaledOp
		}
	}
	if i.kind == kindAlltoAll && i.send == i.recv && i.count > 0 {
		return invalid("the buffers must not be the same")
	}
	var over bool
	if w.sendBytes, over = i.bytes(c, i.sends, i.perRankSend, i.sendAtRoot); !over {
		w.recvBytes, over = i.bytes(c, i.recvs, i.perRankRecv, i.recvAtRoot)
	}
	if over {
		return invalid("%d elements are more than any memory has", i.count)
	}
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	s, res := l.m.stream(c.dev, i.stream)
	switch {
	case res != cudadrv.Success:
		return invalid("%#x is no stream", uintptr(i.stream))
	case s.dev != c.dev:
		return invalid("the stream is of device %d, the communicator of device %d", s.dev.ordinal, c.dev.ordinal)
	case s.dev.status != cudadrv.Success:
		return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: %s", i.f.Name(), s.dev.why)
	}
	w.s = s
	if bad := c.checkBuffer("sendbuff", i.send, w.sendBytes, i.t); bad != "" {
		return invalid("%s", bad)
	}
	if bad := c.checkBuffer("recvbuff", i.recv, w.recvBytes, i.t); bad != "" {
		return invalid("%s", bad)
	}
	return w, ncclapi.Success
}

// bytes is the size of one of the buffers at this rank.
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
	// What does not fit into an int64 fits nowhere.
	return n, high != 0 || n>>62 != 0 || uint64(i.count)>>62 != 0
}

// checkBuffer says what is wrong with a buffer, or "". m.mu is held.
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
	b, _ := c.dev.m.find(p)
	switch {
	case b == nil || b.dev == nil:
		return fmt.Sprintf("%s %#x is no device address", name, uint64(p))
	case b.freeing:
		return fmt.Sprintf("%s %#x lies in %v that was freed", name, uint64(p), b)
	case b.owner(p) != c.dev:
		return fmt.Sprintf("%s %#x lies in %v, the communicator is on device %d", name, uint64(p), b, c.dev.ordinal)
	case n > b.size-(uint64(p)-b.addr):
		return fmt.Sprintf("%s %#x needs %d bytes and has %d: it lies in %v", name, uint64(p), n, b.size-(uint64(p)-b.addr), b)
	case b.space != nil:
		if why := b.space.barred(uint64(p)-b.addr, n, c.dev, true); why != "" {
			return fmt.Sprintf("%s %#x, %d bytes, %s", name, uint64(p), n, why)
		}
	}
	return ""
}

func (l *ncclLib) AllReduce(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncAllReduce, kind: kindAllReduce, send: send, recv: recv, count: count, t: t, op: op, comm: c, stream: s, sends: 1, recvs: 1}
	return i.submit(l)
}

func (l *ncclLib) Broadcast(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncBroadcast, kind: kindBroadcast, send: send, recv: recv, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, sendAtRoot: true}
	return i.submit(l)
}

func (l *ncclLib) Bcast(buf cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncBcast, kind: kindBroadcast, send: buf, recv: buf, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, sendAtRoot: true}
	return i.submit(l)
}

func (l *ncclLib) Reduce(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, op ncclapi.RedOp, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncReduce, kind: kindReduce, send: send, recv: recv, count: count, t: t, op: op, root: root, comm: c, stream: s, sends: 1, recvs: 1, recvAtRoot: true}
	return i.submit(l)
}

func (l *ncclLib) AllGather(send, recv cudadrv.DevicePtr, sendCount uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncAllGather, kind: kindAllGather, send: send, recv: recv, count: sendCount, t: t, comm: c, stream: s, sends: 1, recvs: 1, perRankRecv: true}
	return i.submit(l)
}

func (l *ncclLib) ReduceScatter(send, recv cudadrv.DevicePtr, recvCount uintptr, t ncclapi.DType, op ncclapi.RedOp, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncReduceScatter, kind: kindReduceScatter, send: send, recv: recv, count: recvCount, t: t, op: op, comm: c, stream: s, sends: 1, recvs: 1, perRankSend: true}
	return i.submit(l)
}

func (l *ncclLib) AlltoAll(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncAlltoAll, kind: kindAlltoAll, send: send, recv: recv, count: count, t: t, comm: c, stream: s, sends: 1, recvs: 1, perRankSend: true, perRankRecv: true}
	return i.submit(l)
}

func (l *ncclLib) Gather(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncGather, kind: kindGather, send: send, recv: recv, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, perRankRecv: true, recvAtRoot: true}
	return i.submit(l)
}

func (l *ncclLib) Scatter(send, recv cudadrv.DevicePtr, count uintptr, t ncclapi.DType, root int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncScatter, kind: kindScatter, send: send, recv: recv, count: count, t: t, root: root, comm: c, stream: s, sends: 1, recvs: 1, perRankSend: true, sendAtRoot: true}
	return i.submit(l)
}

func (l *ncclLib) Send(buf cudadrv.DevicePtr, count uintptr, t ncclapi.DType, peer int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncSend, kind: kindSend, send: buf, count: count, t: t, root: peer, comm: c, stream: s, sends: 1}
	return i.submit(l)
}

func (l *ncclLib) Recv(buf cudadrv.DevicePtr, count uintptr, t ncclapi.DType, peer int32, c ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	i := issue{f: ncclapi.FuncRecv, kind: kindRecv, recv: buf, count: count, t: t, root: peer, comm: c, stream: s, recvs: 1}
	return i.submit(l)
}
