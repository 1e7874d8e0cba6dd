package nccl

import (
	"io"

	"github.com/gochorus/chorus/internal/flight"
)

// An Operation is an operation in the flight recorder.
type Operation = flight.Operation

// A Frame is one function of a call stack, from the inside to the outside.
type Frame = flight.Frame

// Trace returns the last operations that were issued on c, the oldest first, at most
// Config.TraceSize. It may be called at any time by any goroutine, also after the end of
// c.
func (c *Communicator) Trace() []Operation {
	if c == nil {
		return nil
	}
	return c.rec.Trace()
}

// DumpTrace writes the flight recorders of all communicators of the process that
// are not closed, as JSON with the field names of PyTorch's flight recorder. A
// communicator that has failed is in the dump until it is closed.
func DumpTrace(w io.Writer) error { return flight.Dump(w, liveRecorders()) }

// DumpTrace writes the flight recorder of c in the format of the function DumpTrace. It
// may be called at any time by any goroutine, also after the end of c.
func (c *Communicator) DumpTrace(w io.Writer) error {
	return flight.Dump(w, []*flight.Recorder{c.rec})
}

// Progress is the progress of a rank. The Progress of all ranks together shows which rank
// is behind.
type Progress struct {
	Rank      int
	Issued    Operation // the last operation that NCCL has accepted
	Completed Operation // the last operation that is known to have completed
}

// Progress returns the rank's progress. It may be called at any time by any goroutine,
// also after the end of c.
func (c *Communicator) Progress() Progress {
	issued, completed := c.rec.Final()
	return Progress{Rank: c.rank, Issued: issued.Operation(), Completed: completed.Operation()}
}
