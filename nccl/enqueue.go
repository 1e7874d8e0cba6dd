package nccl

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/stream"
)

// execute gives the operation to NCCL. The communicator is locked.
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

// callNCCL calls NCCL's function.
func (o *operation) callNCCL() ncclapi.Result {
	if o.config != nil {
		return o.callConfigured()
	}
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	n, root := uintptr(o.N*o.unit), int32(o.Root)
	switch o.Kind {
	case flight.AllReduce:
		if o.comm.size == 1 {
			return o.callOneRank()
		}
		return api.AllReduce(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s)
	case flight.Reduce:
		if o.comm.size == 1 {
			return o.callOneRank()
		}
		return api.Reduce(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, root, h, s)
	case flight.Broadcast:
		from := o.src.ptr
		if o.comm.rank != o.Root {
			from = o.dst.ptr
		}
		return api.Broadcast(from, o.dst.ptr, n, o.wire, root, h, s)
	case flight.AllGather:
		return api.AllGather(o.src.ptr, o.dst.ptr, n, o.wire, h, s)
	case flight.ReduceScatter:
		if o.comm.size == 1 {
			return o.callOneRank()
		}
		return api.ReduceScatter(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s)
	case flight.Send:
		return api.Send(o.src.ptr, n, o.wire, root, h, s)
	case flight.Recv:
		return api.Recv(o.dst.ptr, n, o.wire, root, h, s)
	}
	if api.Has(ncclapi.FuncAlltoAll) { // and the other two functions, which are in the same release
		switch o.Kind {
		case flight.AllToAll:
			return api.AlltoAll(o.src.ptr, o.dst.ptr, n, o.wire, h, s)
		case flight.Gather:
			return api.Gather(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s)
		case flight.Scatter:
			return api.Scatter(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s)
		}
	}
	return o.callGrouped()
}

// callOneRank calls NCCL for a reduction of a single rank.
func (o *operation) callOneRank() ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	return o.inOneRankParts(o.src.ptr, o.dst.ptr, uintptr(o.N*o.unit), func(from, to cudadrv.DevicePtr, n uintptr) ncclapi.Result {
		switch o.Kind {
		case flight.Reduce:
			return api.Reduce(from, to, n, o.wire, o.redop, 0, h, s)
		case flight.ReduceScatter:
			return api.ReduceScatter(from, to, n, o.wire, o.redop, h, s)
		}
		return api.AllReduce(from, to, n, o.wire, o.redop, h, s)
	})
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
		p := part{rank: int32(rank), from: o.at(o.src, sent), to: o.at(o.dst, received), out: uintptr(out * o.unit), in: uintptr(in * o.unit)}
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
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	me := int(p.rank) == o.comm.rank
	switch o.Kind {
	case flight.AllGatherV: // the rank broadcasts its part
		if p.from = p.to; me {
			p.from = o.src.ptr
		}
		if p.in == 0 {
			return ncclapi.Success
		}
		return api.Broadcast(p.from, p.to, p.in, o.wire, p.rank, h, s)
	case flight.ReduceScatterV: // the rank gets its part
		if p.to = 0; me {
			p.to = o.dst.ptr
		}
		if p.out == 0 {
			return ncclapi.Success
		}
		return o.inOneRankParts(p.from, p.to, p.out, func(from, to cudadrv.DevicePtr, n uintptr) ncclapi.Result {
			return api.Reduce(from, to, n, o.wire, o.redop, p.rank, h, s)
		})
	case flight.Gather:
		p.from = o.src.ptr
		return o.sendRecv(p, int(p.rank) == o.Root, o.comm.rank == o.Root)
	case flight.Scatter:
		p.to = o.dst.ptr
		return o.sendRecv(p, o.comm.rank == o.Root, int(p.rank) == o.Root)
	}
	return o.sendRecv(p, true, true)
}

// sendRecv sends a part to its rank and receives one from it. It omits empty parts: the other
// rank also knows that they are empty.
func (o *operation) sendRecv(p *part, sends, receives bool) ncclapi.Result {
	api, h, s := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw()
	if sends && p.out > 0 {
		if r := api.Send(p.from, p.out, o.wire, p.rank, h, s); r != ncclapi.Success {
			return r
		}
	}
	if receives && p.in > 0 {
		return api.Recv(p.to, p.in, o.wire, p.rank, h, s)
	}
	return ncclapi.Success
}

// counts returns the number of elements to send to a rank and to receive from it.
func (o *operation) counts(rank int) (out, in int) {
	if o.sends == nil {
		return o.N, o.N
	}
	return o.sends[rank], o.recvs[rank]
}

// at returns the address of an element.
func (o *operation) at(x operand, element int) cudadrv.DevicePtr {
	return x.ptr + cudadrv.DevicePtr(element*o.DType.Size())
}

// checkOverlap refuses buffers that overlap, unless the operation is in place.
func (o *operation) checkOverlap() error {
	size := cudadrv.DevicePtr(o.DType.Size())
	d, s := o.dst.ptr, o.src.ptr
	if d+cudadrv.DevicePtr(o.dst.len)*size <= s || s+cudadrv.DevicePtr(o.src.len)*size <= d {
		return nil
	}
	if k := &flight.Kinds[o.Kind]; d == s && k.Dst == flight.One && k.Src == flight.One {
		return nil
	}
	return o.checkInPlace()
}

