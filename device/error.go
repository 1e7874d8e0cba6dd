package device

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
)

// A Status is a status code of the CUDA driver (CUresult). errors.Is compares
// against its constants; its text is the C name.
type Status int32

// The status codes that programs distinguish. Other codes also print their C name.
const (
	ErrorInvalidValue   = Status(cudadrv.ErrorInvalidValue)
	ErrorOutOfMemory    = Status(cudadrv.ErrorOutOfMemory)
	ErrorInvalidDevice  = Status(cudadrv.ErrorInvalidDevice)
	ErrorInvalidContext = Status(cudadrv.ErrorInvalidContext)
	ErrorInvalidHandle  = Status(cudadrv.ErrorInvalidHandle)
	ErrorNotReady       = Status(cudadrv.ErrorNotReady)
	ErrorIllegalAddress = Status(cudadrv.ErrorIllegalAddress)
	ErrorLaunchFailed   = Status(cudadrv.ErrorLaunchFailed)
	ErrorNotPermitted   = Status(cudadrv.ErrorNotPermitted)
	ErrorNotSupported   = Status(cudadrv.ErrorNotSupported)

	ErrorCooperativeLaunchTooLarge = Status(cudadrv.ErrorCooperativeLaunchTooLarge)
)

// Error returns the C name, such as CUDA_ERROR_OUT_OF_MEMORY.
func (s Status) Error() string { return cudadrv.Result(s).Error() }

// An Error reports a failed call of the driver. After a sticky error (torch's
// AcceleratorError) every later call on the device fails too, and its error contains the
// first one.
type Error struct {
	Op     string // the C function, such as cuMemAllocAsync
	Device int    // the ordinal, or -1 if the error concerns no device
	Err    Status
	Detail string // what virtual devices report about the cause; "" on CUDA
	First  *Error // the error that lost the device, if this is a later one
}

func (e *Error) Error() string {
	where := ""
	if e.Device >= 0 {
		where = fmt.Sprintf(" on device %d", e.Device)
	}
	text := fmt.Sprintf("device: %s%s: %s", e.Op, where, e.Err)
	if m := cudadrv.Result(e.Err).Meaning(); m != "" {
		text += " (" + m + ")"
	}
	switch {
	case e.First != nil:
		return text + "; the device was lost before: " + e.First.Error()
	case e.Detail != "":
		text += ": " + e.Detail
	}
	if e.Sticky() {
		text += "; the device is lost to this process"
		if e.Detail == "" && env.LaunchBlocking.Value() != "1" {
			text += ", perhaps by an earlier operation: CUDA_LAUNCH_BLOCKING=1 lets each one report its own error"
		}
	}
	return text
}

// Unwrap returns the status, for errors.Is.
func (e *Error) Unwrap() error { return e.Err }

// Sticky reports whether every later call on the device will fail too, until
// the process ends. An earlier asynchronous operation is then the cause, not
// necessarily Op.
func (e *Error) Sticky() bool { return cudadrv.Result(e.Err).Sticky() }

// A CaptureError reports a call that is illegal while a stream is captured into a graph.
// Chorus detected it before it reached the driver, so the capture continues.
type CaptureError struct {
	Op     string // such as "memory: copy to host"
	Object string // the captured stream, or the object that was recorded on it
	Advice string // what to do instead
}

func (e *CaptureError) Error() string {
	return fmt.Sprintf("%s: %s is captured into a graph: %s", e.Op, e.Object, e.Advice)
}

// Unwrap returns CUDA's status for such calls.
func (e *CaptureError) Unwrap() error { return Status(cudadrv.ErrorStreamCaptureUnsupported) }

// ErrClosed is returned, wrapped with the operation, by methods after Close.
var ErrClosed = gpu.ErrClosed

// A LibraryError reports that a shared library was not found, with all paths that were
// tried. It matches errors.ErrUnsupported.
type LibraryError = dl.Error

// An UnsupportedError reports that the loaded libraries or the hardware lack a feature. It
// matches errors.ErrUnsupported.
type UnsupportedError struct {
	Feature string // such as ncclCommShrink
	Need    string // such as NCCL 2.27.3
	Have    string // such as NCCL 2.23.4
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s needs %s; this machine has %s", e.Feature, e.Need, e.Have)
}

// Is reports whether target is errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// errorsOf returns the constructors of a System's errors for package gpu.
type errorsOf struct{ s *System }

func (e errorsOf) Failed(op string, ordinal int, r cudadrv.Result) error {
	return e.s.fail(op, ordinal, r)
}

func (e errorsOf) Lost(ordinal int) error { return e.s.devs[ordinal].Err() }

func (errorsOf) Captured(op, object, advice string) error {
	return &CaptureError{Op: op, Object: object, Advice: advice}
}

func (errorsOf) Status(r cudadrv.Result) error { return Status(r) }

func (errorsOf) Known(err error) bool {
	_, known := errors.AsType[*Error](err)
	return known
}

func (s *System) fail(op string, ordinal int, r cudadrv.Result) error {
	if r == cudadrv.ErrorDeinitialized && gpu.SystemOf(s).Closed() {
		return fmt.Errorf("device: %s on device %d: the System was closed: open another: %w", op, ordinal, ErrClosed)
	}
	e := &Error{Op: op, Device: ordinal, Err: Status(r)}
	if ordinal < 0 || ordinal >= len(s.devs) {
		return e
	}
	d := s.devs[ordinal]
	e.Detail = gpu.SystemOf(s).Explain(gpu.DeviceOf(d).Handle())
	if first := d.lost.Load(); first != nil {
		e.First = first // independent of the driver's current answer
	} else if e.Sticky() && !d.lost.CompareAndSwap(nil, e) {
		e.First = d.lost.Load()
	}
	return e
}
