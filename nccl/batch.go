package nccl

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/sanitizer"
)

// An Issuer accepts the operations of one rank. A *Communicator enqueues each operation at
// once; the result of Batch.On adds it to a Batch. With gives the operations of an Issuer a
// configuration.
type Issuer interface{ issuer() }

func (*Communicator) issuer() {}
func (*batched) issuer()      {}
func (*configured) issuer()   {}

// communicatorOf returns the rank, and the batch that its operations belong to and their
// configuration, or nil.
func communicatorOf(on Issuer) (*Communicator, *Batch, *callConfig) {
	switch x := on.(type) { // faster than a method call
	case *Communicator:
		return x, nil, nil
	case *batched:
		return x.comm, x.batch, nil
	case *configured:
		return x.comm, x.batch, &x.config
	}
	return nil, nil, nil
}

// A Batch collects operations that start together (ncclGroupStart, ncclGroupEnd), so that
// several ranks of one process, or sends and receives, cannot wait for each other. The
// operations may belong to several communicators.
//
//	b := nccl.NewBatch()
//	for i, c := range comms {
//		err = errors.Join(err, nccl.AllReduce(b.On(c), streams[i], xs[i], xs[i], nccl.Sum))
//	}
//	err = errors.Join(err, b.Enqueue())
//
// Group does the same in one call. A loop that reuses one Batch allocates nothing. One
// goroutine uses a Batch at a time.
//
// Each operation is checked when it is added. An operation that is refused makes the whole
// batch fail, even if the caller ignores its error: the other ranks would wait for the
// operation.
//
// The operations of a batch run concurrently and in any order. A buffer that one operation writes must
// therefore not overlap with a buffer of another operation on the same rank. Enqueue
// refuses such a batch. Sends and receives
// between two ranks of one batch are matched in the order they were added. Enqueue refuses
// the batch if their lengths or types differ.
type Batch struct {
	batchRef
	ops          []operation
	counts       []int               // the sends and recvs of the operations
	comms        []*Communicator     // of the operations, without duplicates, in lock order
	errs         []error             // of the operations, if an operation fails or launchers enqueue them
	transferEnds []transferEnd       // of the transfers between its ranks
	extents      []extent            // of its operations, by address
	places       []sanitizer.Place   // of the calls that added the operations; none on CUDA
	configured   bool                // an operation has a configuration
	timeout      time.Duration       // of its operations; 0 means the communicator's
	executor     collective.Executor // of internal/route; nil if NCCL executes everything
	refused      error               // the first operation that was refused
	ended        bool                // Group has returned, or the batch is not in use
	members      []*batched
	last         *batched // the latest result of On
}

// A batched adds the operations of a communicator to a batch.
type batched struct {
	comm  *Communicator // nil: unused
	batch *Batch
}

// NewBatch returns an empty Batch.
func NewBatch() *Batch {
	b := &Batch{}
	b.batchRef = handle.NewRef[collective.Batch](batchInternals{b})
	return b
}

// On returns the Issuer that adds operations of c to b, and that stays valid
// after Enqueue.
func (b *Batch) On(c *Communicator) Issuer {
	if b == nil {
		return nil
	}
	if m := b.last; m == nil || m.comm != c {
		b.last = b.member(c)
	}
	return b.last
}

// member returns the Issuer of a communicator and creates it if necessary.
func (b *Batch) member(c *Communicator) *batched {
	for _, m := range b.members {
		if m.comm == c {
			return m
		}
	}
	for _, m := range b.members {
		if m.comm == nil {
			m.comm = c
			return m
		}
	}
	b.members = slices.DeleteFunc(b.members, func(m *batched) bool { return m.comm.isClosed() })
	m := &batched{comm: c, batch: b}
	b.members = append(b.members, m)
	return m
}

// add appends a validated operation.
func (b *Batch) add(o *operation) error {
	if b.ended {
		return o.comm.errorf(o.Kind, "the function of the batch has returned: use NewBatch: %w", ErrorInvalidUsage)
	}
	return b.markRefused(b.append(o))
}

