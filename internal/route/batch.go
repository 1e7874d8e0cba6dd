package route

import (
	"fmt"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Batch is an nccl.Batch whose operations are executed by the backends that the routers of
// a group choose. Enqueue decides once, for all operations of the batch.
type Batch struct {
	*nccl.Batch
	routers Routers
	in      ranks.Batch   // the steps of the nccl.Batch
	plan    []step        // of the operations
	errs    []error       // results of the operations
	tallies []tally       // of the routers
	foreign int           // number of operations of other communicators
	inOrder bool          // ReduceInOrder was called
	norms   []fabric.Norm // of EnqueueNorms, by local rank

	streams     []*stream.Stream // by rank, for copy engines
	collectives []ranks.Collective

	// Of ordered reductions: the copies of a round, and the operations that run together.
	moves    []ranks.Move
	turns    []int
	reducing []reducing
	moved    bool // NCCL has enqueued copies of the operations
}

// A step is an operation with its backend.
type step struct {
	op       *flight.Op
	router   *Router // nil for an operation of another communicator, which is NCCL's
	x        ranks.Collective
	strategy Strategy
	norm     *fabric.Norm // executed with the operation by one kernel, or nil
	pieces   bool         // Chorus kernels execute it in pieces
}

// A tally counts the operations of a router in a batch.
type tally struct{ operations, collectives int }

// NewBatch returns an empty Batch for operations of the routers' communicators. Without
// routers NCCL executes everything.
func (rs Routers) NewBatch() *Batch {
	b := nccl.NewBatch()
	return &Batch{Batch: b, routers: rs, in: ranks.StepsOf(b), tallies: make([]tally, len(rs))}
}

// Enqueue is nccl.Batch.Enqueue with these differences: NCCL gets a single operation without
// a group of NCCL, and the communicators fail if Chorus kernels have started a part of the
// batch when another part fails.
func (b *Batch) Enqueue() error {
	if n := b.in.Len(); n == 0 || n > 1 && len(b.routers) == 0 {
		return b.Batch.Enqueue()
	}
	defer b.Reset()
	if err := b.enqueue(); err != nil {
		return b.in.Cause(err)
	}
	return nil
}

// ReduceInOrder enables deterministic reductions for the batch until Enqueue or Reset, if the
// routers have an Order.
func (b *Batch) ReduceInOrder() { b.inOrder = true }

// Reset removes the operations, and ends the effect of ReduceInOrder.
func (b *Batch) Reset() {
	b.Batch.Reset()
	b.inOrder = false
	b.plan, b.errs, b.moves = b.plan[:0], b.errs[:0], b.moves[:0]
}

// enqueue is Enqueue with the error as it was noticed.
func (b *Batch) enqueue() error {
	if err := b.in.Prepare(); err != nil {
		return err
	}
	defer b.in.Unlock()
	b.decide()
	if err := b.in.Record(); err != nil {
		return err
	}
	b.execute()
	return b.in.Finish(b.errs)
}

// decide chooses the backend of each operation. If a rank has several collectives in the
// batch, NCCL gets all these collectives, because it orders them on a stream itself. Transfers do not
// count: other ranks need not have them.
func (b *Batch) decide() {
	b.describe()
	together := b.together()
	for i := range b.plan {
		s := &b.plan[i]
		if s.router != nil && b.tallies[s.router.local].collectives == 1 {
			s.x.Together = together
			s.strategy = s.router.choose(&s.x)
			b.fuse(s)
		}
		s.op.Service = services[s.strategy]
		if s.router != nil && s.router.inOrder(&s.x, s.strategy, b.inOrder) {
			if s.pieces = b.tallies[s.router.local].collectives == 1 && s.router.inPieces(&s.x); s.pieces {
				s.strategy, s.op.Service = OwnKernels, ranks.Kernels
			} else {
				s.strategy, s.op.Service = NCCLOnly, ranks.Ordered
			}
		}
	}
}

// describe returns a plan that executes all operations by NCCL.
func (b *Batch) describe() {
	clear(b.tallies)
	b.foreign = 0
	for i := range b.in.Len() {
		o := b.in.At(i)
		r := b.routers.of(o.Comm, o.Rank)
		b.plan = append(b.plan, step{op: o.Op, router: r, strategy: NCCLOnly, x: ranks.Collective{
			Kind: o.Kind, DType: o.DType, Op: o.Reduction, Root: o.Root, Count: o.N, Dst: o.Dst, Src: o.Src, Captured: o.Captured,
		}})
		b.errs = append(b.errs, nil)
		if r == nil {
			b.foreign++
			continue
		}
		t := &b.tallies[r.local]
		if t.operations++; !flight.Kinds[o.Kind].Peer {
			t.collectives++
		}
	}
}

// together reports whether the batch is one operation of each rank, all of the same kind.
func (b *Batch) together() bool {
	first := &b.plan[0]
	if first.router == nil || len(b.plan) != first.router.comm.Size() || !b.single() {
		return false
	}
	for i := range b.plan {
		if b.plan[i].op.Kind != first.op.Kind {
			return false
		}
	}
	return true
}

// single reports whether the batch has at most one operation of each router, and no others.
func (b *Batch) single() bool {
	for _, t := range b.tallies {
		if t.operations > 1 {
			return false
		}
	}
	return b.foreign == 0
}

// concurrent reports whether threads may execute the operations concurrently. A captured
// batch is enqueued by one thread, because a capture may belong to a thread.
func (b *Batch) concurrent() bool {
	return len(b.plan) > 1 && b.single() && !b.plan[0].op.Captured
}

// services has the service of each strategy that can be chosen for an operation.
var services = [NumStrategies]ranks.Service{
	NCCLOnly: ranks.NCCL, OwnKernels: ranks.Kernels, OneShot: ranks.Kernels, TwoShotPackets: ranks.Kernels, TwoShot: ranks.Kernels,
	TwoShotLines: ranks.Kernels, Windows: ranks.Windows, CopyEngines: ranks.CopyEngines,
}

// An Error reports that a backend other than NCCL could not enqueue an operation of a rank. The
// other ranks may wait for the operation.
type Error struct {
	Op         string // such as "all-reduce"
	Rank, Size int
	Device     string
	Backend    string // such as "Chorus kernels"
	Err        error
}

func (e *Error) Error() string {
	return fmt.Sprintf("comm: %s on rank %d of %d (%s) by %s: %v", e.Op, e.Rank, e.Size, e.Device, e.Backend, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// failed returns the error of a step.
func (s *step) failed(err error) error {
	if err == nil {
		return nil
	}
	c := s.router.comm
	return gpu.DeviceOf(c.Device()).Because(&Error{
		Op: s.op.Kind.Plain(), Rank: c.Rank(), Size: c.Size(), Device: c.Device().String(), Backend: ranks.ServiceName(s.op.Service), Err: err,
	})
}

// execute executes the plan and stores the results.
func (b *Batch) execute() {
	if b.orderedSteps() > 0 {
		if b.executeOrdered() {
			b.executeGroup()
		}
		return
	}
	switch {
	case b.allBy(ranks.CopyEngines):
		b.executeByEngines()
	case b.concurrent() && osthread.Launchers.Try(len(b.plan), b):
	case len(b.plan) == 1 || b.allBy(ranks.Kernels):
		b.executeInTurn()
	default:
		b.executeGroup()
	}
}

// allBy reports whether one service executes all operations.
func (b *Batch) allBy(service ranks.Service) bool {
	for i := range b.plan {
		if b.plan[i].op.Service != service {
			return false
		}
	}
	return true
}

// executeByEngines lets copy engines execute the operations of all ranks.
func (b *Batch) executeByEngines() {
	n := len(b.plan)
	if b.streams == nil {
		b.streams, b.collectives = make([]*stream.Stream, n), make([]ranks.Collective, n)
	}
	for i := range b.plan {
		s := &b.plan[i]
		b.streams[s.router.local], b.collectives[s.router.local] = s.op.Stream, s.x
	}
	b.in.ReadPeers()
	err := b.plan[0].failed(copyBetweenRanks(b.streams, b.collectives))
	clear(b.streams)
	for i := range b.errs {
		b.errs[i] = err
	}
}

// executeInTurn executes the operations one after the other, without a group of NCCL. It ends
// at the first error.
func (b *Batch) executeInTurn() {
	for i := range b.plan {
		if b.Do(i); b.errs[i] != nil {
			b.failFrom(i+1, b.errs[i])
			return
		}
	}
}

// failFrom stores an error as the result of the operations from i on.
func (b *Batch) failFrom(i int, err error) {
	for ; i < len(b.errs); i++ {
		b.errs[i] = err
	}
}

// failRest stores an error as the result of the operations that are not ordered.
func (b *Batch) failRest(err error) {
	for i := range b.plan {
		if b.plan[i].op.Service != ranks.Ordered {
			b.errs[i] = err
		}
	}
}

// Do executes operation i alone, for osthread.Pool.
func (b *Batch) Do(i int) {
	s := &b.plan[i]
	switch s.op.Service {
	case ranks.Kernels:
		b.errs[i] = s.launch()
	case ranks.Windows:
		if b.errs[i] = b.copyIn(i); b.errs[i] == nil {
			b.errs[i] = b.in.Execute(i)
			b.copyOut(i)
		}
	default:
		b.errs[i] = b.in.Execute(i)
	}
}

// executeGroup executes the operations of NCCL in one group of NCCL, and launches the Chorus
// kernels before NCCL's. NCCL may refuse an operation before any kernel is launched.
func (b *Batch) executeGroup() {
	lent, err := b.copyAllIn()
	if err == nil {
		err = b.in.StartGroup()
	}
	if err == nil {
		b.launchAll()
		err = b.in.EndGroup()
	} else {
		b.failRest(err)
	}
	for i := range b.plan {
		service := b.plan[i].op.Service
		if err != nil && service != ranks.Kernels && service != ranks.Ordered {
			b.errs[i] = err
		}
		if service == ranks.Windows && i < lent {
			b.copyOut(i)
		}
	}
}

// launchAll launches the Chorus kernels up to the first error.
func (b *Batch) launchAll() {
	var err error
	for i := range b.plan {
		if s := &b.plan[i]; s.op.Service == ranks.Kernels {
			if err == nil {
				err = s.launch()
			}
			b.errs[i] = err
		}
	}
}

// launch launches the Chorus kernel of a step.
func (s *step) launch() error {
	if s.norm != nil {
		return s.failed(s.router.kernels.EnqueueNorm(s.op.Stream, s.norm))
	}
	if s.pieces {
		return s.failed(s.launchPieces())
	}
	raw := rawOf(s.strategy, &s.x)
	return s.failed(s.router.kernels.Enqueue(s.op.Stream, &raw))
}

// copyAllIn copies the operands of all operations that use windows. It returns the number of
// operations before the first error.
func (b *Batch) copyAllIn() (n int, err error) {
	for ; n < len(b.plan); n++ {
		if b.plan[n].op.Service == ranks.Windows {
			if err := b.copyIn(n); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// copyIn copies the operand of operation i to its rank's window, and makes NCCL use the
// window. After nil, copyOut must follow.
func (b *Batch) copyIn(i int) error {
	s := &b.plan[i]
	dst, src, err := s.router.window.copyIn(s.op.Stream, &s.x)
	if err == nil {
		b.in.Substitute(i, dst, src)
	}
	return s.failed(err)
}

// copyOut copies the result of operation i from the window, if NCCL has taken the operation.
func (b *Batch) copyOut(i int) {
	s := &b.plan[i]
	err := s.router.window.copyOut(s.op.Stream, &s.x, b.errs[i] == nil)
	if b.errs[i] == nil {
		b.errs[i] = s.failed(err)
	}
}
