package nccl

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/stream"
)

// This file decides whether an operation completed. Every wait and the watchdog use it.
// When the kernels of NCCL and Chorus are aborted, they end, and their stream passes them.
// A passed stream therefore proves that an operation completed only if no abort had begun
// by then: a caller first observes the stream, and then checks whether an abort has begun
// (checkNoAbort). The flight recorder keeps each completion that was proved (recordPassed). After an
// abort these records are the only proof (knownCompleted).

// A closing is what this process did to end a communicator, or its operations.
type closing struct {
	how   string // such as "closed the communicator"
	at    time.Time
	abort bool // from then on streams pass operations that have not completed
	after bool // the communicator had failed before
}

func (e *closing) String() string {
	return fmt.Sprintf("this process %s %v ago", e.how, time.Since(e.at).Round(time.Millisecond))
}

// An abortFlag is raised by the first abort among communicators that share NCCL's abort flag:
// a parent with Config.SplitShare and its children. NCCL then ends the operations of all
// these communicators.
type abortFlag struct{ by atomic.Pointer[closing] }

// A closedError is returned by calls on a communicator that this process has closed, and
// by waits for its operations.
type closedError struct {
	what string // the operation or the wait, and the rank
	by   *closing
}

func (e *closedError) Error() string { return fmt.Sprintf("nccl: %s: %s", e.what, e.by) }

// Unwrap returns device.ErrClosed, for errors.Is.
func (e *closedError) Unwrap() error { return device.ErrClosed }

// recordClosing records how this process ends the communicator, before it does so.
func (c *Communicator) recordClosing(how string, abort bool) {
	e := &closing{how: how, at: time.Now(), abort: abort, after: c.failed.Load() != nil}
	c.closing.CompareAndSwap(nil, e)
	if abort {
		c.flag.by.CompareAndSwap(nil, e)
		c.rec.SetFinalState(flight.Aborted)
	}
}

// abortedBy returns the call of this process that may have aborted operations of c, or nil.
func (c *Communicator) abortedBy() *closing {
	if e := c.closing.Load(); e != nil && e.abort {
		return e
	}
	if e := c.flag.by.Load(); e != nil {
		return &closing{how: e.how + ", of a communicator that shares its resources (Config.SplitShare or ShrinkShare),", at: e.at}
	}
	return nil
}

// checkNoAbort returns nil if no operation of c can have left its stream without completing so
// far, and otherwise the reason why one can.
func (c *Communicator) checkNoAbort(what string) error {
	if c.failed.Load() == nil {
		if e := c.abortedBy(); e != nil {
			return c.errUncertain(what, e)
		}
	}
	if err := c.Err(); err != nil {
		return err
	}
	if e := c.abortedBy(); e != nil {
		return c.errUncertain(what, e)
	}
	return nil
}

// errUncertain returns the error of operations that may not have completed.
func (c *Communicator) errUncertain(what string, e *closing) error {
	return &closedError{fmt.Sprintf("%s on rank %d of %d (%s): the operations may not have completed and their output is undefined", what, c.rank, c.size, c.dev), e}
}

// recordPassed records that the stream has passed the operations up to a record. It returns an
// error if that does not prove that they completed.
func (c *Communicator) recordPassed(record uint64, on uintptr) error {
	if err := c.checkNoAbort("wait"); err != nil {
		return err
	}
	if err := c.peersLost(); err != nil {
		return err
	}
	c.rec.Complete(record, on)
	return nil
}

// peersLost returns an error if copy engines have read from a device that was lost: a
// stream that waits for a lost device continues without the data.
func (c *Communicator) peersLost() error {
	if devs := c.sources.Load(); devs != nil {
		for rank, dev := range *devs {
			if _, _, err := dev.MemoryInfo(); err != nil { // calls the driver
				return fmt.Errorf("nccl: wait on rank %d of %d (%s): rank %d has given no data: %w", c.rank, c.size, c.dev, rank, err)
			}
		}
	}
	return nil
}

// readPeers records that copy engines read from the devices of all ranks.
func (g *group) readPeers() {
	if g.ops[0].comm.sources.Load() != nil {
		return
	}
	devs := make([]*device.Device, len(g.ops))
	for i := range g.ops {
		devs[g.ops[i].comm.rank] = g.ops[i].comm.dev
	}
	for i := range g.ops {
		g.ops[i].comm.sources.Store(&devs)
	}
}

// point returns the place behind the operations of c on s that were issued so far.
func (c *Communicator) point(s *stream.Stream) ranks.Point {
	record, lost := c.rec.LastOn(s)
	return ranks.Point{Stream: uintptr(gpu.StreamOf(s).Raw()), Record: record, Lost: lost}
}

// completed is called after the stream was seen to have passed the point. It returns nil if the
// operations before the point have completed, and otherwise why they may not have.
func (c *Communicator) completed(p ranks.Point) error {
	err := c.recordPassed(p.Record, p.Stream)
	if err != nil && c.knownCompleted(p) {
		return nil
	}
	return err
}

// cannotComplete returns nil while completed may return nil once the stream has passed the point,
// and otherwise the error that completed will return.
func (c *Communicator) cannotComplete(p ranks.Point) error {
	if c.knownCompleted(p) {
		return nil
	}
	return c.checkNoAbort("wait")
}

// knownCompleted reports whether the operations before the point are known to have completed.
func (c *Communicator) knownCompleted(p ranks.Point) bool {
	return !p.Lost && c.rec.AllCompleted(p.Record, p.Stream)
}

// endedBy is documented as Ended in package ranks.
func (c *Communicator) endedBy() error {
	if e := c.closing.Load(); e != nil && !e.after {
		return &closedError{fmt.Sprintf("rank %d of %d (%s)", c.rank, c.size, c.dev), e}
	}
	return nil
}

// observeBeforeAbort records which operations have completed, because an abort hides that.
func (c *Communicator) observeBeforeAbort() {
	if c.failed.Load() != nil || c.isClosed() || !c.rec.Pending() {
		return
	}
	poll.Within(callTimeout, func() error {
		_, _, err := c.watch.Observe()
		return err
	})
}
