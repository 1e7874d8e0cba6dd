package route

import (
	"fmt"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Batch is an nccl.Batch whose operations are executed by the backends that the routers of
// a group choose. Enqueue decides once, for all operations of the batch.
type Batch struct {
	*nccl.Batch
	routers  Routers
	in       collective.Batch // the steps of the nccl.Batch
	ops      []*collective.Op
	errs     []error                                        // results of the operations
	tallies  []tally                                        // of the routers
	foreign  int                                            // number of operations of other communicators
	inOrder  bool                                           // ReduceInOrder was called
	launches func(*collective.Op) error                     // of EnqueueKernels
	steps    func(move func([]collective.Move) error) error // of EnqueueSteps

	// By rank, for copy engines.
	streams []*stream.Stream
	byRank  []*collective.Op

	// Of ordered reductions: the copies of a round, and the operations that run together.
	moves    []collective.Move
	turns    []int
	reducing []reducing
	moved    bool // NCCL has enqueued copies of the operations
}

// A tally counts the operations of a router in a batch.
type tally struct{ operations, collectives int }

// NewBatch returns an empty Batch for operations of the routers' communicators.
// If there are no routers, NCCL executes all of them.
func (rs Routers) NewBatch() *Batch {
	b := nccl.NewBatch()
	return &Batch{Batch: b, routers: rs, in: collective.BatchOf(b), tallies: make([]tally, len(rs))}
}

// Enqueue is nccl.Batch.Enqueue with these differences: NCCL gets a single operation without
// a group of NCCL, and the communicators fail if Chorus kernels have started a part of the
// batch when another part fails.
func (b *Batch) Enqueue() error {
	if len(b.routers) > 0 || b.in.Len() == 1 || b.steps != nil {
		b.in.SetExecutor(b)
		defer b.in.SetExecutor(nil)
	}
	defer b.Reset()
	return b.Batch.Enqueue()
}

// ReduceInOrder enables deterministic reductions for the batch until Enqueue or Reset, if the
// routers have an Order.
func (b *Batch) ReduceInOrder() { b.inOrder = true }

// Reset removes the operations, and ends the effect of ReduceInOrder.
func (b *Batch) Reset() {
	b.Batch.Reset()
	b.inOrder = false
	b.ops, b.errs, b.moves = b.ops[:0], b.errs[:0], b.moves[:0]
}

// Decide chooses the backend of each operation. If a rank has several
// collectives in the batch, NCCL gets all these collectives, because it orders
// them on a stream itself. Transfers do not count, because other ranks need not
// have them.
func (b *Batch) Decide() {
	b.describe()
	if b.steps != nil {
		return // NCCL moves the data
	}
	together := b.together()
	for _, x := range b.ops {
		strategy, only := NCCLOnly, false
		if x.Local >= 0 && b.tallies[x.Local].collectives == 1 {
			only = true
			x.Together = together
			if strategy = b.routers[x.Local].choose(x); b.launches != nil {
				strategy = OwnKernels
			}
		}
		x.Service, x.Algorithm = services[strategy], int8(algorithms[strategy])
		if x.Local >= 0 && b.routers[x.Local].inOrder(x, strategy, b.inOrder) {
			if x.Pieces = only && b.routers[x.Local].inPieces(x); x.Pieces {
				x.Service, x.Algorithm = collective.Kernels, int8(fabric.Auto)
			} else {
				x.Service = collective.Ordered
			}
		}
	}
}

// describe lists the operations and counts those of each router.
func (b *Batch) describe() {
	clear(b.tallies)
	b.foreign = 0
	for i := range b.in.Len() {
		x, c, rank := b.in.At(i)
		x.Local = b.routers.of(c, rank)
		b.ops, b.errs = append(b.ops, x), append(b.errs, nil)
		if x.Local < 0 {
			b.foreign++
			continue
		}
		t := &b.tallies[x.Local]
		if t.operations++; !collective.Kinds[x.Kind].Peer {
			t.collectives++
		}
	}
}

// together reports whether the batch is one operation of each rank, all of the same kind.
func (b *Batch) together() bool {
	first := b.ops[0]
	if first.Local < 0 || len(b.ops) != b.router(first).comm.Size() || !b.single() {
		return false
	}
	for _, x := range b.ops {
		if x.Kind != first.Kind {
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
	return len(b.ops) > 1 && b.single() && !b.ops[0].Captured
}

// router returns the router of an operation that has one.
func (b *Batch) router(x *collective.Op) *Router { return b.routers[x.Local] }

// services has the service of each strategy that can be chosen for an operation.
var services = [NumStrategies]collective.Service{
	NCCLOnly: collective.NCCL, OwnKernels: collective.Kernels, OneShot: collective.Kernels, TwoShotPackets: collective.Kernels, TwoShot: collective.Kernels,
	TwoShotLines: collective.Kernels, Pipelined: collective.Kernels, Pushed: collective.Kernels, Windows: collective.Windows, CopyEngines: collective.CopyEngines,
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

// failed returns the error of an operation that its backend could not enqueue.
func (b *Batch) failed(x *collective.Op, err error) error {
	if err == nil {
		return nil
	}
	c := b.router(x).comm
	return gpu.DeviceOf(c.Device()).Because(&Error{
		Op: x.Kind.Plain(), Rank: c.Rank(), Size: c.Size(), Device: c.Device().String(), Backend: collective.ServiceName(x.Service), Err: err,
	})
}

// Execute executes the operations and returns their results.
func (b *Batch) Execute() []error {
	if b.steps != nil {
		b.failFrom(0, b.executeSteps())
		return b.errs
	}
	if b.orderedSteps() > 0 {
		if b.executeOrdered() {
			b.executeGroup()
		}
		return b.errs
	}
	switch {
	case b.allBy(collective.CopyEngines):
		b.executeByEngines()
	case b.concurrent() && osthread.Launchers.Try(len(b.ops), b):
	case len(b.ops) == 1 || b.allBy(collective.Kernels):
		b.executeInTurn()
	default:
		b.executeGroup()
	}
	return b.errs
}

// allBy reports whether one service executes all operations.
func (b *Batch) allBy(service collective.Service) bool {
	for _, x := range b.ops {
		if x.Service != service {
			return false
		}
	}
	return true
}

// executeByEngines lets copy engines execute the operations of all ranks.
func (b *Batch) executeByEngines() {
	if b.byRank == nil {
		b.streams, b.byRank = make([]*stream.Stream, len(b.ops)), make([]*collective.Op, len(b.ops))
	}
	for _, x := range b.ops {
		b.streams[x.Local], b.byRank[x.Local] = x.Stream, x
	}
	b.in.ReadPeers()
	err := b.failed(b.ops[0], copyBetweenRanks(b.streams, b.byRank))
	clear(b.streams)
	clear(b.byRank)
	for i := range b.errs {
		b.errs[i] = err
	}
}

// executeInTurn executes the operations one after the other, without a group of
// NCCL, until the first error.
func (b *Batch) executeInTurn() {
	for i := range b.ops {
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
	for i := range b.ops {
		if b.ops[i].Service != collective.Ordered {
			b.errs[i] = err
		}
	}
}

// Do executes operation i alone, for osthread.Pool.
func (b *Batch) Do(i int) {
	switch x := b.ops[i]; x.Service {
	case collective.Kernels:
		b.errs[i] = b.launch(x)
	case collective.Windows:
		if b.errs[i] = b.copyIn(x); b.errs[i] == nil {
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
	copied, err := b.copyAllIn()
	if err == nil {
		err = b.in.StartGroup()
	}
	if err == nil {
		b.launchAll()
		err = b.in.EndGroup()
	} else {
		b.failRest(err)
	}
	for i := range b.ops {
		service := b.ops[i].Service
		if err != nil && service != collective.Kernels && service != collective.Ordered {
			b.errs[i] = err
		}
		if service == collective.Windows && i < copied {
			b.copyOut(i)
		}
	}
}

// launchAll launches the Chorus kernels up to the first error.
func (b *Batch) launchAll() {
	var err error
	for i := range b.ops {
		if x := b.ops[i]; x.Service == collective.Kernels {
			if err == nil {
				err = b.launch(x)
			}
			b.errs[i] = err
		}
	}
}

// launch launches the Chorus kernel of an operation.
func (b *Batch) launch(x *collective.Op) error {
	r := b.router(x)
	switch {
	case b.launches != nil:
		return b.failed(x, b.launches(x))
	case fabric.Algorithm(x.Algorithm) == fabric.Pushed:
		return b.failed(x, r.pushed.Enqueue(x))
	case x.Pieces:
		return b.failed(x, r.launchPieces(x))
	}
	return b.failed(x, r.kernels.Enqueue(x))
}

// copyAllIn copies the operands of all operations that use windows. It returns the number of
// operations before the first error.
func (b *Batch) copyAllIn() (n int, err error) {
	for ; n < len(b.ops); n++ {
		if x := b.ops[n]; x.Service == collective.Windows {
			if err := b.copyIn(x); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// copyIn copies the operand of an operation to its rank's window, and makes
// NCCL use the window. If it succeeds, copyOut must follow.
func (b *Batch) copyIn(x *collective.Op) error { return b.failed(x, b.router(x).window.copyIn(x)) }

// copyOut copies the result of operation i from the window, if NCCL has taken the operation.
func (b *Batch) copyOut(i int) {
	err := b.router(b.ops[i]).window.copyOut(b.ops[i], b.errs[i] == nil)
	if b.errs[i] == nil {
		b.errs[i] = b.failed(b.ops[i], err)
	}
}