// append is add for a batch that is in use.
func (b *Batch) append(o *operation) (err error) {
	if gpu.AnyCapture() {
		if o.capture, err = gpu.StreamOf(o.Stream).CaptureID(); err != nil {
			return err
		}
	}
	if o.comm.places {
		if n := len(b.ops); n == len(b.places) {
			b.places = append(b.places, sanitizer.Place{})
		}
		b.places[len(b.ops)].Mark()
	}
	b.ops = append(b.ops, *o)
	b.configured = b.configured || o.config != nil
	if o.Sends == nil {
		return nil
	}
	// The caller may change its counts before the group is enqueued.
	at := &b.ops[len(b.ops)-1]
	at.Sends, at.Recvs = b.copyCounts(o.Sends), b.copyCounts(o.Recvs)
	return nil
}

// markRefused records that an operation was refused, so that the batch fails,
// and returns err. b may be nil.
func (b *Batch) markRefused(err error) error {
	if b != nil && b.refused == nil {
		b.refused = err
	}
	return err
}

// Enqueue enqueues all operations, or none, and empties the batch. It enqueues none if an
// operation was refused when it was added, if one of the communicators has failed or was
// closed since then, or if a buffer or a stream was closed.
//
// If the batch has one operation for each of several ranks of one communicator, waiting
// threads may enqueue the operations concurrently (CHORUS_LAUNCH_PATIENCE). If NCCL then
// refuses the operation of one rank only, the communicators of the other ranks fail. If NCCL itself
// fails in the batch, all its communicators fail.
//
// A graph must capture a whole batch: the capture must begin before the first operation is
// added, end after Enqueue, and include the streams of all operations. Otherwise Enqueue
// refuses the batch.
func (b *Batch) Enqueue() error {
	if b == nil {
		return fmt.Errorf("nccl: enqueue: no batch given: %w", ErrorInvalidArgument)
	}
	defer b.Reset()
	if b.refused != nil {
		return b.refused
	}
	return b.enqueue()
}

// SetTimeout sets the timeout of the operations in the batch, until Enqueue or Reset. 0 means
// the timeout of the communicator (Config.Timeout, Communicator.SetTimeout); a negative value
// means none.
func (b *Batch) SetTimeout(d time.Duration) {
	if b != nil {
		b.timeout = d
	}
}

// Reset removes the operations and the timeout.
func (b *Batch) Reset() {
	clear(b.ops)
	clear(b.comms)
	if len(b.transferEnds) > 0 {
		clear(b.transferEnds)
	}
	if len(b.errs) > 0 {
		clear(b.errs)
	}
	b.ops, b.counts, b.comms, b.transferEnds, b.errs = b.ops[:0], b.counts[:0], b.comms[:0], b.transferEnds[:0], b.errs[:0]
	b.extents, b.timeout, b.configured, b.refused = b.extents[:0], 0, false, nil
}

// Group runs fn and enqueues the operations that fn has added to the batch
// (ncclGroupStart, ncclGroupEnd):
//
//	err := nccl.Group(func(b *nccl.Batch) error {
//		if err := nccl.Send(b.On(c), s, x, next); err != nil {
//			return err
//		}
//		return nccl.Recv(b.On(c), s, y, previous)
//	})
//
// It does not enqueue an operation if fn returns an error or panics, or for the reasons of
// Batch.Enqueue. The batch ends with fn: do not retain it.
func Group(fn func(b *Batch) error) error {
	return inBatch("ncclGroupStart", fn, func(b *Batch) error { return b.enqueue() })
}

// batches is a pool of the batches of Group and Simulate.
var batches = sync.Pool{New: func() any { return &Batch{ended: true} }}

// inBatch runs fn with an empty batch and then calls use.
func inBatch(op string, fn func(b *Batch) error, use func(b *Batch) error) error {
	if fn == nil {
		return fmt.Errorf("nccl: %s: no function given: %w", op, ErrorInvalidArgument)
	}
	b := batches.Get().(*Batch)
	b.ended, b.refused = false, nil
	defer b.release() // also if fn panics
	if err := fn(b); err != nil {
		return err
	}
	if b.refused != nil {
		return b.refused
	}
	return use(b)
}

