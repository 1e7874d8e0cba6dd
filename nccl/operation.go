package nccl

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An operation is an operation of one rank. It is a value on the caller's stack, or in a
// Batch until the batch is enqueued.
//
// The common path of every operation has few instructions: NCCL and the driver evict them
// from the processor's caches, so each cache line of code costs as much as dozens of
// instructions. Rare cases therefore have separate functions.
type operation struct {
	collective.Op
	comm    *Communicator
	config  *callConfig // nil unless With has made the Issuer
	capture uint64      // id of the capture, in a batch

	captured *atomic.Uint64 // number of collectives of the rank that the graph has captured; nil if none captures the operation

	wire  ncclapi.DType // NCCL's type,
	unit  int           // the number of wire elements per element,
	redop ncclapi.RedOp // and NCCL's reduction
}

// issue checks an operation and enqueues it, or adds it to a batch. op is for operations
// that reduce, root for operations that have one.
func issue[T memory.Element](on Issuer, s *stream.Stream, k collective.Kind, dst, src memory.Slice[T], op Op, root int) error {
	c, b, config := communicatorOf(on)
	var o operation // a composite literal would be made elsewhere and copied
	o.Kind, o.DType, o.Reduction, o.Root, o.Stream = k, memory.DTypeOf[T](), collective.Reduction(op), root, s
	o.Dst, o.Src = collective.OperandOf(dst), collective.OperandOf(src)
	o.comm, o.config = c, config
	if err := o.validate(); err != nil {
		return b.markRefused(err)
	}
	if !o.validateBuffers() {
		return b.markRefused(errBuffers(&o, dst, src))
	}
	return o.enqueueOrAdd(b)
}

// validateBuffers computes the element count of the operation, drops the buffer that only the root
// has, and reports whether the other buffers fit.
func (o *operation) validateBuffers() bool {
	d := &collective.Kinds[o.Kind]
	switch {
	case d.Src == collective.One && !d.SrcRoot:
		o.N = o.Src.Len
	case d.Dst == collective.One:
		o.N = o.Dst.Len
	default:
		o.N = o.Dst.Len / o.comm.size
	}
	if d.DstRoot && o.comm.rank != o.Root || d.Dst == collective.None {
		o.Dst = collective.Operand{}
	} else if !o.Dst.Fits(o.comm.dev, o.length(d.Dst)) {
		return false
	}
	if d.SrcRoot && o.comm.rank != o.Root || d.Src == collective.None {
		o.Src = collective.Operand{}
		return true
	}
	return o.Src.Fits(o.comm.dev, o.length(d.Src))
}

// errBuffers returns the error of buffers that do not fit.
func errBuffers[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	c, d := o.comm, &collective.Kinds[o.Kind]
	if d.Dst == collective.All && d.Src == collective.All && dst.Len()%c.size != 0 {
		return c.errorf(o.Kind, "the destination has %d elements: want as many from each rank", dst.Len())
	}
	if d.Dst != collective.None && (!d.DstRoot || c.rank == o.Root) {
		if err := checkSlice(o, "destination", dst, o.length(d.Dst)); err != nil {
			return err
		}
	}
	if d.Src != collective.None && (!d.SrcRoot || c.rank == o.Root) {
		if err := checkSlice(o, "source", src, o.length(d.Src)); err != nil {
			return err
		}
	}
	return c.errorf(o.Kind, "a buffer does not fit")
}

// length returns the required length of a buffer.
func (o *operation) length(s collective.Sizing) int {
	if s == collective.All {
		return o.N * o.comm.size
	}
	return o.N
}

func checkSlice[T memory.Element](o *operation, what string, x memory.Slice[T], want int) error {
	c := o.comm
	if x.Len() != want {
		return c.errorf(o.Kind, "the %s has %d elements: want %d", what, x.Len(), want)
	}
	if err := inside.CheckBuffer(o.Kind.String(), x.Buffer(), x.Len(), c.dev); err != nil {
		return fmt.Errorf("nccl: %w (the %s on rank %d of %d)", err, what, c.rank, c.size)
	}
	return nil
}

