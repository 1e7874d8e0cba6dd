package nccl

import (
	"bytes"
	"cmp"
	"fmt"
	"runtime"
	"slices"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// execute gives the operation to NCCL, in relaxed capture mode while a graph is
// captured. The communicator is locked.
func (o *operation) execute() error {
	if o.Captured || gpu.AnyCapture() {
		return relaxed(o.comm.dev, o.checkedCall)
	}
	if r := o.callNCCL(); r != ncclapi.Success {
		return o.comm.check(o.Kind.String(), r)
	}
	return nil
}

// checkedCall is callNCCL with an error if it does not succeed.
func (o *operation) checkedCall() error { return o.comm.check(o.Kind.String(), o.callNCCL()) }

// functions has the function of NCCL for each kind of operation that has one.
var functions = [collective.NumKinds]ncclapi.Func{
	collective.AllReduce: ncclapi.FuncAllReduce, collective.Reduce: ncclapi.FuncReduce, collective.Broadcast: ncclapi.FuncBroadcast,
	collective.AllGather: ncclapi.FuncAllGather, collective.ReduceScatter: ncclapi.FuncReduceScatter, collective.AllToAll: ncclapi.FuncAlltoAll,
	collective.Gather: ncclapi.FuncGather, collective.Scatter: ncclapi.FuncScatter, collective.Send: ncclapi.FuncSend, collective.Recv: ncclapi.FuncRecv,
}

// callNCCL calls NCCL's function.
func (o *operation) callNCCL() ncclapi.Result {
	var c ncclapi.Call
	c.Func, c.Send, c.Recv, c.Count = functions[o.Kind], o.Src.Ptr, o.Dst.Ptr, uintptr(o.N*o.unit)
	c.Type, c.Op, c.Root, c.Comm, c.Stream = o.wire, o.redop, int32(o.Root), *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	switch o.Kind {
	case collective.AllReduce, collective.Reduce, collective.ReduceScatter:
		if o.comm.size == 1 && o.redop > ncclapi.Avg && ncclapi.OneRank.Affects(o.comm.version) {
			return o.callOneRank(c) // a single rank has no use for a configuration
		}
	case collective.Broadcast:
		if o.comm.rank != o.Root {
			c.Send = c.Recv
		}
	case collective.AllToAll, collective.Gather, collective.Scatter:
		if !o.comm.api.Has(ncclapi.FuncAlltoAll) { // nor the other two functions, which are in the same release
			return o.callGrouped()
		}
	case collective.AllGatherV, collective.ReduceScatterV, collective.AllToAllV:
		return o.callGrouped()
	}
	if o.config != nil {
		c.Config = o.config.raw
	}
	return o.comm.api.Collective(c)
}

// call returns the call of a function of NCCL with buffers of an operation.
func (o *operation) call(f ncclapi.Func, send, recv cudadrv.DevicePtr, n uintptr, root int32) ncclapi.Call {
	return ncclapi.Call{Func: f, Send: send, Recv: recv, Count: n, Type: o.wire, Op: o.redop, Root: root, Comm: *o.comm.h, Stream: gpu.StreamOf(o.Stream).Raw()}
}

// callGrouped implements an operation by several operations of NCCL. If NCCL refuses one of
// them, it drops them all.
func (o *operation) callGrouped() ncclapi.Result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	api := o.comm.api
	if r := api.GroupStart(); r != ncclapi.Success {
		return r
	}
	first := o.callParts()
	if r := api.GroupEnd(); first == ncclapi.Success {
		return r
	}
	return first
}

// callParts issues the parts of a grouped operation, rank by rank.
func (o *operation) callParts() ncclapi.Result {
	var sent, received int // elements before the part
	for rank := range o.comm.size {
		out, in := o.counts(rank)
		p := part{rank: int32(rank), from: o.at(o.Src, sent), to: o.at(o.Dst, received), out: uintptr(out * o.unit), in: uintptr(in * o.unit)}
		if r := o.callPart(&p); r != ncclapi.Success {
			return r
		}
		sent, received = sent+out, received+in
	}
	return ncclapi.Success
}

// A part is the data that a rank exchanges with one rank in a grouped operation.
type part struct {
	rank     int32
	from, to cudadrv.DevicePtr
	out, in  uintptr // the number of elements at from and to, as NCCL counts them
}

