package nccl

import (
	"time"

	"github.com/gochorus/chorus/internal/flight"
)

// A watched is the view that flight.Watch has of a communicator.
type watched struct{ *Communicator }

// Closed reports whether the communicator was closed.
func (c watched) Closed() bool { return c.isClosed() }

// RecordPassed records that a stream has passed the operations up to a record.
func (c watched) RecordPassed(record uint64, stream uintptr) error {
	return c.recordPassed(record, stream)
}

// Others returns the recorders of the other ranks of this process.
func (c watched) Others() []*flight.Recorder { return recorders(c.others()) }

// TimedOut returns the error of operations that are older than the deadline.
func (c watched) TimedOut(x flight.Suspicion, age time.Duration) error {
	return c.errTimeout(x, age, c.others())
}

// Fail fails the communicator.
func (c watched) Fail(cause error) { c.fail(cause) }