// validate validates everything except the buffers.
func (o *operation) validate() error {
	c, d := o.comm, &collective.Kinds[o.Kind]
	switch {
	case !c.alive():
		return c.errUnusable(o.Kind.String())
	case (o.Stream == nil || !gpu.StreamOf(o.Stream).Open()) || o.Stream.Device() != c.dev:
		return fmt.Errorf("nccl: %w", gpu.CheckStream(o.Kind.String(), o.Stream, gpu.DeviceOf(c.dev)))
	case d.Rooted && uint(o.Root) >= uint(c.size):
		return c.errorf(o.Kind, "rank %d does not exist", o.Root)
	}
	if err := o.setWireType(d.Reduces); err != nil {
		return err
	}
	if gpu.AnyCapture() {
		if err := o.noteCapture(); err != nil {
			return err
		}
	}
	if o.config != nil {
		return o.checkConfig()
	}
	return nil
}

// enqueueOrAdd issues an operation with validated buffers to NCCL, or adds it to a batch.
func (o *operation) enqueueOrAdd(b *Batch) error {
	if err := o.checkOverlap(); err != nil {
		return b.markRefused(err)
	}
	c := o.comm
	if c.spans.Load() != nil {
		if err := o.checkSymmetric(); err != nil {
			return b.markRefused(err)
		}
	}
	if c.rec.Frames {
		o.Callers = new([collective.MaxFrames]uintptr)
		runtime.Callers(3, o.Callers[:])
	}
	if b != nil {
		return b.add(o)
	}
	if o.Root == c.rank && collective.Kinds[o.Kind].Peer {
		return o.errSelfTransfer()
	}
	c.awaitRoom(o.Captured)
	c.mu.Lock()
	err := o.enqueue()
	c.mu.Unlock()
	if err != nil {
		return c.bestCause(err)
	}
	return nil
}

// enqueue records the operation and gives it to NCCL. The communicator is locked.
func (o *operation) enqueue() error {
	c := o.comm
	if !c.alive() {
		return c.errUnusable(o.Kind.String())
	}
	if err := o.record(collective.Now()); err != nil {
		return err
	}
	if c.nan != nil {
		if err := o.checkInput(); err != nil {
			o.unrecord()
			return err
		}
	}
	if err := o.execute(); err != nil {
		return o.undo(err)
	}
	c.rec.Accept(&o.Op.Call)
	o.countCaptured()
	if o.Marked {
		c.markBehind(o)
	}
	return nil
}

// countCaptured counts an operation that NCCL has accepted, if a graph has captured it.
func (o *operation) countCaptured() {
	if o.captured != nil && !collective.Kinds[o.Kind].Peer {
		o.captured.Add(1)
	}
}

// undo undoes an operation that NCCL has refused, and returns the error.
func (o *operation) undo(err error) error {
	switch {
	case isFatal(err) && !o.comm.wasAborted():
		o.comm.failAsync(err)
	case !o.comm.alive(): // the end of the communicator has ended a call that waited in NCCL: NCCL has not refused it
	default:
		o.unrecord()
	}
	return err
}

// validateAgain validates the conditions that may have changed since the operation was
// added to its batch.
func (o *operation) validateAgain() error {
	if dev := o.comm.dev; (o.Stream == nil || !gpu.StreamOf(o.Stream).Open()) || o.Src.Closed(dev) || o.Dst.Closed(dev) {
		return o.errClosed()
	}
	if gpu.AnyCapture() || o.capture != 0 {
		return o.checkCapture()
	}
	return nil
}

// errClosed returns the error of an operation whose stream or buffer was closed.
func (o *operation) errClosed() error {
	c, name := o.comm, o.Kind.String()
	if err := gpu.CheckStream(name, o.Stream, gpu.DeviceOf(c.dev)); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	x := o.Dst
	if !x.Closed(c.dev) {
		x = o.Src
	}
	return c.errorf(name, "a buffer of %d bytes on %s was closed within the group: %w", x.Buf.Bytes(), c.dev, device.ErrClosed)
}

// record records the operation, and compares it with the operations that other ranks of
// this process have issued. The communicator is entered.
func (o *operation) record(t int64) error {
	c := o.comm
	if c.marks.Due(t) {
		c.markBefore(o, t)
	}
	o.setSignature()
	o.In, o.Out = o.Src.Len, o.Dst.Len
	watch, leaves := c.rec.Schedule(&o.Op.Call, t)
	if watch {
		go c.runWatch()
	}
	if leaves {
		c.markLatest(t)
	}
	if c.localRanks.mismatches.Post(&o.Op.Call) {
		return nil
	}
	err := c.errMismatch(o)
	c.rec.Remove(o.Record)
	return err
}

