package gpu

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// joinOther is the advice for a call that would make the default stream wait for captured
// operations.
const joinOther = "the default stream takes part in no capture: let another stream wait"

// RefuseJoin returns an error if s is the default stream. It cannot take part in a
// capture, and so cannot wait for a captured object.
func (s *Stream) RefuseJoin(op, object string) error {
	if s.kind != DefaultStream {
		return nil
	}
	return s.dev.sys.errs.Captured(op, object, joinOther)
}

// WaitStream makes operations that are enqueued on s from now on wait for everything
// enqueued on o so far.
func (s *Stream) WaitStream(o *Stream) error {
	if s == o {
		return s.Check("stream: wait for a stream", nil)
	}
	if err := s.mayFollow(o); err != nil {
		return err
	}
	return s.Follow(o)
}

// mayFollow checks that s can wait for o.
func (s *Stream) mayFollow(o *Stream) error {
	const op = "stream: wait for a stream"
	if err := o.CheckIdle(op, nil); err != nil {
		return err
	}
	if err := s.CheckIdle(op, nil); err != nil {
		return err
	}
	if err := s.CheckSystem(op, o.dev); err != nil {
		return err
	}
	if s.kind == DefaultStream {
		return o.RefuseCapture(op, joinOther)
	}
	return nil
}

// Follow is WaitStream without the check that the streams are open, for streams
// that Retain keeps alive.
func (s *Stream) Follow(o *Stream) error { return o.Mark(s.Wait) }

// A streamPointer is a pointer to a public stream.
type streamPointer interface {
	comparable
	HasStream
}

// checkGiven validates that the streams are not nil. If others is empty, s may be nil,
// since nothing waits.
func checkGiven[S streamPointer](s S, others []S) error {
	var none S
	if slices.Contains(others, none) || s == none && len(others) > 0 {
		return fmt.Errorf("stream: wait for a stream: no stream given")
	}
	return nil
}

// Join makes operations that are enqueued on s from now on wait for everything enqueued on
// the others so far, like WaitStream for each of the others. others may contain s.
func Join[S streamPointer](s S, others []S) error {
	if err := checkGiven(s, others); err != nil {
		return err
	}
	for _, o := range others {
		if err := s.stream().WaitStream(o.stream()); err != nil {
			return err
		}
	}
	return nil
}

// Fork makes operations that are enqueued on the others from now on wait for everything
// enqueued on s so far. It uses one event, whereas WaitStream would use one for each.
// others may contain s. If Fork fails for one stream, the later ones do not wait.
func Fork[S streamPointer](s S, others []S) error {
	if err := checkGiven(s, others); err != nil || len(others) == 0 {
		return err
	}
	from, some := s.stream(), false
	for _, o := range others {
		if err := o.stream().mayFollow(from); err != nil {
			return err
		}
		some = some || o.stream() != from
	}
	if !some {
		return nil
	}
	return from.Mark(func(e cudadrv.Event) error {
		for _, o := range others {
			if o.stream() == from {
				continue
			}
			if err := o.stream().Wait(e); err != nil {
				return err
			}
		}
		return nil
	})
}
