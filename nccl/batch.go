package nccl

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/ranks"
)

// An Issuer accepts the operations of one rank. A *Communicator enqueues each operation at
// once; the result of Batch.On adds it to a Batch. With gives the operations of an Issuer a
// configuration.
type Issuer interface{ ranks.Issuer }

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
	ranks.Seal
	comm  *Communicator // nil: unused
	batch *Batch
}

// NewBatch returns an empty Batch.
func NewBatch() *Batch {
	b := &Batch{}
	b.batchRef = ranks.NewBatch(steps{b})
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
