package route

import (
	"fmt"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/internal/spinpool"
	"github.com/gochorus/chorus/stream"
)

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

// failed makes the error of a step.
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
	case b.concurrent() && spinpool.Launchers.Try(len(b.plan), b):
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

// Do executes operation i alone, for spinpool.Pool.
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
