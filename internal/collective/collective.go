// Package collective has what all backends of a collective share: the operation, which is one struct from the
// public call to the launch, and the names of the backends. It has the flight recorder with its clock and its dumps, the watchdog with
// its marks on streams and its deadlines, and the comparison of the ranks of one process. It also gives packages above nccl access to
// the internals of an nccl.Communicator, such as its position in a stream, and to the operations of an nccl.Batch.
//
// nccl.Communicator and nccl.Batch embed the bridges that [Of] and [BatchOf] follow.
package collective

import (
	"errors"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
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
	// LaunchedCollectives returns how many collectives of the communicator launches of graphs have enqueued.
	LaunchedCollectives() uint64
	// Dump returns the last operations of the communicators on its device as JSON that internal/analyze
	// reads. It has at most n operations of each, and fewer if it would have more than limit bytes.
	Dump(n, limit int) []byte
	// Identity returns the same text on all ranks of the communicator, and another one for every other communicator.
	Identity() string
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
	Symmetric(x *Op) bool
	// Factor returns the factor of an open PreMulSum: one element in bits, or at a device address
	// if that is not 0. ok is false if the reduction is another one.
	Factor(op Reduction) (bits, at uint64, ok bool)
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
func Of(c handle.Has[Inside]) Inside { return *handle.Of(c) }

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

// An Executor executes the operations of an nccl.Batch by other backends than NCCL. Batch.Enqueue calls it after it has
// validated the operations and locked their communicators.
type Executor interface {
	// Decide chooses the backend of each operation, before it is entered in the flight recorder: it sets Service.
	Decide()
	// Execute executes the operations and returns their results. If only some of the operations were
	// enqueued, the communicators fail, because these operations wait for the others.
	Execute() (errs []error)
}

// A Batch gives internal/route the operations of an nccl.Batch, and lets NCCL execute them.
type Batch interface {
	// SetExecutor lets e decide about the operations and execute them. nil means NCCL.
	SetExecutor(e Executor)
	// Len returns the number of operations.
	Len() int
	// At returns operation i, the communicator that issues it, and its rank. The caller may change the addresses
	// of its operands for NCCL.
	At(i int) (*Op, Inside, int)

	// Add adds an operation of a communicator of a kind that NCCL does not have: Execute of the Executor executes it.
	Add(c Inside, op *Op) error

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
	// ReadPeers records that copy engines read the memory of all ranks: the loss of one device
	// then fails the waits of the others.
	ReadPeers()
}

// An Op is an operation of one rank, from the call of nccl's function to the call of NCCL or the launch of a
// Chorus kernel. Package nccl validates it, a Recorder records it, internal/route chooses its backend, and
// internal/fabric launches its kernel. It is a value on the caller's stack, or in a batch until that is enqueued.
type Op struct {
	Call
	Dst, Src     Operand
	Sends, Recvs []int // the elements of each rank, if they differ

	// The choice of internal/route.
	Local     int32  // index of the rank among the local ranks of its group; -1 for an operation of another communicator, which is NCCL's
	Algorithm int8   // of the Chorus kernel: a fabric.Algorithm
	Together  bool   // one batch has such an operation of each rank of the communicator, and nothing else
	Pieces    bool   // Chorus kernels execute it in pieces
	Result    uint64 // the destination of the caller, while NCCL uses the buffers of a window
}

// Bytes returns the size that counts: of all of an all-reduce or a broadcast, and of one
// rank's part of the other collectives.
func (x *Op) Bytes() int { return x.N * x.DType.Size() }

// An Operand is a buffer of an operation, or empty if the rank has none.
type Operand struct {
	Ptr cudadrv.DevicePtr
	Len int // in elements
	Buf *memory.Buffer
}

// OperandOf returns the Operand of a slice.
func OperandOf[T memory.Element](x memory.Slice[T]) Operand {
	return OperandAt(x.Ptr(), x.Len(), x.Buffer())
}

// OperandAt returns the Operand of n elements at an address in a buffer.
func OperandAt(ptr uint64, n int, b *memory.Buffer) Operand {
	return Operand{cudadrv.DevicePtr(ptr), n, b}
}

// Fits reports whether the buffer has n elements, is open, and is on the device.
func (x *Operand) Fits(dev *device.Device, n int) bool {
	if x.Buf == nil {
		return x.Len == n && n == 0
	}
	return x.Len == n && inside.BufferOf(x.Buf).OpenOn(dev)
}

// Closed reports whether the operand's buffer was closed.
func (x *Operand) Closed(dev *device.Device) bool {
	return x.Buf != nil && !inside.BufferOf(x.Buf).OpenOn(dev)
}

// A Move is a rank's side of a copy between ranks.
type Move struct {
	Operation int  // its index in the batch, for the communicator and the stream
	Kind      Kind // Send, Recv or AllGather
	Peer      int
	Dst, Src  uint64
	Bytes     int // of one rank
}

// BatchOf returns the inside of a batch of nccl.NewBatch.
func BatchOf(b handle.Has[Batch]) Batch { return *handle.Of(b) }

// The services.
const (
	NCCL        Service = iota // NCCL
	Kernels                    // Chorus kernels, for each rank alone
	Windows                    // NCCL, on buffers of internal/route
	CopyEngines                // copy engines, for all ranks at once
	Ordered                    // copies by NCCL, and kernels that reduce in rank order
)

// ServiceName returns the name of a service for messages, also of one that
// another process sent and that this version may not know.
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
