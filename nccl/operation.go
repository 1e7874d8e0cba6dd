package nccl

import (
	"fmt"
	"runtime"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
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
	flight.Op
	dst  operand
	src  operand
	comm *Communicator

	config *callConfig // nil unless With has made the Issuer

	sends, recvs []int  // the elements of each rank, if they differ
	capture      uint64 // id of the capture, in a batch

	wire  ncclapi.DType // NCCL's type,
	unit  int           // the number of wire elements per element,
	redop ncclapi.RedOp // and NCCL's reduction
}

// An operand is a buffer of an operation, or empty if the rank has none.
type operand struct {
	ptr cudadrv.DevicePtr
	len int
	buf *memory.Buffer
}

func operandOf[T memory.Element](x memory.Slice[T]) operand {
	return operand{cudadrv.DevicePtr(x.Ptr()), x.Len(), x.Buffer()}
}

// issue checks an operation and enqueues it, or adds it to a batch. op is for operations
// that reduce, root for operations that have one.
func issue[T memory.Element](on Issuer, s *stream.Stream, k flight.Kind, dst, src memory.Slice[T], op Op, root int) error {
	c, b, config := communicatorOf(on)
	o := operation{
		Op: flight.Op{
			Request: flight.Request{Kind: k, DType: memory.DTypeOf[T](), Reduction: flight.Reduction(op), Root: root}, Stream: s,
		},
		comm: c, config: config, dst: operandOf(dst), src: operandOf(src),
	}
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
	d := &flight.Kinds[o.Kind]
	switch {
	case d.Src == flight.One && !d.SrcRoot:
		o.N = o.src.len
	case d.Dst == flight.One:
		o.N = o.dst.len
	default:
		o.N = o.dst.len / o.comm.size
	}
	if d.DstRoot && o.comm.rank != o.Root || d.Dst == flight.None {
		o.dst = operand{}
	} else if !o.dst.fits(o.comm.dev, o.length(d.Dst)) {
		return false
	}
	if d.SrcRoot && o.comm.rank != o.Root || d.Src == flight.None {
		o.src = operand{}
		return true
	}
	return o.src.fits(o.comm.dev, o.length(d.Src))
}

// fits reports whether the buffer has n elements, is open, and is on the device.
func (x *operand) fits(dev *device.Device, n int) bool {
	return x.len == n && (mem.OpenOn(x.buf, dev) || x.buf == nil && n == 0)
}

