package comm

import (
	"errors"
	"fmt"
)

// ErrBroken is matched by the errors of all calls on a group after one of its ranks failed
// or was lost. The errors also wrap the first cause.
var ErrBroken = errors.New("the group is broken")

// ErrMismatch is matched by the errors of invalid arguments, for example if the number of
// slices, their lengths or their devices do not fit the group.
var ErrMismatch = errors.New("the arguments do not fit the group")

// An argumentError makes an error match ErrMismatch without changing its text.
type argumentError struct{ err error }

func (e *argumentError) Error() string { return e.err.Error() }

// Unwrap returns ErrMismatch and the cause, for errors.Is.
func (e *argumentError) Unwrap() []error { return []error{ErrMismatch, e.err} }

// brokenError wraps ErrBroken and the cause.
type brokenError struct{ cause error }

func (e *brokenError) Error() string { return fmt.Sprintf("comm: %v: %v", ErrBroken, e.cause) }

func (e *brokenError) Unwrap() []error { return []error{ErrBroken, e.cause} }
