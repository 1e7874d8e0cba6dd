package comm

import (
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
)

// A closing is how this process has ended a group.
type closing struct {
	how string // "closed the group" or "shut the group down"
	at  time.Time
}

// A closedError is returned by calls on a group that this process has ended, and by waits for
// operations that were in flight when the group ended.
type closedError struct {
	op     string
	by     *closing
	undone bool         // operations may not have completed
	cause  *brokenError // why the group was broken before it was ended; nil if it was not broken
}

func (e *closedError) Error() string {
	text := fmt.Sprintf("comm: %s: this process %s %v ago", e.op, e.by.how, time.Since(e.by.at).Round(time.Millisecond))
	if e.undone {
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

// closed is the error of a call on a group that this process has ended.
func (g *Group) closed(op string) *closedError {
	e := &closedError{op: op, by: g.closing.Load(), cause: g.broken.Load()}
	if e.by == nil { // newGroup has failed
		e.by = &closing{"closed the group", time.Now()}
	}
	return e
}

// undone is the error of operations that ended with err, and were not seen to complete.
func (g *Group) undone(op string, err error) error {
	if b := g.broken.Load(); b != nil {
		return b
	}
	if g.closing.Load() == nil {
		return g.fail(err)
	}
	if e, ok := err.(*closedError); ok && e.undone {
		return e
	}
	e := g.closed(op)
	e.undone = errors.Is(err, device.ErrClosed)
	return e
}
