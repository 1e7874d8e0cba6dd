package nccl

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// This file decides whether an operation completed. Every wait and the watchdog ask here.
// The kernels of NCCL and Chorus leave their stream when they are aborted. So a passed stream
// proves that an operation completed only if no abort had begun by then: a caller
// observes the stream first, and then asks whether an abort has begun (sound). The flight
// recorder keeps each completion that was proved (observed). After an abort it is the only
// proof (known).

// A closing is what this process did to end a communicator, or its operations.
type closing struct {
	how   string // such as "closed the communicator"
	at    time.Time
	abort bool // streams pass operations that have not completed from then on
	after bool // the communicator had failed before
}

func (e *closing) String() string {
	return fmt.Sprintf("this process %s %v ago", e.how, time.Since(e.at).Round(time.Millisecond))
}

// An abortFlag is raised by the first abort among communicators that share NCCL's abort flag:
// a parent with Config.SplitShare and its children. NCCL then ends the operations of all
// these communicators.
type abortFlag struct{ by atomic.Pointer[closing] }

// A closedError is returned by calls on a communicator that this process has ended, and by waits
// for its operations.
type closedError struct {
	what string // the operation or the wait, and the rank
	by   *closing
}

func (e *closedError) Error() string { return fmt.Sprintf("nccl: %s: %s", e.what, e.by) }

// Unwrap returns device.ErrClosed, for errors.Is.
func (e *closedError) Unwrap() error { return device.ErrClosed }

// endNow notes how this process ends the communicator, before it does.
func (c *Communicator) endNow(how string, abort bool) {
	e := &closing{how: how, at: time.Now(), abort: abort, after: c.failed.Load() != nil}
	c.closing.CompareAndSwap(nil, e)
	if abort {
		c.flag.by.CompareAndSwap(nil, e)
		c.rec.cut(Aborted)
	}
}

// endedBy is what this process did that may have ended operations of c, or nil.
func (c *Communicator) endedBy() *closing {
	if e := c.closing.Load(); e != nil && e.abort {
		return e
	}
	if e := c.flag.by.Load(); e != nil {
		return &closing{how: e.how + ", of a communicator that shares its resources (Config.SplitShare or ShrinkShare),", at: e.at}
	}
	return nil
}

// sound returns nil if no operation of c can have left its stream without completing so
// far, and otherwise why one can.
func (c *Communicator) sound(what string) error {
	if c.failed.Load() == nil {
		if e := c.endedBy(); e != nil {
			return c.uncertain(what, e)
		}
	}
	if err := c.Err(); err != nil {
		return err
	}
	if e := c.endedBy(); e != nil {
		return c.uncertain(what, e)
	}
	return nil
}

// uncertain is the error of operations that may not have completed.
func (c *Communicator) uncertain(what string, e *closing) error {
	return &closedError{fmt.Sprintf("%s on rank %d of %d (%s): the operations may not have completed and their output is undefined", what, c.rank, c.size, c.dev), e}
}

// observed notes that the stream was seen to have passed the operations up to a record,
// and reports whether this shows that they completed.
func (c *Communicator) observed(record uint64, on uintptr) error {
	if err := c.sound("wait"); err != nil {
		return err
	}
	if err := c.peersLost(); err != nil {
		return err
	}
	c.rec.complete(record, on)
	return nil
}

// peersLost returns an error if copy engines have read from a device that was lost: a stream
// that waits for a lost device goes on without the data.
func (c *Communicator) peersLost() error {
	if devs := c.sources.Load(); devs != nil {
		for rank, dev := range *devs {
			if _, _, err := dev.MemoryInfo(); err != nil { // which asks the driver
				return fmt.Errorf("nccl: wait on rank %d of %d (%s): rank %d has given no data: %w", c.rank, c.size, c.dev, rank, err)
			}
		}
	}
	return nil
}

// fetches notes that copy engines read from the devices of all ranks.
func (g *group) fetches() {
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

// A Point is a place behind the operations that a communicator had on a stream so far. For
// Chorus's own packages.
type Point struct {
	c      *Communicator
	stream uintptr
	record uint64 // of the last operation; 0 is none
	lost   bool   // the recorder has lost some
}

// Point returns the place behind the operations of c on s that were issued so far. An event
// that marks the place is recorded afterwards. For Chorus's own packages.
func (c *Communicator) Point(s *stream.Stream) Point {
	record, lost := c.rec.lastOn(s)
	return Point{c, uintptr(s.Raw()), record, lost}
}

// Passed is called after the stream was seen to have passed the point. It returns nil if the
// operations before the point have completed, and otherwise why they may not have. For
// Chorus's own packages.
func (p Point) Passed() error {
	err := p.c.observed(p.record, p.stream)
	if err != nil && p.known() {
		return nil
	}
	return err
}

// Hopeless returns nil while Passed may return nil once the stream has passed the point,
// and otherwise the error that Passed will return. For Chorus's own packages.
func (p Point) Hopeless() error {
	if p.known() {
		return nil
	}
	return p.c.sound("wait")
}

// known reports whether the operations before the point are known to have completed.
func (p Point) known() bool { return !p.lost && p.c.rec.known(p.record, p.stream) }

// Ended returns how this process has ended c, an error that matches device.ErrClosed, or nil:
// by Abort, Close, Shutdown, or Shrink with ShrinkAbort. If c had failed before, Ended
// returns nil, and Err has the cause.
func (c *Communicator) Ended() error {
	if e := c.closing.Load(); e != nil && !e.after {
		return &closedError{fmt.Sprintf("rank %d of %d (%s)", c.rank, c.size, c.dev), e}
	}
	return nil
}

// lastLook notes which operations have completed, before an abort hides that.
func (c *Communicator) lastLook() {
	if c.failed.Load() != nil || c.over() || !c.rec.pending() {
		return
	}
	poll.Within(callPatience, func() error {
		_, _, err := c.observe()
		return err
	})
}
