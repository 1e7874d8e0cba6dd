package stream

import (
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
)

// A CallbackError reports a panic of a callback.
type CallbackError struct {
	Stream string
	Panic  any
	Stack  string
}

func (e *CallbackError) Error() string {
	return fmt.Sprintf("stream: callback on %s panicked: %v\n%s", e.Stream, e.Panic, e.Stack)
}

// Unwrap returns the value of the panic if that is an error.
func (e *CallbackError) Unwrap() error {
	err, _ := e.Panic.(error)
	return err
}

// Callback calls fn when everything enqueued on s so far has completed, and
// makes operations that are enqueued later wait until fn has returned
// (cuLaunchHostFunc). It returns at once. If the device fails before that, fn
// is not called.
//
// One thread of the driver runs the callbacks of all streams of a device, one after the other. So fn
// should be short, and must not wait for another callback. It must not use a device, nor wait for work on one, nor call
// runtime.Goexit as testing.T.FailNow does. It may close memory, and allocate memory that
// is cached; an allocation that needs the driver fails. Data that fn has written is
// visible after Sync. A panic in fn ends only fn; the next Sync or Query of s after it
// returns the panic as a *CallbackError.
//
// While s is captured into a graph, fn becomes part of the graph: each launch calls it,
// and it lives as long as the graph and its launches.
func (s *Stream) Callback(fn func()) error {
	const op = "stream: callback"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if fn == nil {
		return fmt.Errorf("%s on %s: no function given", op, s)
	}
	return gpu.StreamOf(s).LaunchHostFunc(s.guard(fn))
}

// guard converts a panic of fn, so that it does not reach the C code that calls fn. A Goexit
// cannot be stopped: it is logged before it ends the process.
func (s *Stream) guard(fn func()) func() {
	return func() {
		defer gpu.EnterCallback()()
		returned := false
		defer func() {
			switch v := recover(); {
			case v != nil:
				s.panicked.CompareAndSwap(nil, &CallbackError{Stream: s.String(), Panic: v, Stack: string(debug.Stack())})
			case !returned:
				slog.Error("chorus: a callback called runtime.Goexit, as testing.T.FailNow does: the thread belongs to the driver, so the process ends now",
					"stream", s.String(), "stack", string(debug.Stack()))
			}
			s.called.Add(1)
		}()
		fn()
		returned = true
	}
}

// seeCallbacks ends a wait for the stream, and returns err, or else the panic
// of a callback.
func (s *Stream) seeCallbacks(err error) error {
	if s.called.Load() == 0 || err != nil { // the load makes writes of the callbacks visible
		return err
	}
	if p := s.panicked.Swap(nil); p != nil {
		return p
	}
	return nil
}

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
	if captured && handle.Of(e).Flags&cudadrv.EventInterprocess != 0 {
		return false, &device.CaptureError{Op: "stream: record event", Object: s.String(),
			Advice: "an event of several processes cannot be recorded in a capture: record one without Interprocess, or record it behind the launch"}
	}
	return captured, err
}

// checkHost is check for calls that query or wait for the event on the host,
// which are illegal for a captured event.
func (e *Event) checkHost(op string) error {
	if err := e.check(op); err != nil {
		return err
	}
	return gpu.DeviceOf(e.dev).RefuseCaptured(op, e.captured.Load())
}
