package ddp

import (
	"fmt"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/groups"
)

// An argumentError is the error of a wrong argument. It matches comm.ErrMismatch.
type argumentError struct{ err error }

func (e *argumentError) Error() string { return e.err.Error() }

// Unwrap returns comm.ErrMismatch and the cause, for errors.Is.
func (e *argumentError) Unwrap() []error { return []error{comm.ErrMismatch, e.err} }

// refuse returns the error of a wrong argument of op.
func refuse(op, format string, args ...any) error {
	return unfit(fmt.Errorf("ddp: %s: "+format, append([]any{op}, args...)...))
}

// unfit makes the error of a wrong argument of the error of another package.
func unfit(err error) error { return &argumentError{err} }

// checkGroup returns an error if a reducer or a sharder of g cannot be made.
func checkGroup(g *comm.Group, op string) error {
	if g == nil {
		return fmt.Errorf("ddp: %s: no group given", op)
	}
	if err := groups.Of(g).Check(op); err != nil {
		return fmt.Errorf("ddp: %w", err)
	}
	return nil
}