// release empties a batch and returns it to the pool.
func (b *Batch) release() {
	b.Reset()
	for _, m := range b.members {
		m.comm = nil
	}
	b.ended = true
	batches.Put(b)
}

func (b *Batch) copyCounts(counts []int) []int {
	i := len(b.counts)
	b.counts = append(b.counts, counts...)
	return b.counts[i:len(b.counts):len(b.counts)]
}

// enqueue enqueues all operations, or none.
func (b *Batch) enqueue() error {
	if len(b.ops) == 0 {
		return nil
	}
	if err := b.enqueueLocked(); err != nil {
		return b.ops[0].comm.bestCause(err)
	}
	return nil
}

// enqueueLocked is enqueue with the error as it was noticed.
func (b *Batch) enqueueLocked() error {
	if err := b.prepare(); err != nil {
		return err
	}
	defer b.unlock()
	if b.executor != nil {
		b.executor.Decide()
	}
	if err := b.record(); err != nil {
		return err
	}
	if b.executor != nil {
		return b.finish(b.executor.Execute())
	}
	if b.concurrent() && osthread.Launchers.Try(len(b.ops), (*launched)(b)) {
		return b.finish(b.errs)
	}
	if err := b.execute(ncclapi.API.GroupEnd); err != nil {
		b.resizeErrs()
		for i := range b.errs {
			b.errs[i] = err
		}
		return b.finish(b.errs)
	}
	return b.finish(nil)
}

// record records the operations, or none.
func (b *Batch) record() error {
	t := collective.Now()
	for i := range b.ops {
		b.ops[i].Timeout, b.ops[i].Batched = b.timeout, true
		if err := b.ops[i].record(t); err != nil {
			for j := i - 1; j >= 0; j-- {
				b.ops[j].unrecord()
			}
			return err
		}
	}
	return b.checkInputs()
}

// execute gives the operations to NCCL in one group of NCCL.
func (b *Batch) execute(end func(ncclapi.API) ncclapi.Result) error {
	if err := b.startGroup(); err != nil {
		return err
	}
	return b.endGroup(end)
}

// startGroup starts a group of NCCL, which is bound to the OS thread, and gives
// it the operations. If NCCL refuses one, it drops the group; otherwise
// endGroup must follow.
func (b *Batch) startGroup() error {
	runtime.LockOSThread()
	var err error
	if b.capturing() {
		err = relaxed(b.ops[0].comm.dev, b.startGroupRelaxed)
	} else {
		err = b.startGroupRelaxed()
	}
	if err != nil {
		runtime.UnlockOSThread()
	}
	return err
}

// startGroupRelaxed is startGroup in the thread's current capture mode.
func (b *Batch) startGroupRelaxed() error {
	c := b.ops[0].comm
	if err := c.check("ncclGroupStart", c.api.GroupStart()); err != nil {
		return err
	}
	for i := range b.ops {
		o := &b.ops[i]
		if o.Service == collective.Kernels || o.Service == collective.Ordered { // not NCCL's
			continue
		}
		if err := o.execute(); err != nil {
			c.api.GroupEnd()
			return err
		}
	}
	return nil
}

// endGroup ends the group that startGroup has started.
func (b *Batch) endGroup(end func(ncclapi.API) ncclapi.Result) error {
	defer runtime.UnlockOSThread()
	c := b.ops[0].comm
	if !b.capturing() {
		return c.check("ncclGroupEnd", end(c.api))
	}
	return relaxed(c.dev, func() error { return c.check("ncclGroupEnd", end(c.api)) })
}

// capturing reports whether NCCL must be called in the relaxed capture mode.
func (b *Batch) capturing() bool { return b.ops[0].Captured || gpu.AnyCapture() }

