package nccl

import (
	"fmt"
	"runtime"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An operation is one that a rank issues. It is a value on the caller's stack, or
// in the list of a group until that ends.
//
// What every operation does is kept in few instructions: NCCL and the driver leave none of
// them in the processor's caches, so that each 64 bytes of code cost as much as dozens of
// instructions do. What is rare has functions of its own.
type operation struct {
	request
	dst    operand
	src    operand
	comm   *Communicator
	stream *stream.Stream

	sends, recvs []int  // the elements of each rank, where they differ
	together     bool   // with one of each other rank, and nothing else
	lent         bool   // by the communicator's Substitute, until settle
	capture      uint64 // which one, in a group

	record uint64 // once it was scheduled: which one it is in the recorder,
	number uint64 // and which collective

	wire  ncclapi.DType // what NCCL gets: the type,
	unit  int           // how many of that type are an element,
	redop ncclapi.RedOp // and the reduction
}

// A request is what was asked for, as the recorder keeps it.
type request struct {
	kind      kind
	dtype     memory.DType
	service   Service // of the communicator's Substitute
	captured  bool    // into a graph
	op        Op
	signature uint32              // once it was scheduled
	root      int                 // or the peer
	n         int                 // the elements that the operation counts; those of all ranks where they differ
	callers   *[maxFrames]uintptr // nil unless they are to be recorded
}

// An operand is a buffer of an operation, or nothing where the rank has none.
type operand struct {
	ptr cudadrv.DevicePtr
	len int
	buf *memory.Buffer
}

func operandOf[T memory.Element](x memory.Slice[T]) operand {
	return operand{x.Raw(), x.Len(), x.Buffer()}
}

// issue checks an operation and enqueues it, or adds it to the group that the
// goroutine has open. op is for those that reduce, root for those that have one.
func issue[T memory.Element](c *Communicator, s *stream.Stream, k kind, dst, src memory.Slice[T], op Op, root int) error {
	o := operation{
		request: request{kind: k, dtype: memory.DTypeOf[T](), op: op, root: root},
		comm:    c, stream: s, dst: operandOf(dst), src: operandOf(src),
	}
	if err := o.begin(); err != nil {
		return spoil(err)
	}
	if !o.fits() {
		return spoil(unfit(&o, dst, src))
	}
	return o.run()
}

// fits finds out how many elements the operation counts, leaves out the buffer that only
// the root has, and reports whether the others fit.
func (o *operation) fits() bool {
	d := &kinds[o.kind]
	switch {
	case d.src == one && !d.srcRoot:
		o.n = o.src.len
	case d.dst == one:
		o.n = o.dst.len
	default:
		o.n = o.dst.len / o.comm.size
	}
	if d.dstRoot && o.comm.rank != o.root || d.dst == none {
		o.dst = operand{}
	} else if !o.dst.fits(o.comm.dev, o.length(d.dst)) {
		return false
	}
	if d.srcRoot && o.comm.rank != o.root || d.src == none {
		o.src = operand{}
		return true
	}
	return o.src.fits(o.comm.dev, o.length(d.src))
}

// fits reports whether the buffer has so many elements, and is open and of the device.
func (x *operand) fits(dev *device.Device, n int) bool {
	return x.len == n && (x.buf != nil && x.buf.OpenOn(dev) || x.buf == nil && n == 0)
}

// unfit says why the buffers do not fit.
func unfit[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	c, d := o.comm, &kinds[o.kind]
	if d.dst == all && d.src == all && dst.Len()%c.size != 0 {
		return fmt.Errorf("nccl: %s on rank %d of %d: the destination has %d elements: want as many from each rank", o.kind, c.rank, c.size, dst.Len())
	}
	if d.dst != none && (!d.dstRoot || c.rank == o.root) {
		if err := checkSlice(o, "destination", dst, o.length(d.dst)); err != nil {
			return err
		}
	}
	if d.src != none && (!d.srcRoot || c.rank == o.root) {
		if err := checkSlice(o, "source", src, o.length(d.src)); err != nil {
			return err
		}
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: a buffer does not fit", o.kind, c.rank, c.size)
}

// length is how many elements a buffer must have.
func (o *operation) length(s sizing) int {
	if s == all {
		return o.n * o.comm.size
	}
	return o.n
}

func checkSlice[T memory.Element](o *operation, what string, x memory.Slice[T], want int) error {
	c := o.comm
	if x.Len() != want {
		return fmt.Errorf("nccl: %s on rank %d of %d: the %s has %d elements: want %d", o.kind, c.rank, c.size, what, x.Len(), want)
	}
	if err := x.Check(o.kind.String(), c.dev); err != nil {
		return fmt.Errorf("nccl: %w (the %s on rank %d of %d)", err, what, c.rank, c.size)
	}
	return nil
}

// begin checks all but the buffers.
func (o *operation) begin() error {
	c, d := o.comm, &kinds[o.kind]
	switch {
	case !c.alive():
		return c.unusable(o.kind.String())
	case !o.stream.Open() || o.stream.Device() != c.dev:
		return fmt.Errorf("nccl: %w", o.stream.Check(o.kind.String(), c.dev))
	case d.rooted && uint(o.root) >= uint(c.size):
		return fmt.Errorf("nccl: %s on rank %d of %d: rank %d does not exist", o.kind, c.rank, c.size, o.root)
	}
	if err := o.translate(d.reduces); err != nil {
		return err
	}
	if stream.AnyCapture() {
		return o.note()
	}
	return nil
}

// run gives an operation whose buffers were checked to NCCL, now or with the group.
func (o *operation) run() error {
	if err := o.checkOverlap(); err != nil {
		return spoil(err)
	}
	c := o.comm
	if c.spans.Load() != nil {
		if err := o.checkSymmetric(); err != nil {
			return spoil(err)
		}
	}
	if c.rec.frames {
		o.callers = new([maxFrames]uintptr)
		runtime.Callers(3, o.callers[:])
	}
	if g := openGroup(); g != nil {
		return g.add(o)
	}
	if o.root == c.rank && kinds[o.kind].peer {
		return o.alone()
	}
	if err := o.carryOut(); err != nil {
		return c.known(err)
	}
	return nil
}

// carryOut enters the communicator for the operation.
func (o *operation) carryOut() error {
	c := o.comm
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.alive() {
		return c.unusable(o.kind.String())
	}
	if c.substitute.Load() != nil {
		o.substituted()
	}
	if err := o.schedule(now()); err != nil {
		return err
	}
	if err := o.give(); err != nil {
		return o.takeBack(err)
	}
	c.rec.took(o)
	if o.lent {
		return o.settle(true)
	}
	return nil
}

// takeBack undoes what was done for an operation that NCCL has not taken, and returns why.
func (o *operation) takeBack(err error) error {
	_ = o.settle(false)               // err was first
	if final(err) && !o.comm.over() { // it was not aborted
		o.comm.giveUp(err)
	} else {
		o.refused()
	}
	return err
}

// still checks again what may have changed since the operation was issued.
func (o *operation) still() error {
	if dev := o.comm.dev; !o.stream.Open() || o.src.closed(dev) || o.dst.closed(dev) {
		return o.noMore()
	}
	if stream.AnyCapture() || o.capture != 0 {
		return o.stillCaptured()
	}
	return nil
}

// closed reports whether the buffer of an operand is no longer there.
func (x *operand) closed(dev *device.Device) bool { return x.buf != nil && !x.buf.OpenOn(dev) }

// noMore is the error of an operation whose stream or buffer was closed.
func (o *operation) noMore() error {
	c, name := o.comm, o.kind.String()
	if err := o.stream.Check(name, c.dev); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	x := o.dst
	if !x.closed(c.dev) {
		x = o.src
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: a buffer of %d bytes on %s was closed within the group: %w",
		name, c.rank, c.size, x.buf.Bytes(), c.dev, device.ErrClosed)
}

// schedule records the operation, and compares it with what other ranks of this
// process have issued. The communicator is entered.
func (o *operation) schedule(t int64) error {
	c := o.comm
	if c.marks.due(t) {
		c.mark(t)
	}
	o.sign()
	watch, leaves := c.rec.schedule(o, t)
	if watch {
		go c.look()
	}
	if leaves {
		c.mark(t)
	}
	if c.clique.post(o) {
		return nil
	}
	err := c.mismatch(o)
	c.rec.refuse(o.record)
	return err
}

// mark sets a mark behind what NCCL has taken. An error will come again with the
// operation, if it is one of the device.
func (c *Communicator) mark(t int64) {
	c.marks.last.Store(t)
	r := c.rec
	r.mu.Lock()
	last, s := r.waiting, r.stream
	held := s != nil && last > r.settled && s.Retain()
	r.mu.Unlock()
	if held {
		stream.Outside(func() { _ = c.marks.set(s, last, r.clock()) })
		_ = s.Release()
	}
}

// refused takes back what schedule did. What was scheduled later on the same
// communicator must be taken back before.
func (o *operation) refused() {
	o.comm.clique.unpost(o)
	o.comm.rec.refuse(o.record)
}