// checkInPlace refuses buffers that overlap, unless one is the rank's part of the other.
func (o *operation) checkInPlace() error {
	if o.dst.len == 0 || o.src.len == 0 {
		return nil
	}
	part := cudadrv.DevicePtr(o.part() * o.DType.Size())
	switch k := &flight.Kinds[o.Kind]; {
	case k.Dst == flight.All && k.Src == flight.One && o.src.ptr == o.dst.ptr+part,
		k.Dst == flight.One && k.Src == flight.All && o.dst.ptr == o.src.ptr+part:
		return nil
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: the destination and the source overlap: %s",
		o.Kind, o.comm.rank, o.comm.size, inPlace(o.Kind))
}

// inPlace describes how the two buffers of an operation may overlap.
func inPlace(k flight.Kind) string {
	switch d := &flight.Kinds[k]; {
	case d.Dst == flight.One && d.Src == flight.One:
		return "want the same memory or none in common"
	case d.Dst == flight.All && d.Src == flight.One:
		return "want the source to be the rank's part of the destination, or none in common"
	case d.Dst == flight.One && d.Src == flight.All:
		return "want the destination to be the rank's part of the source, or none in common"
	}
	return "want none in common"
}

// part returns the index of the rank's part in a buffer with the parts of all ranks.
func (o *operation) part() (at int) {
	if o.sends == nil {
		return o.comm.rank * o.N
	}
	for _, n := range o.sends[:o.comm.rank] {
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
func (g *group) checkOverlap() error {
	if g.single() && !flight.Kinds[g.ops[0].Kind].Peer {
		return nil
	}
	for i := range g.ops {
		o := &g.ops[i]
		g.addExtent(o, &o.dst, true)
		g.addExtent(o, &o.src, false)
	}
	if x := g.extents; len(x) < 2 || len(x) == 2 && (x[0].end <= x[1].begin || x[1].end <= x[0].begin) {
		return nil // the usual exchange
	}
	slices.SortFunc(g.extents, func(a, b extent) int { return cmp.Compare(a.begin, b.begin) })
	for i, a := range g.extents {
		for _, b := range g.extents[i+1:] {
			if b.begin >= a.end {
				break
			}
			if a.o != b.o && a.o.comm == b.o.comm && (a.written || b.written) && !inOrder(a.o, b.o) && !g.toItself(a, b) {
				return g.errOverlap(a.o, b.o)
			}
		}
	}
	return nil
}

// inOrder reports whether two operations of a rank are collectives of a single rank on one stream.
func inOrder(a, b *operation) bool {
	return a.comm.size == 1 && a.Stream == b.Stream && !flight.Kinds[a.Kind].Peer && !flight.Kinds[b.Kind].Peer
}

// addExtent adds the buffer of an operand, unless it is empty.
func (g *group) addExtent(o *operation, x *operand, written bool) {
	if x.len > 0 {
		g.extents = append(g.extents, extent{o, x.ptr, x.ptr + cudadrv.DevicePtr(x.len*o.DType.Size()), written})
	}
}

// toItself reports whether two transfers are the send and the receive of one in-place
// transfer of a rank to itself, as in a gather made of transfers.
func (g *group) toItself(a, b extent) bool {
	me := a.o.comm.rank
	return a.begin == b.begin && a.end == b.end && a.o.Root == me && b.o.Root == me && a.o.Kind != b.o.Kind &&
		flight.Kinds[a.o.Kind].Peer && flight.Kinds[b.o.Kind].Peer && g.transferIndex(a.o) == g.transferIndex(b.o)
}

// transferIndex returns the number of similar transfers of the rank that precede o in the group.
// Sends and receives with the same number match.
func (g *group) transferIndex(o *operation) (n int) {
	for i := range g.ops {
		switch x := &g.ops[i]; {
		case x == o:
			return n
		case x.comm == o.comm && x.Kind == o.Kind && x.Root == o.Root:
			n++
		}
	}
	return n
}

// errOverlap returns the error of two operations that cannot run concurrently.
func (g *group) errOverlap(a, b *operation) error {
	return fmt.Errorf("nccl: %s and %s, on rank %d of %d: their buffers overlap, and NCCL runs them concurrently because they are in one group: issue them one after the other: %w",
		g.nameInGroup(a), g.nameInGroup(b), a.comm.rank, a.comm.size, ErrorInvalidUsage)
}

// nameInGroup describes an operation so that it differs from others in its group.
func (g *group) nameInGroup(o *operation) string {
	name := o.Kind.String()
	if flight.Kinds[o.Kind].Peer {
		name = fmt.Sprintf("%s with rank %d", o.Kind, o.Root)
	}
	for i := range g.ops {
		if &g.ops[i] == o && i < len(g.places) && g.places[i].String() != "" {
			name += " (" + g.places[i].String() + ")"
		}
	}
	return name
}

// batchRef is how internal/route reaches the steps of a batch.
type batchRef = inside.Ref[ranks.Batch]

// steps are the steps of Enqueue as internal/route sees them. Package ranks documents them.
type steps struct{ b *Batch }

func (x steps) Prepare() error {
	if x.b.refused != nil {
		return x.b.refused
	}
	return x.b.group.prepare()
}

func (x steps) Len() int { return len(x.b.group.ops) }

func (x steps) At(i int) ranks.Operation {
	o := &x.b.group.ops[i]
	return ranks.Operation{Op: &o.Op, Comm: internals{o.comm}, Rank: o.comm.rank, Dst: uint64(o.dst.ptr), Src: uint64(o.src.ptr), Counts: o.sends}
}

func (x steps) Record() error { return x.b.group.record() }

func (x steps) Execute(i int) error { return x.b.group.ops[i].execute() }

func (x steps) StartGroup() error { return x.b.group.startGroup() }

func (x steps) EndGroup() error { return x.b.group.endGroup(ncclapi.API.GroupEnd) }

func (x steps) Move(list []ranks.Move) error { return x.b.group.move(list) }

func (x steps) Substitute(i int, dst, src uint64) {
	o := &x.b.group.ops[i]
	o.dst.ptr, o.src.ptr = cudadrv.DevicePtr(dst), cudadrv.DevicePtr(src)
}

func (x steps) ReadPeers() { x.b.group.readPeers() }

func (x steps) Finish(errs []error) error { return x.b.group.finish(errs) }

func (x steps) Unlock() { x.b.group.unlock() }

func (x steps) Cause(err error) error { return x.b.group.ops[0].comm.bestCause(err) }

// ref is how packages above nccl reach the inside of a communicator.
type ref = inside.Ref[ranks.Inside]

// An internals is a communicator as packages above nccl see it.
type internals struct{ c *Communicator }

func (x internals) AddBackend(abort func()) { x.c.addBackend(abort) }

func (x internals) Services(n int) (first uint64, list []ranks.Service) { return x.c.rec.Services(n) }

func (x internals) Signatures(n int) (first uint64, list []uint32) { return x.c.rec.Signatures(n) }

func (x internals) Dump(n, limit int) []byte {
	list := slices.DeleteFunc(liveMembers(), func(m *member) bool { return m.Device != x.c.rec.Device })
	poll.Within(observeTime, func() error { observe(list); return nil })
	for ; n > 0; n /= 2 {
		var b bytes.Buffer
		if err := flight.DumpShort(&b, recorders(list), n); err == nil && b.Len() <= limit {
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

func (x internals) RecordEnd(end string, follows bool) { x.c.rec.SetEnd(end, follows) }

func (x internals) Noticed() error {
	if f := x.c.failed.Load(); f != nil {
		return f.cause()
	}
	return nil
}

func (x internals) Symmetric(k *ranks.Collective) bool {
	return symmetricKernel(k.Kind, k.DType, k.Op) && !x.c.symmetricKernelWrong(k.Kind, k.Bytes()) && !(k.Captured && x.c.symmetricKernelStale())
}

func (x internals) Factor(op flight.Reduction) (bits, at uint64, ok bool) {
	v, ok := x.c.sums.Load(Op(op))
	if !ok {
		return 0, 0, false
	}
	f := v.(factor)
	return f.bits, f.at, true
}

func (x internals) NoWindows() error { return x.c.needs(ncclapi.FuncCommWindowRegister) }

func (x internals) Point(s *stream.Stream) ranks.Point { return x.c.point(s) }

func (x internals) Completed(p ranks.Point) error { return x.c.completed(p) }

func (x internals) CannotComplete(p ranks.Point) error { return x.c.cannotComplete(p) }

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

// mostInFlight is about the maximum number of operations in flight of a communicator whose
// processes share GPUs. After a failure each kernel of NCCL notices the abort by itself, and
// processes take turns on a GPU, so an abort takes tens of milliseconds for each operation.
const mostInFlight = 64

// awaitRoom waits while many operations of the communicator are in flight, as a launch on a
// full stream does. The wait ends if the communicator fails or is closed, and the caller then
// refuses the operation. A rank that has others in its process does not wait, because
// the same goroutine may issue their operations next. Captures do not wait: progress cannot
// be observed during a capture. The communicator is not entered, so that it can be aborted.
func (c *Communicator) awaitRoom(captured bool) {
	if captured || c.rec.InFlight() < mostInFlight || len(c.others()) > 0 {
		return
	}
	_ = gpu.DeviceOf(c.dev).Until(context.Background(), "nccl: room for an operation", func() (bool, error) {
		if !c.alive() {
			return true, nil
		}
		_, blind, err := c.watch.Observe() // an error of the device occurs again in the operation
		return blind || c.rec.InFlight() < mostInFlight, err
	})
}

// awaitRoom is Communicator.awaitRoom for all operations of the group.
func (g *group) awaitRoom() {
	for i := range g.ops {
		g.ops[i].comm.awaitRoom(g.ops[i].Captured)
	}
}
