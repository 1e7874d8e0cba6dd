package nccl

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/race"
	"github.com/gochorus/chorus/internal/ranks"
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
	group   group
	refused error // the first operation that was refused
	ended   bool  // Group has returned, or the batch is not in use
	members []*batched
	last    *batched // the latest result of On
}

// A batched adds the operations of a communicator to a batch.
type batched struct {
	comm  *Communicator // nil: unused
	batch *Batch
}

// NewBatch returns an empty Batch.
func NewBatch() *Batch {
	b := &Batch{}
	b.batchRef = inside.New[ranks.Batch](steps{b})
	return b
}

// On returns the Issuer that adds operations of c to b. It stays valid after Enqueue.
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
		return fmt.Errorf("nccl: %s on rank %d of %d: the function of the batch has returned: use NewBatch: %w",
			o.Kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
	}
	return b.markRefused(b.group.add(o))
}

// markRefused records that an operation was refused, so that the batch fails. b may be nil.
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
	return b.group.enqueue()
}

// SetTimeout sets the timeout of the operations in the batch, until Enqueue or Reset. 0 means
// the timeout of the communicator (Config.Timeout, Communicator.SetTimeout); a negative value
// means none.
func (b *Batch) SetTimeout(d time.Duration) {
	if b != nil {
		b.group.timeout = d
	}
}