// markLatest sets a mark after the operations that NCCL has accepted.
func (c *Communicator) markLatest(t int64) {
	c.marks.SetRequested(t)
	if last, s, _, held := c.rec.Latest(); held {
		gpu.Outside(func() { c.mark(s, collective.Mark{Record: last}) })
		_ = gpu.StreamOf(s).Release()
	}
}

// markBefore sets a mark before an operation that will be recorded next, and after the operations
// that NCCL has accepted.
func (c *Communicator) markBefore(o *operation, t int64) {
	c.marks.SetRequested(t)
	last, s, _, held := c.rec.Latest()
	before := collective.Mark{Next: c.rec.NextRecord(), Direct: true}
	o.Marked = gpu.Outside(func() {
		switch {
		case !held:
		case s == o.Stream:
			before.Record = last
		default:
			c.mark(s, collective.Mark{Record: last})
		}
		c.mark(o.Stream, before)
	})
	if held {
		_ = gpu.StreamOf(s).Release()
	}
}

// markBehind sets a mark directly behind an operation.
func (c *Communicator) markBehind(o *operation) {
	gpu.Outside(func() { c.mark(o.Stream, collective.Mark{Record: o.Record, Next: o.Record + 1}) })
}

// mark sets a mark on a stream. It ignores errors, because an error of the device occurs again in
// the operation.
func (c *Communicator) mark(s *stream.Stream, k collective.Mark) {
	k.At = c.rec.Clock()
	passed, _ := c.marks.Set(s, k)
	if passed.Direct && c.failed.Load() == nil && c.abortedBy() == nil {
		c.rec.SetStarted(passed)
	}
}

// unrecord undoes record. Operations that were recorded later on the same
// communicator must be undone first.
func (o *operation) unrecord() {
	o.comm.localRanks.mismatches.Unpost(&o.Op.Call)
	o.comm.rec.Remove(o.Record)
}

// AllReduce enqueues the reduction of src over all ranks into dst on all ranks
// (ncclAllReduce). dst and src have the same length and may be the same.
// Collective.
func AllReduce[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(on, s, collective.AllReduce, dst, src, op, 0)
}

// Reduce enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce); dst is not used elsewhere and may be the zero Slice there.
// Collective.
func Reduce[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], op Op, root int) error {
	return issue(on, s, collective.Reduce, dst, src, op, root)
}

// Broadcast enqueues the copy of src on rank root into dst on all ranks
// (ncclBroadcast). src is not used elsewhere and may be the zero Slice there.
// Collective.
func Broadcast[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(on, s, collective.Broadcast, dst, src, Sum, root)
}

// AllGather enqueues the concatenation of src of all ranks, by rank, into dst
// on all ranks (ncclAllGather). dst is Size times as long as src; in place, src
// is the rank's part of dst. Collective.
func AllGather[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(on, s, collective.AllGather, dst, src, Sum, 0)
}

// ReduceScatter enqueues the reduction of src over all ranks; each rank gets its part in
// dst (ncclReduceScatter). src is Size times as long as dst; in place, dst is the rank's
// part of src. Collective.
func ReduceScatter[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(on, s, collective.ReduceScatter, dst, src, op, 0)
}

// AllToAll enqueues the exchange of parts: part j of src goes to part i of dst
// on rank j, where i is this rank (ncclAlltoAll, or sends and receives before
// NCCL 2.28). dst and src have the same length, a multiple of Size, and do not
// overlap. Collective.
func AllToAll[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(on, s, collective.AllToAll, dst, src, Sum, 0)
}

// Gather enqueues the concatenation of src of all ranks, by rank, into dst on
// rank root (ncclGather, or sends and receives before NCCL 2.28). dst is Size
// times as long as src there, and is not used elsewhere; in place, src is the
// root's part of dst. Collective.
func Gather[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(on, s, collective.Gather, dst, src, Sum, root)
}

// Scatter enqueues the distribution of the parts of src on rank root to dst on
// each rank (ncclScatter, or sends and receives before NCCL 2.28). src is Size
// times as long as dst there, and is not used elsewhere; in place, dst is the
// root's part of src. Collective.
func Scatter[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(on, s, collective.Scatter, dst, src, Sum, root)
}

