package machine

import (
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A capturedMark is the state of an event recorded in a capture: the nodes that
// precede it. It is not a point in time, so only streams can wait for it.
type capturedMark struct {
	capture *Capture
	nodes   []int
}

// recordCaptured implements EventRecord on a captured stream. m.mu is held.
func (e *event) recordCaptured(s *Stream) {
	e.captured = &capturedMark{s.capture, slices.Clone(s.tail)}
}

// spoils returns the result of a host call on an event that was recorded in a
// capture. Such a call invalidates the capture. m.mu is held.
func (e *event) spoils() cudadrv.Result {
	if e.captured == nil {
		return cudadrv.Success
	}
	e.captured.capture.invalid = true
	return cudadrv.ErrorCapturedEvent
}

// waitCaptured implements StreamWaitEvent if the stream is being captured or the
// event was recorded in a capture. m.mu is held.
func (s *Stream) waitCaptured(e *event) cudadrv.Result {
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

// addExternal records an operation on an event that each launch of the graph performs: a record,
// or a wait for the latest record at that time. m.mu is held.
func (s *Stream) addExternal(name string, h cudadrv.Event, l Launch) {
	m, x := s.dev.m, s.capture
	x.AddLaunch(name, [2]cudadrv.DevicePtr{}, l, []*Stream{s})
	x.nodes[len(x.nodes)-1].check = func() cudadrv.Result {
		if m.event(h) == nil {
			return cudadrv.ErrorInvalidValue
		}
		return cudadrv.Success
	}
}

// An externalRecord is a record of an event by a graph.
type externalRecord struct{ e *event }

func (externalRecord) Hold(int) {}

func (r externalRecord) Enqueue(on []*Stream) { r.e.record("cuEventRecord", on[0]) }

// An externalWait is a wait of a graph for an event.
type externalWait struct{ e *event }

func (externalWait) Hold(int) {}

func (w externalWait) Enqueue(on []*Stream) {
	if k := w.e.mark(); k != nil {
		on[0].Wait("cuStreamWaitEvent", k)
	}
}