// Reset removes the operations and the timeout.
func (b *Batch) Reset() {
	b.group.reset()
	b.refused = nil
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
	return inBatch("ncclGroupStart", fn, func(b *Batch) error { return b.group.enqueue() })
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

// A group is a list of validated operations that are issued to NCCL between ncclGroupStart
// and ncclGroupEnd. A Batch fills it.
type group struct {
	ops          []operation
	counts       []int           // the sends and recvs of the operations
	comms        []*Communicator // of the operations, without duplicates, in lock order
	errs         []error         // of the operations, if an operation fails or launchers enqueue them
	transferEnds []transferEnd   // of the transfers between its ranks
	extents      []extent        // of its operations, by address
	places       []race.Place    // of the calls that added the operations; none on CUDA
	configured   bool            // an operation has a configuration
	timeout      time.Duration   // of its operations; 0 means the communicator's
}

// reset removes all operations.
func (g *group) reset() {
	clear(g.ops)
	clear(g.comms)
	if len(g.transferEnds) > 0 {
		clear(g.transferEnds)
	}
	if len(g.errs) > 0 {
		clear(g.errs)
	}
	g.ops, g.counts, g.comms, g.transferEnds, g.errs = g.ops[:0], g.counts[:0], g.comms[:0], g.transferEnds[:0], g.errs[:0]
	g.extents, g.timeout, g.configured = g.extents[:0], 0, false
}

// add appends a validated operation.
func (g *group) add(o *operation) (err error) {
	if gpu.AnyCapture() {
		if o.capture, err = gpu.StreamOf(o.Stream).CaptureID(); err != nil {
			return err
		}
	}
	if o.comm.places {
		if n := len(g.ops); n == len(g.places) {
			g.places = append(g.places, race.Place{})
		}
		g.places[len(g.ops)].Mark()
	}
	g.ops = append(g.ops, *o)
	g.configured = g.configured || o.config != nil
	if o.sends == nil {
		return nil
	}
	// The caller may change its counts before the group is enqueued.
	at := &g.ops[len(g.ops)-1]
	at.sends, at.recvs = g.copyCounts(o.sends), g.copyCounts(o.recvs)
	return nil
}

func (g *group) copyCounts(counts []int) []int {
	i := len(g.counts)
	g.counts = append(g.counts, counts...)
	return g.counts[i:len(g.counts):len(g.counts)]
}

// enqueue enqueues all operations, or none.
func (g *group) enqueue() error {
	if len(g.ops) == 0 {
		return nil
	}
	if err := g.enqueueLocked(); err != nil {
		return g.ops[0].comm.bestCause(err)
	}
	return nil
}

// enqueueLocked is enqueue with the error as it was noticed.
func (g *group) enqueueLocked() error {
	if err := g.prepare(); err != nil {
		return err
	}
	defer g.unlock()
	if err := g.record(); err != nil {
		return err
	}
	if g.concurrent() && osthread.Launchers.Try(len(g.ops), g) {
		return g.finish(g.errs)
	}
	if err := g.execute(ncclapi.API.GroupEnd); err != nil {
		g.resizeErrs()
		for i := range g.errs {
			g.errs[i] = err
		}
		return g.finish(g.errs)
	}
	return g.finish(nil)
}

// record records the operations, or none.
func (g *group) record() error {
	t := flight.Now()
	for i := range g.ops {
		g.ops[i].Timeout, g.ops[i].Batched = g.timeout, true
		if err := g.ops[i].record(t); err != nil {
			for j := i - 1; j >= 0; j-- {
				g.ops[j].unrecord()
			}
			return err
		}
	}
	return g.checkInputs()
}

// execute gives the operations to NCCL in one group of NCCL.
func (g *group) execute(end func(ncclapi.API) ncclapi.Result) error {
	if err := g.startGroup(); err != nil {
		return err
	}
	return g.endGroup(end)
}

// startGroup starts a group of NCCL, which is bound to the OS thread, and gives it the
// operations. After nil, endGroup must follow. If NCCL refuses an operation, it drops the group.
func (g *group) startGroup() error {
	runtime.LockOSThread()
	var err error
	if g.capturing() {
		err = relaxed(g.ops[0].comm.dev, g.startGroupRelaxed)
	} else {
		err = g.startGroupRelaxed()
	}
	if err != nil {
		runtime.UnlockOSThread()
	}
	return err
}

// startGroupRelaxed is startGroup in the thread's current capture mode.
func (g *group) startGroupRelaxed() error {
	c := g.ops[0].comm
	if err := c.check("ncclGroupStart", c.api.GroupStart()); err != nil {
		return err
	}
	for i := range g.ops {
		o := &g.ops[i]
		if o.Service == ranks.Kernels || o.Service == ranks.Ordered { // not NCCL's
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
func (g *group) endGroup(end func(ncclapi.API) ncclapi.Result) error {
	defer runtime.UnlockOSThread()
	c := g.ops[0].comm
	if !g.capturing() {
		return c.check("ncclGroupEnd", end(c.api))
	}
	return relaxed(c.dev, func() error { return c.check("ncclGroupEnd", end(c.api)) })
}

// capturing reports whether NCCL must be called in the relaxed capture mode.
func (g *group) capturing() bool { return g.ops[0].Captured || gpu.AnyCapture() }

// prepare validates the group as a whole and locks all its communicators, in the order in
// which they were made, so that two groups cannot deadlock.
func (g *group) prepare() error {
	if g.ops[0].comm.sharesGPUs {
		g.awaitRoom()
	}
	for i := range g.ops {
		if err := g.ops[i].validateAgain(); err != nil {
			return err
		}
		if c := g.ops[i].comm; len(g.comms) == 0 {
			g.comms = append(g.comms, c)
		} else if len(g.comms) > 1 || c != g.comms[0] {
			if err := g.include(c); err != nil {
				return err
			}
		}
	}
	if len(g.ops) > 1 || flight.Kinds[g.ops[0].Kind].Peer {
		if err := g.checkTogether(); err != nil {
			return err
		}
	}
	for i, c := range g.comms {
		if err := c.enter("ncclGroupEnd"); err != nil {
			g.comms = g.comms[:i]
			g.unlock()
			return err
		}
	}
	return nil
}

// checkTogether validates the operations against each other.
func (g *group) checkTogether() error {
	if err := g.checkCaptures(); err != nil {
		return err
	}
	if err := g.checkOverlap(); err != nil {
		return err
	}
	if err := g.match(); err != nil {
		return err
	}
	if err := g.checkSymmetric(); err != nil || !g.configured {
		return err
	}
	return g.checkConfigs()
}

// include adds a communicator to the group unless the group has it.
func (g *group) include(c *Communicator) error {
	if first := g.ops[0].comm; c.api != first.api {
		return fmt.Errorf("nccl: ncclGroupEnd: rank %d (%s) and rank %d (%s) are of two systems: want a group of one",
			first.rank, first.dev, c.rank, c.dev)
	}
	if at, found := slices.BinarySearchFunc(g.comms, c, func(a, b *Communicator) int { return int(a.number - b.number) }); !found {
		g.comms = slices.Insert(g.comms, at, c)
	}
	return nil
}

func (g *group) unlock() {
	for _, c := range g.comms {
		c.mu.Unlock()
	}
}

// noteCapture determines whether the operation is captured. A capture holds the communicator.
func (o *operation) noteCapture() (err error) {
	if o.Captured, err = o.Stream.Capturing(); err != nil {
		return err
	}
	return gpu.StreamOf(o.Stream).Captured(held{o.comm})
}

// checkCapture refuses an operation whose capture began or ended after it was added.
func (o *operation) checkCapture() error {
	switch now, err := gpu.StreamOf(o.Stream).CaptureID(); {
	case err != nil:
		return err
	case now != o.capture:
		return fmt.Errorf("nccl: %s on rank %d of %d: a capture of %s began or ended in the group, after the operation was issued: want the whole group within it, or none: %w",
			o.Kind, o.comm.rank, o.comm.size, o.Stream, ErrorInvalidUsage)
	}
	return nil
}

// checkCaptures refuses a group that is only partly captured, and a group whose operations
// of one rank are in two captures. NCCL would break the communicators.
func (g *group) checkCaptures() error {
	first := &g.ops[0]
	for i := range g.ops {
		if o := &g.ops[i]; o.Captured != first.Captured {
			return fmt.Errorf("nccl: %s on rank %d of %d: a graph captures a part of the group, and not all of it: begin the capture on the streams of all its operations, or of none: %w",
				o.Kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
		}
	}
	if !first.Captured || g.single() {
		return nil
	}
	for i := range g.ops {
		o := &g.ops[i]
		j := slices.IndexFunc(g.ops, func(p operation) bool { return p.comm == o.comm })
		if g.ops[j].capture != o.capture {
			return fmt.Errorf("nccl: %s on rank %d of %d: two graphs capture operations of the rank in one group: want one of both: %w",
				o.Kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
		}
	}
	return nil
}

// relaxed makes calls of NCCL with the device's context bound and in the relaxed mode of
// captures. In a call NCCL may allocate memory, open memory of its peers, and query
// events, which the other modes forbid.
func relaxed(dev *device.Device, call func() error) error {
	return gpu.DeviceOf(dev).Bound(func() error { return gpu.DeviceOf(dev).Relaxed(call) })
}