// Send enqueues a send of src to rank peer, which receives the same number of elements
// (ncclSend). Sends and receives that could wait for each other must be added to one
// Batch.
func Send[T memory.Element](on Issuer, s *stream.Stream, src memory.Slice[T], peer int) error {
	return issue(on, s, collective.Send, memory.Slice[T]{}, src, Sum, peer)
}

// Recv enqueues a receive into dst from rank peer (ncclRecv).
func Recv[T memory.Element](on Issuer, s *stream.Stream, dst memory.Slice[T], peer int) error {
	return issue(on, s, collective.Recv, dst, memory.Slice[T]{}, Sum, peer)
}

// A transferEnd is one side of a transfer in a group: a send of a rank to another one, or the
// receive.
type transferEnd struct {
	o        *operation
	from, to int
	receives bool
	n        int // in elements
}

// match compares the sends of the group with its receives, if both are in the group. With
// a mismatch NCCL would hang or write past the end of a buffer.
func (b *Batch) match() error {
	for i := range b.ops {
		b.addEnds(&b.ops[i])
	}
	if len(b.transferEnds) == 0 {
		return nil
	}
	// Group the ends by pair of ranks, sends first, in the order they were issued.
	slices.SortStableFunc(b.transferEnds, func(a, b transferEnd) int {
		if c := comparePairs(a, b); c != 0 {
			return c
		}
		return cmp.Compare(side(a), side(b))
	})
	for rest := b.transferEnds; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(e transferEnd) bool { return comparePairs(e, rest[0]) != 0 })
		if n < 0 {
			n = len(rest)
		}
		if err := matchPair(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// addEnds records the ends of an operation whose other ends may be in the group. In a
// group of a single rank these are only its transfers to itself.
func (b *Batch) addEnds(o *operation) {
	me := o.comm.rank
	switch {
	case o.Kind == collective.AllToAllV:
		b.addEndsOfAll(o)
	case !collective.Kinds[o.Kind].Peer || len(b.comms) == 1 && o.Root != me:
	case o.Kind == collective.Send:
		b.transferEnds = append(b.transferEnds, transferEnd{o: o, from: me, to: o.Root, n: o.N})
	default:
		b.transferEnds = append(b.transferEnds, transferEnd{o: o, from: o.Root, to: me, n: o.N, receives: true})
	}
}

// addEndsOfAll is addEnds for an operation with a transfer to each rank.
func (b *Batch) addEndsOfAll(o *operation) {
	me := o.comm.rank
	for rank := range o.comm.size {
		if len(b.comms) > 1 || rank == me {
			b.transferEnds = append(b.transferEnds, transferEnd{o: o, from: me, to: rank, n: o.Sends[rank]},
				transferEnd{o: o, from: rank, to: me, n: o.Recvs[rank], receives: true})
		}
	}
}

// comparePairs compares the communicator, sender and receiver of two transfers.
func comparePairs(a, b transferEnd) int {
	if a.o.comm.localRanks != b.o.comm.localRanks {
		return strings.Compare(a.o.comm.localRanks.key, b.o.comm.localRanks.key)
	}
	return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
}

func side(e transferEnd) int {
	if e.receives {
		return 1
	}
	return 0
}

// matchPair compares the ends between one pair of ranks. If one side has more ends, the
// others are issued outside of the group, which a transfer of a rank to itself does not
// allow.
func matchPair(ends []transferEnd) error {
	n := slices.IndexFunc(ends, func(e transferEnd) bool { return e.receives })
	if n < 0 {
		n = len(ends)
	}
	sends, recvs := ends[:n], ends[n:]
	if len(sends) != len(recvs) {
		if e := ends[0]; e.from == e.to {
			return e.o.errSelfTransfer()
		}
		return nil
	}
	for i, s := range sends {
		r := recvs[i]
		if s.o.wire == r.o.wire && s.n*s.o.unit == r.n*r.o.unit {
			continue
		}
		return fmt.Errorf("nccl: %s on rank %d of %d: it sends %d elements of %s to rank %d, which receives %d of %s in the same group: want as many of the same type: %w",
			s.o.Kind, s.from, s.o.comm.size, s.n, s.o.DType, s.to, r.n, r.o.DType, ErrorInvalidUsage)
	}
	return nil
}

// errSelfTransfer returns the error of a transfer of a rank to itself that has only one end.
func (o *operation) errSelfTransfer() error {
	return o.comm.errorf(o.Kind, "it is its own peer: issue the send and the receive within one Group: %w", ErrorInvalidUsage)
}

// AllGatherV is AllGather of parts of different lengths: counts has the number
// of elements of each rank, which may be 0, and must be the same on all ranks.
// dst has room for all parts, by rank; in place, src is the rank's part of dst.
// It is one group of broadcasts. Collective.
func AllGatherV[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], counts []int) error {
	c, b, config := communicatorOf(on)
	o := operation{Op: collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllGatherV, DType: memory.DTypeOf[T]()}, Stream: s}, Sends: counts, Recvs: counts}, comm: c, config: config}
	return issueUneven(b, &o, dst, src)
}

