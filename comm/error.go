package comm

import (
	"errors"
	"fmt"
)

// ErrBroken is what every call on a group returns, wrapped with the first
// cause, after one of its ranks failed or was lost.
var ErrBroken = errors.New("the group is broken")

// ErrMismatch matches the errors of wrong arguments: of those that do not fit the group, as
// the number of slices, their lengths or their devices, and of those that fit no group.
var ErrMismatch = errors.New("the arguments do not fit the group")

// An argumentError is that of a wrong argument, of which its text says all.
type argumentError struct{ err error }

func (e *argumentError) Error() string { return e.err.Error() }

// Unwrap returns ErrMismatch and the cause, for errors.Is.
func (e *argumentError) Unwrap() []error { return []error{ErrMismatch, e.err} }

// brokenError joins ErrBroken with the cause.
type brokenError struct{ cause error }

func (e *brokenError) Error() string { return fmt.Sprintf("comm: %v: %v", ErrBroken, e.cause) }

func (e *brokenError) Unwrap() []error { return []error{ErrBroken, e.cause} }
