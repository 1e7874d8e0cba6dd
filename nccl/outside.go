package nccl

import "fmt"

// A GroupError is a call that was refused within Group, because it waits for operations
// or comes after them, and those of the group are enqueued when it ends. It matches
// ErrorInvalidUsage.
type GroupError struct {
	Op string // such as "comm: wait"
}

func (e *GroupError) Error() string {
	return fmt.Sprintf("%s: within nccl.Group: nothing of the group is enqueued before it ends: call it afterwards", e.Op)
}

// Unwrap returns ErrorInvalidUsage, for errors.Is.
func (e *GroupError) Unwrap() error { return ErrorInvalidUsage }

// RefuseGroup returns a *GroupError if the calling goroutine is within Group, and costs
// next to nothing while no group is open. For Chorus's own packages.
func RefuseGroup(op string) error {
	if openGroup() == nil {
		return nil
	}
	return &GroupError{op}
}