// callPart issues one part.
func (o *operation) callPart(p *part) ncclapi.Result {
	me := int(p.rank) == o.comm.rank
	switch o.Kind {
	case collective.AllGatherV: // the rank broadcasts its part
		if p.from = p.to; me {
			p.from = o.Src.Ptr
		}
		if p.in == 0 {
			return ncclapi.Success
		}
		return o.comm.api.Collective(o.call(ncclapi.FuncBroadcast, p.from, p.to, p.in, p.rank))
	case collective.ReduceScatterV: // the rank gets its part
		if p.to = 0; me {
			p.to = o.Dst.Ptr
		}
		if p.out == 0 {
			return ncclapi.Success
		}
		c := o.call(ncclapi.FuncReduce, p.from, p.to, p.out, p.rank)
		if o.comm.size == 1 && o.redop > ncclapi.Avg && ncclapi.OneRank.Affects(o.comm.version) {
			return o.callOneRank(c)
		}
		return o.comm.api.Collective(c)
	case collective.Gather:
		p.from = o.Src.Ptr
		return o.sendRecv(p, int(p.rank) == o.Root, o.comm.rank == o.Root)
	case collective.Scatter:
		p.to = o.Dst.Ptr
		return o.sendRecv(p, o.comm.rank == o.Root, int(p.rank) == o.Root)
	}
	return o.sendRecv(p, true, true)
}

// sendRecv sends a part to its rank and receives one from it. It omits empty parts: the other
// rank also knows that they are empty.
func (o *operation) sendRecv(p *part, sends, receives bool) ncclapi.Result {
	if sends && p.out > 0 {
		if r := o.comm.api.Collective(o.call(ncclapi.FuncSend, p.from, 0, p.out, p.rank)); r != ncclapi.Success {
			return r
		}
	}
	if receives && p.in > 0 {
		return o.comm.api.Collective(o.call(ncclapi.FuncRecv, 0, p.to, p.in, p.rank))
	}
	return ncclapi.Success
}

// counts returns the number of elements to send to a rank and to receive from it.
func (o *operation) counts(rank int) (out, in int) {
	if o.Sends == nil {
		return o.N, o.N
	}
	return o.Sends[rank], o.Recvs[rank]
}

// at returns the address of an element.
func (o *operation) at(x collective.Operand, element int) cudadrv.DevicePtr {
	return x.Ptr + cudadrv.DevicePtr(element*o.DType.Size())
}

// checkOverlap refuses buffers that overlap, unless the operation is in place.
func (o *operation) checkOverlap() error {
	size := cudadrv.DevicePtr(o.DType.Size())
	d, s := o.Dst.Ptr, o.Src.Ptr
	if d+cudadrv.DevicePtr(o.Dst.Len)*size <= s || s+cudadrv.DevicePtr(o.Src.Len)*size <= d {
		return nil
	}
	if k := &collective.Kinds[o.Kind]; d == s && k.Dst == collective.One && k.Src == collective.One {
		return nil
	}
	return o.checkInPlace()
}

// checkInPlace refuses buffers that overlap, unless one is the rank's part of the other.
func (o *operation) checkInPlace() error {
	if o.Dst.Len == 0 || o.Src.Len == 0 {
		return nil
	}
	part := cudadrv.DevicePtr(o.part() * o.DType.Size())
	switch k := &collective.Kinds[o.Kind]; {
	case k.Dst == collective.All && k.Src == collective.One && o.Src.Ptr == o.Dst.Ptr+part,
		k.Dst == collective.One && k.Src == collective.All && o.Dst.Ptr == o.Src.Ptr+part:
		return nil
	}
	return o.comm.errorf(o.Kind, "the destination and the source overlap: %s", inPlace(o.Kind))
}

// inPlace describes how the two buffers of an operation may overlap.
func inPlace(k collective.Kind) string {
	switch d := &collective.Kinds[k]; {
	case d.Dst == collective.One && d.Src == collective.One:
		return "want the same memory or none in common"
	case d.Dst == collective.All && d.Src == collective.One:
		return "want the source to be the rank's part of the destination, or none in common"
	case d.Dst == collective.One && d.Src == collective.All:
		return "want the destination to be the rank's part of the source, or none in common"
	}
	return "want none in common"
}

// part returns the index of the rank's part in a buffer with the parts of all ranks.
func (o *operation) part() (at int) {
	if o.Sends == nil {
		return o.comm.rank * o.N
	}
	for _, n := range o.Sends[:o.comm.rank] {
		at += n
	}
	return at
}

// An extent is the memory that an operation of a group reads or writes.
type extent struct {
	o          *operation
	begin, end cudadrv.DevicePtr
	written    bool
}