// prepare validates the group as a whole and locks all its communicators, in the order in
// which they were made, so that two groups cannot deadlock.
func (b *Batch) prepare() error {
	for i := range b.ops {
		if c := b.ops[i].comm; len(b.comms) == 0 {
			b.comms = append(b.comms, c)
		} else if len(b.comms) > 1 || c != b.comms[0] {
			if err := b.include(c); err != nil {
				return err
			}
		}
	}
	for _, c := range b.comms {
		c.awaitRoom(b.ops[0].Captured) // of all operations, or checkCaptures refuses the group
	}
	for i := range b.ops {
		if err := b.ops[i].validateAgain(); err != nil {
			return err
		}
	}
	if len(b.ops) > 1 || collective.Kinds[b.ops[0].Kind].Peer {
		if err := b.checkTogether(); err != nil {
			return err
		}
	}
	for i, c := range b.comms {
		if err := c.enter("ncclGroupEnd"); err != nil {
			b.comms = b.comms[:i]
			b.unlock()
			return err
		}
	}
	return nil
}

// checkTogether validates the operations against each other.
func (b *Batch) checkTogether() error {
	if err := b.checkCaptures(); err != nil {
		return err
	}
	if err := b.checkOverlap(); err != nil {
		return err
	}
	if err := b.match(); err != nil {
		return err
	}
	if err := b.checkSymmetric(); err != nil || !b.configured {
		return err
	}
	return b.checkConfigs()
}

// include adds a communicator to the group unless the group has it.
func (b *Batch) include(c *Communicator) error {
	if first := b.ops[0].comm; c.api != first.api {
		return fmt.Errorf("nccl: ncclGroupEnd: rank %d (%s) and rank %d (%s) are of two systems: want a group of one",
			first.rank, first.dev, c.rank, c.dev)
	}
	if at, found := slices.BinarySearchFunc(b.comms, c, func(a, b *Communicator) int { return int(a.number - b.number) }); !found {
		b.comms = slices.Insert(b.comms, at, c)
	}
	return nil
}

func (b *Batch) unlock() {
	for _, c := range b.comms {
		c.mu.Unlock()
	}
}

// noteCapture determines whether the operation is captured, because a capture
// holds the communicator.
func (o *operation) noteCapture() (err error) {
	if o.Captured, err = o.Stream.Capturing(); err != nil {
		return err
	}
	g, err := gpu.StreamOf(o.Stream).CapturedBy(held{o.comm})
	if g != nil {
		o.captured = o.comm.capturedBy(g)
	}
	return err
}

// checkCapture refuses an operation whose capture began or ended after it was added.
func (o *operation) checkCapture() error {
	switch now, err := gpu.StreamOf(o.Stream).CaptureID(); {
	case err != nil:
		return err
	case now != o.capture:
		return o.comm.errorf(o.Kind, "a capture of %s began or ended in the group, after the operation was issued: want the whole group within it, or none: %w", o.Stream, ErrorInvalidUsage)
	}
	return nil
}

// checkCaptures refuses a group that is only partly captured, and a group whose
// operations of one rank are in two captures, because NCCL would break the
// communicators.
func (b *Batch) checkCaptures() error {
	first := &b.ops[0]
	for i := range b.ops {
		if o := &b.ops[i]; o.Captured != first.Captured {
			return o.comm.errorf(o.Kind, "a graph captures a part of the group, and not all of it: begin the capture on the streams of all its operations, or of none: %w", ErrorInvalidUsage)
		}
	}
	if !first.Captured || b.single() {
		return nil
	}
	for i := range b.ops {
		o := &b.ops[i]
		j := slices.IndexFunc(b.ops, func(p operation) bool { return p.comm == o.comm })
		if b.ops[j].capture != o.capture {
			return o.comm.errorf(o.Kind, "two graphs capture operations of the rank in one group: want one of both: %w", ErrorInvalidUsage)
		}
	}
	return nil
}

// relaxed calls NCCL with the device's context bound and in the relaxed mode of
// captures. In a call NCCL may allocate memory, open memory of its peers, and query
// events, which the other modes forbid.
func relaxed(dev *device.Device, call func() error) error {
	return gpu.DeviceOf(dev).Bound(func() error { return gpu.DeviceOf(dev).Relaxed(call) })
}
