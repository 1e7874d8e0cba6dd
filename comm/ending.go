package comm

import (
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
)

// A closing records how this process ended a group.
type closing struct {
	how string // "closed the group" or "shut the group down"
	at  time.Time
}

// A closedError is returned by calls on a group that this process has closed, and by waits
// for operations that were pending at that time.
type closedError struct {
	op         string
	by         *closing
	incomplete bool         // operations may not have completed
	cause      *brokenError // why the group was broken before it was closed; nil if it was not broken
}

func (e *closedError) Error() string {
	text := fmt.Sprintf("comm: %s: this process %s %v ago", e.op, e.by.how, time.Since(e.by.at).Round(time.Millisecond))
	if e.incomplete {
		text += ": the operations may not have completed and their output is undefined"
	}
	if e.cause != nil {
		text += fmt.Sprintf("; it was broken before: %v", e.cause.cause)
	}
	return text
}

// Unwrap returns device.ErrClosed and the cause, for errors.Is.
func (e *closedError) Unwrap() []error {
	if e.cause == nil {
		return []error{device.ErrClosed}
	}
	return []error{device.ErrClosed, e.cause}
}

// errClosed returns the error of a call on a group that this process has closed.
func (g *Group) errClosed(op string) *closedError {
	e := &closedError{op: op, by: g.closing.Load(), cause: g.broken.Load()}
	if e.by == nil { // newGroup has failed
		e.by = &closing{"closed the group", time.Now()}
	}
	return e
}

// errIncomplete returns the error of operations that ended with err and are not known to have
// completed.
func (g *Group) errIncomplete(op string, err error) error {
	if b := g.broken.Load(); b != nil {
		return b
	}
	if g.closing.Load() == nil {
		return g.fail(err)
	}
	if e, ok := err.(*closedError); ok && e.incomplete {
		return e
	}
	e := g.errClosed(op)
	e.incomplete = errors.Is(err, device.ErrClosed)
	return e
}
