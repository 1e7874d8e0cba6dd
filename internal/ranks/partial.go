package ranks

import "errors"

// A PartialError is the error of an operation that failed after a part of it was enqueued. The other
// ranks may wait for the rest, so the communicator cannot be used any more.
type PartialError struct{ Err error }

func (e *PartialError) Error() string { return e.Err.Error() + "; a part of the operation is enqueued" }

// Unwrap returns the cause.
func (e *PartialError) Unwrap() error { return e.Err }

// Partial reports whether err has a PartialError.
func Partial(err error) bool {
	_, ok := errors.AsType[*PartialError](err)
	return ok
}