// ReduceScatterV is ReduceScatter into parts of different lengths: counts has
// the number of elements for each rank, which may be 0, and must be the same on
// all ranks. src has all parts, by rank; in place, dst is the rank's part of
// src. It is one group of reductions. Collective.
func ReduceScatterV[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], counts []int, op Op) error {
	c, b, config := communicatorOf(on)
	o := operation{Op: collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.ReduceScatterV, DType: memory.DTypeOf[T](), Reduction: collective.Reduction(op)}, Stream: s}, Sends: counts, Recvs: counts}, comm: c, config: config}
	return issueUneven(b, &o, dst, src)
}

// AllToAllV is AllToAll of parts of different lengths: sends has the number of
// elements of src to send to each rank, recvs the number of elements to receive
// in dst from each rank, both by rank. Both ranks of a pair must agree on the
// number, which may be 0. dst and src must not overlap. It is one
// group of sends and receives. Collective.
func AllToAllV[T memory.Element](on Issuer, s *stream.Stream, dst memory.Slice[T], recvs []int, src memory.Slice[T], sends []int) error {
	c, b, config := communicatorOf(on)
	o := operation{Op: collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllToAllV, DType: memory.DTypeOf[T]()}, Stream: s}, Sends: sends, Recvs: recvs}, comm: c, config: config}
	return issueUneven(b, &o, dst, src)
}

// issueUneven is issue for an operation with parts of different lengths.
func issueUneven[T memory.Element](b *Batch, o *operation, dst, src memory.Slice[T]) error {
	if err := checkUneven(o, dst, src); err != nil {
		return b.markRefused(err)
	}
	return o.enqueueOrAdd(b)
}

// checkUneven validates such an operation, and computes its counts.
func checkUneven[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	if err := o.validate(); err != nil {
		return err
	}
	out, err := o.total("sends", o.Sends)
	if err != nil {
		return err
	}
	in, err := o.total("receives", o.Recvs)
	if err != nil {
		return err
	}
	o.N = max(in, out)
	switch o.Kind {
	case collective.AllGatherV:
		out = o.Sends[o.comm.rank]
	case collective.ReduceScatterV:
		in = o.Recvs[o.comm.rank]
	case collective.AllToAllV:
		if me := o.comm.rank; o.Sends[me] != o.Recvs[me] {
			return fmt.Errorf("nccl: %s on rank %d of %d: the rank sends itself %d elements and receives %d: want as many",
				o.Kind, me, o.comm.size, o.Sends[me], o.Recvs[me])
		}
	}
	if err := checkSlice(o, "destination", dst, in); err != nil {
		return err
	}
	if err := checkSlice(o, "source", src, out); err != nil {
		return err
	}
	o.Dst, o.Src = collective.OperandOf(dst), collective.OperandOf(src)
	return nil
}

// total returns the sum of the elements of all ranks.
func (o *operation) total(what string, counts []int) (sum int, err error) {
	c := o.comm
	if len(counts) != c.size {
		return 0, c.errorf(o.Kind, "%d numbers of elements: want one for each rank", len(counts))
	}
	for rank, n := range counts {
		if n < 0 || n > math.MaxInt-sum {
			return 0, c.errorf(o.Kind, "it %s %d elements at rank %d: want 0 or more, and a sum without overflow", what, n, rank)
		}
		sum += n
	}
	return sum, nil
}