// checkOverlap refuses two operations of one rank that share memory which one of them writes,
// because NCCL executes the operations of a group concurrently, in any order. Collectives of a
// single rank are copies on their streams, so those on one stream run in order.
func (b *Batch) checkOverlap() error {
	if b.single() && !collective.Kinds[b.ops[0].Kind].Peer {
		return nil
	}
	for i := range b.ops {
		o := &b.ops[i]
		b.addExtent(o, &o.Dst, true)
		b.addExtent(o, &o.Src, false)
	}
	if x := b.extents; len(x) < 2 || len(x) == 2 && (x[0].end <= x[1].begin || x[1].end <= x[0].begin) {
		return nil // the usual exchange
	}
	slices.SortFunc(b.extents, func(a, b extent) int { return cmp.Compare(a.begin, b.begin) })
	for i, a := range b.extents {
		for _, c := range b.extents[i+1:] {
			if c.begin >= a.end {
				break
			}
			if a.o != c.o && a.o.comm == c.o.comm && (a.written || c.written) && !inOrder(a.o, c.o) && !b.toItself(a, c) {
				return b.errOverlap(a.o, c.o)
			}
		}
	}
	return nil
}

// inOrder reports whether two operations of a rank are collectives of a single rank on one stream.
func inOrder(a, b *operation) bool {
	return a.comm.size == 1 && a.Stream == b.Stream && !collective.Kinds[a.Kind].Peer && !collective.Kinds[b.Kind].Peer
}

// addExtent adds the buffer of an operand, unless it is empty.
func (b *Batch) addExtent(o *operation, x *collective.Operand, written bool) {
	if x.Len > 0 {
		b.extents = append(b.extents, extent{o, x.Ptr, x.Ptr + cudadrv.DevicePtr(x.Len*o.DType.Size()), written})
	}
}

// toItself reports whether two transfers are the send and the receive of one in-place
// transfer of a rank to itself, as in a gather made of transfers.
func (b *Batch) toItself(x, y extent) bool {
	me := x.o.comm.rank
	return x.begin == y.begin && x.end == y.end && x.o.Root == me && y.o.Root == me && x.o.Kind != y.o.Kind &&
		collective.Kinds[x.o.Kind].Peer && collective.Kinds[y.o.Kind].Peer && b.transferIndex(x.o) == b.transferIndex(y.o)
}

// transferIndex returns the number of similar transfers of the rank that
// precede o in the group, because sends and receives with the same number
// match.
func (b *Batch) transferIndex(o *operation) (n int) {
	for i := range b.ops {
		switch x := &b.ops[i]; {
		case x == o:
			return n
		case x.comm == o.comm && x.Kind == o.Kind && x.Root == o.Root:
			n++
		}
	}
	return n
}

// errOverlap returns the error of two operations that cannot run concurrently.
func (b *Batch) errOverlap(x, y *operation) error {
	return fmt.Errorf("nccl: %s and %s, on rank %d of %d: their buffers overlap, and NCCL runs them concurrently because they are in one group: issue them one after the other: %w",
		b.nameInGroup(x), b.nameInGroup(y), x.comm.rank, x.comm.size, ErrorInvalidUsage)
}

// nameInGroup describes an operation so that it differs from others in its group.
func (b *Batch) nameInGroup(o *operation) string {
	name := o.Kind.String()
	if collective.Kinds[o.Kind].Peer {
		name = fmt.Sprintf("%s with rank %d", o.Kind, o.Root)
	}
	for i := range b.ops {
		if &b.ops[i] == o && i < len(b.places) && b.places[i].String() != "" {
			name += " (" + b.places[i].String() + ")"
		}
	}
	return name
}

// batchRef is how internal/route reaches the inside of a batch.
type batchRef = handle.Ref[collective.Batch]

// batchInternals are a batch as internal/route sees it. Package collective documents the methods.
type batchInternals struct{ b *Batch }

func (x batchInternals) SetExecutor(e collective.Executor) { x.b.executor = e }

func (x batchInternals) Len() int { return len(x.b.ops) }

func (x batchInternals) At(i int) (*collective.Op, collective.Inside, int) {
	o := &x.b.ops[i]
	return &o.Op, internals{o.comm}, o.comm.rank
}

func (x batchInternals) Add(c collective.Inside, op *collective.Op) error {
	o := operation{Op: *op, comm: c.(internals).c}
	if err := o.validate(); err != nil {
		return x.b.markRefused(err)
	}
	if !o.validateBuffers() {
		return x.b.markRefused(o.comm.errorf(o.Kind, "a buffer does not fit"))
	}
	return o.enqueueOrAdd(x.b)
}

func (x batchInternals) Execute(i int) error { return x.b.ops[i].execute() }

func (x batchInternals) StartGroup() error { return x.b.startGroup() }

func (x batchInternals) EndGroup() error { return x.b.endGroup(ncclapi.API.GroupEnd) }

func (x batchInternals) Move(list []collective.Move) error { return x.b.move(list) }

