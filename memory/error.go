package memory

import (
	"errors"
	"fmt"
)

// ErrView is what Close returns, wrapped, on a slice that Make did not return.
var ErrView = errors.New("only the slice that Make returned can be closed")

// An OutOfMemoryError says that a device could not give the memory. It matches
// device.ErrorOutOfMemory (torch.cuda.OutOfMemoryError).
type OutOfMemoryError struct {
	Device    string // such as "cuda:3"
	Requested uint64 // bytes
	Free      uint64 // bytes, as the driver sees them
	Total     uint64 // bytes
	Err       error  // the driver's error
}

func (e *OutOfMemoryError) Error() string {
	return fmt.Sprintf("memory: out of memory on %s: want %d bytes, %d of %d free: %v",
		e.Device, e.Requested, e.Free, e.Total, e.Err)
}

// Unwrap returns the driver's error.
func (e *OutOfMemoryError) Unwrap() error { return e.Err }
