package gds

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
)

// ErrChanged is returned, wrapped, by a read of a file that has changed since it was
// opened: another process has written it or changed its length.
var ErrChanged = errors.New("the file has changed since it was opened")

// An Error reports a failed operation on a file. It wraps the cause: an errno,
// io.ErrUnexpectedEOF, ErrChanged, the cause of a context, or an error of the device.
type Error struct {
	Op     string // such as "read"
	Path   string
	Offset int64  // position of the failure in the file; -1 if the error concerns the whole file
	Wanted int64  // bytes, from Offset on
	Got    int64  // bytes done
	Engine Engine // Auto if no engine was involved
	Err    error
}

func (e *Error) Error() string {
	if e.Offset < 0 {
		return fmt.Sprintf("gds: %s %s%s", e.Op, e.Path, e.story())
	}
	return fmt.Sprintf("gds: %s %s at byte %d%s", e.Op, e.Path, e.Offset, e.story())
}

// story returns the part of the message after the position.
func (e *Error) story() string {
	var b strings.Builder
	if e.Offset >= 0 {
		fmt.Fprintf(&b, ": %d of %d bytes", e.Got, e.Wanted)
	}
	if e.Engine != Auto {
		fmt.Fprintf(&b, " by engine %s", e.Engine)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if a := advice(e.Err); a != "" {
		b.WriteString(": " + a)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// advice returns a remedy for a cause, or "".
func advice(err error) string {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the file ends too early: get it again, and do not shorten it while it is read"
	case errors.Is(err, ErrChanged):
		return "open it again when no program writes it"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "make room in the file system and write it again"
	case errors.Is(err, syscall.EFBIG):
		return "the file system or the process's limit (ulimit -f) does not allow a file of this size"
	case errors.Is(err, syscall.EMFILE):
		return "raise the process's limit of open files (ulimit -n)"
	case errors.Is(err, syscall.EIO):
		return "the device or the network below the file system failed: look at the system's log"
	}
	return ""
}

// fail makes an Error for the whole file.
func (f *File) fail(op string, err error) error {
	return &Error{Op: op, Path: f.path, Offset: -1, Err: err}
}
