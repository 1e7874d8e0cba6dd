package ranks

import (
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/memory"
)

// A Batch gives internal/route the steps of nccl.Batch.Enqueue, so that it can execute
// operations by other backends than NCCL. It calls them in this order: Prepare, Record, the
// execution, Finish, Unlock, Cause.
type Batch interface {
	// Prepare validates the operations and locks their communicators. If it returns nil, the
	// caller must call Unlock.
	Prepare() error
	// Len returns the number of operations.
	Len() int
	// At returns operation i. The caller may set its Service before Record.
	At(i int) Operation

	// Record enters the operations in the flight recorders, and compares them with the
	// operations of the other ranks in this process. If it returns an error, nothing is recorded.
	Record() error

	// Execute gives operation i to NCCL, outside of a group of NCCL.
	Execute(i int) error
	// StartGroup starts a group of NCCL and gives it the operations of the services NCCL and
	// Windows. EndGroup, which must follow on the same goroutine, lets NCCL enqueue them. If
	// StartGroup returns an error, NCCL enqueues nothing, and EndGroup must not be called.
	StartGroup() error
	EndGroup() error
	// Move lets NCCL enqueue copies between ranks, in one group of NCCL, as parts of operations of
	// the batch. The flight recorders have the operations only.
	Move(list []Move) error
	// Substitute replaces the buffers of operation i that NCCL uses.
	Substitute(i int, dst, src uint64)
	// ReadPeers records that copy engines read the memory of all ranks: the loss of one device
	// then fails the waits of the others.
	ReadPeers()

	// Finish records the result of each operation, and returns the first error. If only some
	// of the operations were enqueued, the communicators fail, because these operations wait
	// for the others.
	Finish(errs []error) error
	// Unlock unlocks the communicators.
	Unlock()
	// Cause returns the best known cause of an error of Prepare, Record or Finish. The
	// communicators must not be locked.
	Cause(err error) error
}

// An Operation is an operation of a batch.
type Operation struct {
	*flight.Op
	Comm     Inside // of the communicator that issues it
	Rank     int
	Dst, Src uint64 // addresses of the operands; 0 if the rank has none
	Counts   []int  // of a ReduceScatterV: the elements that each rank gets
}

// A Move is a rank's side of a copy between ranks.
type Move struct {
	Operation int         // its index in the batch, for the communicator and the stream
	Kind      flight.Kind // Send, Recv or AllGather
	Peer      int
	Dst, Src  uint64
	Bytes     int // of one rank
}

// A BatchRef is the part of an nccl.Batch that other packages of Chorus use.
type BatchRef struct{ steps Batch }

// NewBatch returns the reference that an nccl.Batch embeds.
func NewBatch(steps Batch) BatchRef { return BatchRef{steps} }

func (r BatchRef) inside() Batch { return r.steps }

// StepsOf returns the steps of a batch of nccl.NewBatch.
func StepsOf(b interface{ inside() Batch }) Batch { return b.inside() }

// A Service says which backend executes a collective.
type Service = flight.Service

// The services.
const (
	NCCL        Service = iota // NCCL
	Kernels                    // Chorus kernels, for each rank alone
	Windows                    // NCCL, on buffers of internal/route
	CopyEngines                // copy engines, for all ranks at once
	Ordered                    // copies by NCCL, and kernels that reduce in rank order
)

// ServiceName returns the name of a service for messages. The service may come from another
// process.
func ServiceName(s Service) string {
	switch s {
	case NCCL:
		return "NCCL"
	case Kernels:
		return "Chorus kernels"
	case Windows:
		return "NCCL's windows"
	case CopyEngines:
		return "copy engines"
	case Ordered:
		return "NCCL's copies and kernels that reduce in rank order"
	}
	return "an unknown backend"
}

// A Collective describes an operation for the choice of a backend.
type Collective struct {
	Kind     flight.Kind
	DType    memory.DType
	Op       flight.Reduction
	Root     int
	Count    int    // elements: of one rank's part, or all if the ranks have no parts
	Dst, Src uint64 // 0 if the rank has none
	// Together is true if one batch has such an operation of each rank of the communicator,
	// and nothing else.
	Together bool
	Captured bool // into a graph
}

// Bytes returns the size that counts: of all of an all-reduce or a broadcast, and of one
// rank's part of the other collectives.
func (x *Collective) Bytes() int { return x.Count * x.DType.Size() }
