package stream

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// Capturing reports whether the stream is being captured into a graph
// (cuStreamIsCapturing, torch.cuda.is_current_stream_capturing): operations that are
// enqueued on it are recorded and do not run. It also returns true for a capture that an
// illegal call has invalidated, until its end.
func (s *Stream) Capturing() (bool, error) {
	if err := s.check("stream: capturing"); err != nil {
		return false, err
	}
	return gpu.StreamOf(s).Capturing()
}

// ErrCapturing is returned by Close of a graph that is being captured.
var ErrCapturing = gpu.ErrCapturing

// note reports whether a record of e on s is captured.
func (e *Event) note(s *Stream) (captured bool, err error) {
	if !gpu.AnyCapture() {
		return false, nil
	}
	captured, err = gpu.StreamOf(s).Capturing()
	if captured && gpu.EventFlagsOf(e)&cudadrv.EventInterprocess != 0 {
		return false, &device.CaptureError{Op: "stream: record event", Object: s.String(),
			Advice: "an event of several processes cannot be recorded in a capture: record one without Interprocess, or record it behind the launch"}
	}
	return captured, err
}

// checkHost is check for calls that query or wait for the event on the host. They are
// illegal for a captured event.
func (e *Event) checkHost(op string) error {
	if err := e.check(op); err != nil {
		return err
	}
	return gpu.DeviceOf(e.dev).RefuseCaptured(op, e.captured.Load())
}
