package comm

import (
	"errors"
	"fmt"
)

// ErrBroken is what every call on a group returns, wrapped with the first
// cause, after one of its ranks failed or was lost.
var ErrBroken = errors.New("the group is broken")

// ErrMismatch is what a call returns, wrapped, when its arguments do not fit
// the group: the number of slices, their lengths or their devices.
var ErrMismatch = errors.New("the arguments do not fit the group")

// brokenError joins ErrBroken with the cause.
type brokenError struct{ cause error }

func (e *brokenError) Error() string { return fmt.Sprintf("comm: %v: %v", ErrBroken, e.cause) }

func (e *brokenError) Unwrap() []error { return []error{ErrBroken, e.cause} }
