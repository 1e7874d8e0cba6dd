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
type operation struct {
	kind   kind
	dtype  memory.DType
	op     Op
	root   int // or the peer
	n      int // the elements that the operation counts; those of all ranks where they differ
	dst    operand
	src    operand
	comm   *Communicator
	stream *stream.Stream

	sends, recvs []int   // the elements of each rank, where they differ
	captured     bool    // into a graph
	service      Service // of the communicator's Substitute
	together     bool    // with one of each other rank, and nothing else
	lent         bool    // by it, until settle
	capture      uint64  // which one, in a group

	callers *[maxFrames]uintptr // nil unless they are to be recorded

	record uint64 // once it was scheduled: which one it is in the recorder,
	number uint64 // and which collective

	wire  ncclapi.DType // what NCCL gets: the type,
	unit  int           // how many of that type are an element,
	redop ncclapi.RedOp // and the reduction
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
	o := operation{kind: k, dtype: memory.DTypeOf[T](), op: op, root: root, comm: c, stream: s}
	if err := o.begin(); err != nil {
		return err
	}
	d := &kinds[k]
	switch {
	case d.src == one && !d.srcRoot:
		o.n = src.Len()
	case d.dst == one:
		o.n = dst.Len()
	default:
		o.n = dst.Len() / c.size
	}
	if d.dst != none && (!d.dstRoot || c.rank == root) {
		if err := checkSlice(&o, "destination", dst, o.length(d.dst)); err != nil {
			return err
		}
		o.dst = operandOf(dst)
	}
	if d.src != none && (!d.srcRoot || c.rank == root) {
		if err := checkSlice(&o, "source", src, o.length(d.src)); err != nil {
			return err
		}
		o.src = operandOf(src)
	}
	return o.run()
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
	c, name := o.comm, o.kind.String()
	if err := c.usable(name); err != nil {
		return err
	}
	if !o.stream.Open() || o.stream.Device() != c.dev {
		return fmt.Errorf("nccl: %w", o.stream.Check(name, c.dev))
	}
	d := &kinds[o.kind]
	if d.rooted && (o.root < 0 || o.root >= c.size) {
		return fmt.Errorf("nccl: %s on rank %d of %d: rank %d does not exist", name, c.rank, c.size, o.root)
	}
	o.unit = 1
	if d.reduces {
		if err := o.reduction(); err != nil {
			return err
		}
	} else if o.wire = wireTypes[o.dtype].move; o.wire == ncclapi.Uint8 {
		o.unit = o.dtype.Size()
	}
	if stream.AnyCapture() {
		var err error
		if o.captured, err = o.stream.Capturing(); err != nil {
			return err
		}
	}
	return o.stream.Captured(c)
}

// checkOverlap refuses buffers that share memory in another way than in place.
func (o *operation) checkOverlap() error {
	if o.dst.len == 0 || o.src.len == 0 {
		return nil
	}
	size := cudadrv.DevicePtr(o.dtype.Size())
	d, s := o.dst.ptr, o.src.ptr
	if d+cudadrv.DevicePtr(o.dst.len)*size <= s || s+cudadrv.DevicePtr(o.src.len)*size <= d {
		return nil
	}
	part := cudadrv.DevicePtr(o.part()) * size
	switch k := &kinds[o.kind]; {
	case k.dst == one && k.src == one && d == s,
		k.dst == all && k.src == one && s == d+part,
		k.dst == one && k.src == all && d == s+part:
		return nil
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: the destination and the source overlap: %s",
		o.kind, o.comm.rank, o.comm.size, o.kind.inPlace())
}

// inPlace says how the two buffers of an operation may share memory.
func (k kind) inPlace() string {
	switch d := &kinds[k]; {
	case d.dst == one && d.src == one:
		return "want the same memory or none in common"
	case d.dst == all && d.src == one:
		return "want the source to be the rank's part of the destination, or none in common"
	case d.dst == one && d.src == all:
		return "want the destination to be the rank's part of the source, or none in common"
	}
	return "want none in common"
}

// part is where the rank's part begins in a buffer that has those of all ranks.
func (o *operation) part() (at int) {
	if o.sends == nil {
		return o.comm.rank * o.n
	}
	for _, n := range o.sends[:o.comm.rank] {
		at += n
	}
	return at
}

// run gives an operation whose buffers were checked to NCCL, now or with the group.
func (o *operation) run() error {
	if err := o.checkOverlap(); err != nil {
		return err
	}
	if err := o.checkSymmetric(); err != nil {
		return err
	}
	if o.comm.rec.frames {
		o.callers = new([maxFrames]uintptr)
		runtime.Callers(3, o.callers[:])
	}
	if g := openGroup(); g != nil {
		return g.add(o)
	}
	c := o.comm
	if kinds[o.kind].peer && o.root == c.rank {
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
	if err := c.enter(o.kind.String()); err != nil {
		return err
	}
	defer c.mu.Unlock()
	o.substituted()
	if err := o.schedule(now()); err != nil {
		return err
	}
	if err := o.give(); err != nil {
		_ = o.settle(false)          // err was first
		if final(err) && !c.over() { // it was not aborted
			c.giveUp(err)
		} else {
			o.refused()
		}
		return err
	}
	c.rec.took(o)
	return o.settle(true)
}

// still checks again what may have changed since the operation was issued.
func (o *operation) still() error {
	c, name := o.comm, o.kind.String()
	if err := o.stream.Check(name, c.dev); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	for _, x := range [...]operand{o.dst, o.src} {
		if x.buf != nil && !x.buf.OpenOn(c.dev) {
			return fmt.Errorf("nccl: %s on rank %d of %d: a buffer of %d bytes on %s was closed within the group: %w",
				name, c.rank, c.size, x.buf.Bytes(), c.dev, device.ErrClosed)
		}
	}
	switch now, err := o.stream.CaptureID(); {
	case err != nil:
		return err
	case now != o.capture:
		return fmt.Errorf("nccl: %s on rank %d of %d: a capture of %s began or ended in the group, after the operation was issued: want the whole group within it, or none: %w",
			name, c.rank, c.size, o.stream, ErrorInvalidUsage)
	}
	return nil
}

// schedule records the operation, and compares it with what other ranks of this
// process have issued. The communicator is entered.
func (o *operation) schedule(t int64) error {
	c := o.comm
	if c.marks.due(t) {
		c.mark(t)
	}
	if c.rec.schedule(o, t) {
		go c.look()
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
	held := s != nil && last > r.completed && s.Retain()
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
