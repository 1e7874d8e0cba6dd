package ddp

import (
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// A mark is a point in a stream that later steps wait for. It does not reach from
// one capture of a graph into another, or out of one: there the program orders the
// launches.
type mark struct {
	event   *stream.Event
	capture uint64 // the capture that set it, or 0
}

// newMark marks where s is.
func newMark(s *stream.Stream) (*mark, error) {
	e, err := s.Record(nil)
	return &mark{event: e}, err
}

func (m *mark) set(s *stream.Stream) (err error) {
	if m.capture, err = gpu.StreamOf(s).CaptureID(); err != nil {
		return err
	}
	return m.event.Record(s)
}

func (m *mark) wait(s *stream.Stream) error {
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil || capture != m.capture {
		return err
	}
	return s.Wait(m.event)
}

func (m *mark) close() error {
	if m == nil {
		return nil
	}
	return m.event.Close()
}