// errBuffers returns the error of buffers that do not fit.
func errBuffers[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	c, d := o.comm, &flight.Kinds[o.Kind]
	if d.Dst == flight.All && d.Src == flight.All && dst.Len()%c.size != 0 {
		return fmt.Errorf("nccl: %s on rank %d of %d: the destination has %d elements: want as many from each rank", o.Kind, c.rank, c.size, dst.Len())
	}
	if d.Dst != flight.None && (!d.DstRoot || c.rank == o.Root) {
		if err := checkSlice(o, "destination", dst, o.length(d.Dst)); err != nil {
			return err
		}
	}
	if d.Src != flight.None && (!d.SrcRoot || c.rank == o.Root) {
		if err := checkSlice(o, "source", src, o.length(d.Src)); err != nil {
			return err
		}
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: a buffer does not fit", o.Kind, c.rank, c.size)
}

// length returns the required length of a buffer.
func (o *operation) length(s flight.Sizing) int {
	if s == flight.All {
		return o.N * o.comm.size
	}
	return o.N
}

func checkSlice[T memory.Element](o *operation, what string, x memory.Slice[T], want int) error {
	c := o.comm
	if x.Len() != want {
		return fmt.Errorf("nccl: %s on rank %d of %d: the %s has %d elements: want %d", o.Kind, c.rank, c.size, what, x.Len(), want)
	}
	if err := mem.Check(o.Kind.String(), x.Buffer(), x.Len(), c.dev); err != nil {
		return fmt.Errorf("nccl: %w (the %s on rank %d of %d)", err, what, c.rank, c.size)
	}
	return nil
}

// validate validates everything except the buffers.
func (o *operation) validate() error {
	c, d := o.comm, &flight.Kinds[o.Kind]
	switch {
	case !c.alive():
		return c.errUnusable(o.Kind.String())
	case (o.Stream == nil || !gpu.StreamOf(o.Stream).Open()) || o.Stream.Device() != c.dev:
		return fmt.Errorf("nccl: %w", gpu.CheckStream(o.Kind.String(), o.Stream, gpu.DeviceOf(c.dev)))
	case d.Rooted && uint(o.Root) >= uint(c.size):
		return fmt.Errorf("nccl: %s on rank %d of %d: rank %d does not exist", o.Kind, c.rank, c.size, o.Root)
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
		o.Callers = new([flight.MaxFrames]uintptr)
		runtime.Callers(3, o.Callers[:])
	}
	if b != nil {
		return b.add(o)
	}
	if o.Root == c.rank && flight.Kinds[o.Kind].Peer {
		return o.errSelfTransfer()
	}
	if err := o.enqueue(); err != nil {
		return c.bestCause(err)
	}
	return nil
}

// enqueue records the operation and gives it to NCCL.
func (o *operation) enqueue() error {
	c := o.comm
	if c.sharesGPUs {
		c.awaitRoom(o.Captured)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.alive() {
		return c.errUnusable(o.Kind.String())
	}
	if err := o.record(flight.Now()); err != nil {
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
	c.rec.Accept(&o.Op)
	if o.Marked {
		c.markBehind(o)
	}
	return nil
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
	if dev := o.comm.dev; (o.Stream == nil || !gpu.StreamOf(o.Stream).Open()) || o.src.closed(dev) || o.dst.closed(dev) {
		return o.errClosed()
	}
	if gpu.AnyCapture() || o.capture != 0 {
		return o.checkCapture()
	}
	return nil
}

// closed reports whether the operand's buffer was closed.
func (x *operand) closed(dev *device.Device) bool { return x.buf != nil && !mem.OpenOn(x.buf, dev) }

// errClosed returns the error of an operation whose stream or buffer was closed.
func (o *operation) errClosed() error {
	c, name := o.comm, o.Kind.String()
	if err := gpu.CheckStream(name, o.Stream, gpu.DeviceOf(c.dev)); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	x := o.dst
	if !x.closed(c.dev) {
		x = o.src
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: a buffer of %d bytes on %s was closed within the group: %w",
		name, c.rank, c.size, x.buf.Bytes(), c.dev, device.ErrClosed)
}

// record records the operation, and compares it with the operations that other ranks of
// this process have issued. The communicator is entered.
func (o *operation) record(t int64) error {
	c := o.comm
	if c.marks.Due(t) {
		c.markBefore(o, t)
	}
	o.setSignature()
	o.In, o.Out = o.src.len, o.dst.len
	watch, leaves := c.rec.Schedule(&o.Op, t)
	if watch {
		go c.runWatch()
	}
	if leaves {
		c.markLatest(t)
	}
	if c.clique.board.Post(&o.Op) {
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
		gpu.Outside(func() { c.mark(s, flight.Mark{Record: last}) })
		_ = gpu.StreamOf(s).Release()
	}
}

// markBefore sets a mark before an operation that will be recorded next, and after the operations
// that NCCL has accepted.
func (c *Communicator) markBefore(o *operation, t int64) {
	c.marks.SetRequested(t)
	last, s, _, held := c.rec.Latest()
	before := flight.Mark{Next: c.rec.NextRecord(), Direct: true}
	o.Marked = gpu.Outside(func() {
		switch {
		case !held:
		case s == o.Stream:
			before.Record = last
		default:
			c.mark(s, flight.Mark{Record: last})
		}
		c.mark(o.Stream, before)
	})
	if held {
		_ = gpu.StreamOf(s).Release()
	}
}

// markBehind sets a mark directly behind an operation.
func (c *Communicator) markBehind(o *operation) {
	gpu.Outside(func() { c.mark(o.Stream, flight.Mark{Record: o.Record, Next: o.Record + 1}) })
}

// mark sets a mark on a stream. It ignores errors, because an error of the device occurs again in
// the operation.
func (c *Communicator) mark(s *stream.Stream, k flight.Mark) {
	k.At = c.rec.Clock()
	passed, _ := c.marks.Set(s, k)
	if passed.Direct && c.failed.Load() == nil && c.abortedBy() == nil {
		c.rec.SetStarted(passed)
	}
}

// unrecord undoes record. Operations that were recorded later on the same communicator
// must be undone first.
func (o *operation) unrecord() {
	o.comm.clique.board.Unpost(&o.Op)
	o.comm.rec.Remove(o.Record)
}
