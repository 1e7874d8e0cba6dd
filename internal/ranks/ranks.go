// Package ranks gives packages above nccl access to the internals of an nccl.Communicator,
// such as its position in a stream, and to the steps of enqueueing an nccl.Batch.
//
// nccl.Communicator and nccl.Batch embed the bridges that [Of] and [StepsOf] follow.
package ranks

import (
	"errors"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An Inside has the methods of a communicator for other packages of Chorus.
type Inside interface {
	// AddBackend prepares the communicator for operations of other backends on its streams:
	// they may complete in another order than NCCL's, and an abort of the communicator must
	// end them. abort does that, and returns at once. An abort is not a part of an operation's
	// way, so it may call a higher package. All ranks call AddBackend before the same
	// operation.
	AddBackend(abort func())
	// Services returns the services of the last collectives, at most n, and the number of
	// the first collective in the list.
	Services(n int) (first uint64, list []Service)
	// Signatures returns the signatures of the last collectives, at most n, and the number of the first. They are the
	// same on all ranks if the operations are compatible.
	Signatures(n int) (first uint64, list []uint32)
	// Dump returns the last operations of the communicators on its device as JSON that internal/analyze
	// reads. It has at most n operations of each, and fewer if it would have more than limit bytes.
	Dump(n, limit int) []byte
	// SetWorld sets the world ranks of the communicator's ranks, by rank, and the world size,
	// for the dumps of the flight recorder.
	SetWorld(ranks []int, size int)
	// WriteTraces writes the flight recorders of the process, once, if CHORUS_NCCL_TRACE_FILE
	// asks for it. A failure of the communicator does so too.
	WriteTraces()
	// RecordEnd records in the flight recorder how the rank ended, unless that is recorded already. follows says that
	// the cause may be another rank.
	RecordEnd(end string, follows bool)
	// Noticed returns the failure of the communicator as it was noticed, or nil. It does not wait.
	Noticed() error
	// Symmetric reports whether NCCL has a correct kernel for such a collective of memory
	// in symmetric windows. With some versions it has none for captured collectives.
	Symmetric(x *Collective) bool
	// Factor returns the factor of an open PreMulSum: one element in bits, or at a device address
	// if that is not 0. ok is false if the reduction is another one.
	Factor(op flight.Reduction) (bits, at uint64, ok bool)
	// NoWindows returns why the loaded NCCL has no windows, or nil.
	NoWindows() error

	// Point returns the place behind the operations on s that were issued so far. Record an
	// event that marks the place afterwards.
	Point(s *stream.Stream) Point
	// Completed is called after the stream was seen to have passed p. It returns nil if the
	// operations before p have completed, and otherwise why they may not have.
	Completed(p Point) error
	// CannotComplete returns nil while Completed may return nil once the stream has passed p, and
	// otherwise the error that Passed will return.
	CannotComplete(p Point) error

	// ChecksNaN reports whether the inputs of operations are checked (nccl.Config.NaNCheck).
	ChecksNaN() bool

	// Ended returns how this process has ended the communicator, an error that matches
	// device.ErrClosed: by Abort, Close, Shutdown, or Shrink with ShrinkAbort. It returns nil
	// if the communicator has not ended, or had failed before; Err has the cause of a failure.
	Ended() error

	// InUse returns an *nccl.InUseError if a graph uses the communicator.
	InUse(op string) error
	// AbortFailed reports whether NCCL has not ended the operations in flight when the
	// communicator was aborted. NCCL then may use its memory, and keep its stream busy, for
	// as long as the process lives.
	AbortFailed() bool
}

// A Point is a place behind the operations that a communicator had on a stream so far.
type Point struct {
	Stream uintptr
	Record uint64 // of the last operation; 0 is none
	Lost   bool   // the recorder has lost some operations
}

// Of returns the inside of a communicator, which must not be nil.
func Of(c inside.Has[Inside]) Inside { return *inside.Of(c) }

// A PartialError is the error of an operation that failed after a part of it was enqueued. The other
// ranks may wait for the rest, so the communicator cannot be used any more.
type PartialError struct{ Err error }

func (e *PartialError) Error() string { return e.Err.Error() + "; a part of the operation is enqueued" }

// Unwrap returns the cause.
func (e *PartialError) Unwrap() error { return e.Err }

// Partial reports whether err has a PartialError.
func Partial(err error) bool {
	_, ok := errors.AsType[*PartialError](err)
	return ok
}

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

// StepsOf returns the steps of a batch of nccl.NewBatch.
func StepsOf(b inside.Has[Batch]) Batch { return *inside.Of(b) }

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
