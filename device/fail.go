package device

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// errorsOf makes the errors of a System for package gpu.
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