func (x batchInternals) ReadPeers() { x.b.readPeers() }

// ref is how packages above nccl reach the inside of a communicator.
type ref = handle.Ref[collective.Inside]

// An internals is a communicator as packages above nccl see it.
type internals struct{ c *Communicator }

func (x internals) AddBackend(abort func()) { x.c.addBackend(abort) }

func (x internals) Services(n int) (first uint64, list []collective.Service) {
	return x.c.rec.Services(n)
}

func (x internals) Signatures(n int) (first uint64, list []uint32) { return x.c.rec.Signatures(n) }

func (x internals) LaunchedCollectives() uint64 { return x.c.rec.LaunchedCollectives() }

func (x internals) Dump(n, limit int) []byte {
	list := slices.DeleteFunc(liveMembers(), func(m *member) bool { return m.Device != x.c.rec.Device })
	poll.Within(observeTime, func() error { observe(list); return nil })
	for ; n > 0; n /= 2 {
		var b bytes.Buffer
		if err := collective.DumpShort(&b, recorders(list), n); err == nil && b.Len() <= limit {
			return b.Bytes()
		}
	}
	return nil
}

func (x internals) SetWorld(ranks []int, size int) { x.c.rec.SetWorld(ranks, size) }

func (x internals) WriteTraces() {
	x.c.observeBeforeTraces()
	x.c.writeTraces()
}

func (x internals) Identity() string { return x.c.rec.Group }

func (x internals) RecordEnd(end string, follows bool) { x.c.rec.SetEnd(end, follows) }

func (x internals) Noticed() error {
	if f := x.c.failed.Load(); f != nil {
		return f.cause()
	}
	return nil
}

func (x internals) Symmetric(k *collective.Op) bool {
	return symmetricKernel(k.Kind, k.DType, k.Reduction) && !x.c.symmetricKernelWrong(k.Kind, k.Bytes()) && !(k.Captured && ncclapi.SymmetricInGraphs.Affects(x.c.version))
}

func (x internals) Factor(op collective.Reduction) (bits, at uint64, ok bool) {
	v, ok := x.c.sums.Load(Op(op))
	if !ok {
		return 0, 0, false
	}
	f := v.(factor)
	return f.bits, f.at, true
}

func (x internals) NoWindows() error { return x.c.needs(ncclapi.FuncCommWindowRegister) }

func (x internals) Point(s *stream.Stream) collective.Point { return x.c.point(s) }

func (x internals) Completed(p collective.Point) error { return x.c.completed(p) }

func (x internals) CannotComplete(p collective.Point) error { return x.c.cannotComplete(p) }

func (x internals) ChecksNaN() bool { return x.c.nan != nil }

func (x internals) Ended() error { return x.c.endedBy() }

func (x internals) InUse(op string) error { return x.c.inUse(op) }

func (x internals) AbortFailed() bool { return x.c.abortFailure.Load() != nil }

// addBackend is documented in package ranks.
func (c *Communicator) addBackend(abort func()) {
	c.rec.SetUnordered()
	c.abortOthers.Store(&abort)
}

// abortBackends ends the operations of other backends that are in flight.
func (c *Communicator) abortBackends() {
	if abort := c.abortOthers.Load(); abort != nil {
		(*abort)()
	}
}

// move gives copies to NCCL in one group of NCCL, as package ranks documents.
// The communicators are locked.
func (b *Batch) move(list []collective.Move) error {
	runtime.LockOSThread() // a group of NCCL belongs to a thread
	defer runtime.UnlockOSThread()
	if !b.capturing() {
		return b.moveRelaxed(list)
	}
	return relaxed(b.ops[0].comm.dev, func() error { return b.moveRelaxed(list) })
}

// moveRelaxed is move in the thread's current capture mode.
func (b *Batch) moveRelaxed(list []collective.Move) error {
	c := b.ops[0].comm
	if err := c.check("ncclGroupStart", c.api.GroupStart()); err != nil {
		return err
	}
	for i := range list {
		o := &b.ops[list[i].Operation]
		if err := o.comm.check(list[i].Kind.String(), o.callMove(&list[i])); err != nil {
			c.api.GroupEnd()
			return err
		}
	}
	return c.check("ncclGroupEnd", c.api.GroupEnd())
}

// callMove calls NCCL's function for one copy.
func (o *operation) callMove(m *collective.Move) ncclapi.Result {
	c := o.call(functions[m.Kind], cudadrv.DevicePtr(m.Src), cudadrv.DevicePtr(m.Dst), uintptr(m.Bytes), int32(m.Peer))
	c.Type = ncclapi.Uint8
	return o.comm.api.Collective(c)
}
