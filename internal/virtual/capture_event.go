package virtual

import (
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A capturedMark is what an event has recorded in a capture: the nodes that
// come before it. It is no point in time, so nobody can wait for it but streams.
type capturedMark struct {
	capture *capture
	nodes   []int
}

// recordCaptured is EventRecord on a stream that is being captured. m.mu is
// held.
func (e *event) recordCaptured(s *stream) {
	e.captured = &capturedMark{s.capture, slices.Clone(s.tail)}
}

// spoils is the result of a call of the host about an event that was recorded
// in a capture: such a call spoils the capture. m.mu is held.
func (e *event) spoils() cudadrv.Result {
	if e.captured == nil {
		return cudadrv.Success
	}
	e.captured.capture.invalid = true
	return cudadrv.ErrorCapturedEvent
}

// waitCaptured is StreamWaitEvent where the stream is being captured, or the
// event was recorded in a capture. m.mu is held.
func (s *stream) waitCaptured(e *event) cudadrv.Result {
	k := e.captured
	switch {
	case k == nil && e.mark() == nil:
		return cudadrv.Success // never recorded
	case k == nil:
		s.capture.invalid = true
		return cudadrv.ErrorStreamCaptureIsolation
	case k.capture.invalid && s.capture == k.capture:
		return cudadrv.ErrorStreamCaptureInvalidated
	case k.capture.ended || k.capture.invalid:
		if s.capture != nil {
			s.capture.invalid = true
		}
		return cudadrv.ErrorInvalidValue
	case s == s.dev.legacy:
		k.capture.invalid = true
		return cudadrv.ErrorStreamCaptureImplicit
	case s.capture == nil:
		k.capture.join(s, k.nodes)
	case s.capture != k.capture:
		s.capture.invalid, k.capture.invalid = true, true
		return cudadrv.ErrorStreamCaptureMerge
	default:
		s.tail = union(s.tail, k.nodes)
	}
	return cudadrv.Success
}
