package nccl

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// kind is the kind of an NCCL operation.
type kind uint8

const (
	kindAllReduce kind = iota + 1
	kindBroadcast
	kindReduce
	kindAllGather
	kindReduceScatter
	kindAlltoAll
	kindGather
	kindScatter
	kindSend
	kindRecv
)

var kindNames = [...]string{"", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter",
	"all_to_all", "gather", "scatter", "send", "recv"}

func (k kind) rooted() bool {
	return k == kindBroadcast || k == kindReduce || k == kindGather || k == kindScatter
}

func (k kind) reduces() bool { return k == kindAllReduce || k == kindReduce || k == kindReduceScatter }

// A signature holds the parameters that must be the same on all ranks. It is sent
// in this memory layout.
type signature struct {
	Seq   uint64 // index of the operation on the communicator, from 0
	Count uint64
	Op    int32
	Root  int32 // or peer
	Kind  kind
	DType uint8
	Event bool // the rank gives an event for the completion of the launch
	_     byte
	Call  uint32 // identifies the configuration of the call; 0 is none

	Send, Recv place // of the operands that other ranks access
}

// A place is an offset in a symmetric window.
type place struct {
	Window uint64 // its number, from 1; 0 is none
	Offset uint64
}

// fits reports whether two ranks may have operands at these places. A rank whose operands do not lie in
// windows tells NCCL to use other kernels.
func (p place) fits(q place) bool { return p == q || p.Window == 0 || q.Window == 0 }

// same compares without the index: a rank that issued one more send has another
// count, but may still agree.
func (s *signature) same(o *signature) bool {
	return s.Kind == o.Kind && s.Count == o.Count && s.DType == o.DType && s.Op == o.Op && s.Root == o.Root &&
		s.Event == o.Event && s.Call == o.Call && s.Send.fits(o.Send) && s.Recv.fits(o.Recv)
}

func (s *signature) String() string {
	t := fmt.Sprintf("%s(%d x %s", kindNames[s.Kind], s.Count, dtypeName(ncclapi.DType(s.DType)))
	switch {
	case s.Kind.reduces():
		t += ", " + redopName(ncclapi.RedOp(s.Op))
	case s.Kind == kindSend:
		t += fmt.Sprintf(", to rank %d", s.Root)
	case s.Kind == kindRecv:
		t += fmt.Sprintf(", from rank %d", s.Root)
	}
	if s.Kind.rooted() {
		t += fmt.Sprintf(", root %d", s.Root)
	}
	if s.Call != 0 {
		t += fmt.Sprintf(", configuration %08x", s.Call)
	}
	for i, p := range []place{s.Send, s.Recv} {
		if p.Window != 0 {
			t += fmt.Sprintf(", %s at byte %d of window %d", []string{"source", "destination"}[i], p.Offset, p.Window)
		}
	}
	if s.Event {
		t += ", a launch-completion event"
	}
	return fmt.Sprintf("%s) as operation %d", t, s.Seq)
}

func redopName(op ncclapi.RedOp) string {
	if names := []string{"sum", "prod", "max", "min", "avg"}; op >= 0 && int(op) < len(names) {
		return names[op]
	}
	return "pre-multiplied sum"
}

// A claim is a rank's knowledge about the next operations of other ranks: the
// operation of the lowest known rank, and the operation of the lowest rank that
// differs from it.
type claim struct {
	Magic  uint32
	Differ int32 // the rank of Other, or -1
	Lowest int32
	_      int32
	First  signature
	Other  signature
}

const claimMagic = 0x43484f52

var claimSize = binary.Size(claim{})

// merge adds the knowledge of another rank. The result does not depend on the
// order of merges, so all ranks report the same two ranks.
func (a *claim) merge(b *claim) {
	if b.Lowest < a.Lowest {
		lower := *b
		b = new(*a)
		*a = lower
	}
	consider := func(rank int32, s *signature) {
		if rank >= 0 && !s.same(&a.First) && (a.Differ < 0 || rank < a.Differ) {
			a.Differ, a.Other = rank, *s
		}
	}
	consider(b.Lowest, &b.First)
	consider(b.Differ, &b.Other)
}

// agree compares the operation with the operations of all ranks in ⌈log₂ n⌉
// rounds: in round k each rank sends all it knows to the rank 2ᵏ after it. It
// returns only after all ranks have begun their operation.
func (c *comm) agree(s *signature) error {
	mine := &claim{Magic: claimMagic, Differ: -1, Lowest: int32(c.rank), First: *s}
	for hop := 1; hop < c.n; hop *= 2 {
		out, err := c.to((c.rank + hop) % c.n)
		if err != nil {
			return err
		}
		if err := out.writeClaim(mine); err != nil {
			return err
		}
		in, err := c.from((c.rank - hop + c.n) % c.n)
		if err != nil {
			return err
		}
		theirs, err := in.readClaim()
		if err != nil {
			return err
		}
		mine.merge(theirs)
	}
	if mine.Differ >= 0 {
		return c.disagree(int(mine.Lowest), &mine.First, int(mine.Differ), &mine.Other)
	}
	return nil
}

// disagree fails the communicator because of two different operations.
func (c *comm) disagree(a int, first *signature, b int, other *signature) error {
	c.fail(difference(a, first, b, other))
	return errStopped
}

// difference describes two different operations.
func difference(a int, first *signature, b int, other *signature) *failure {
	if b < a {
		a, b, first, other = b, a, other, first
	}
	return &failure{ncclapi.InvalidUsage, fmt.Sprintf("the ranks do not issue the same operations: rank %d issued %v, rank %d issued %v",
		a, first, b, other)}
}

func (k *link) writeClaim(v *claim) error {
	p, err := binary.Append(make([]byte, 0, claimSize), binary.LittleEndian, v)
	if err != nil {
		return err
	}
	return k.write(p)
}

// valid reports whether a rank in a world of n can have sent the claim.
func (v *claim) valid(n int) bool {
	return v.Magic == claimMagic && v.Lowest >= 0 && int(v.Lowest) < n && v.Differ >= -1 && int(v.Differ) < n &&
		v.First.valid(n) && v.Other.valid(n)
}

// valid reports whether a rank in a world of n can have sent the signature.
func (s *signature) valid(n int) bool {
	return int(s.Kind) < len(kindNames) && s.Op >= 0 && s.Root >= -1 && int(s.Root) < n
}

func (k *link) readClaim() (*claim, error) {
	p := make([]byte, claimSize)
	if err := k.read(p); err != nil {
		return nil, err
	}
	v := new(claim)
	if _, err := binary.Decode(p, binary.LittleEndian, v); err != nil {
		return nil, err
	}
	if !v.valid(k.c.n) {
		k.c.fail(&failure{ncclapi.InternalError, fmt.Sprintf("rank %d sent invalid data instead of an operation", k.peer)})
		<-k.c.stop
		return nil, errStopped
	}
	return v, nil
}

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
	x := l.m.Fault(i.f.Name())
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
