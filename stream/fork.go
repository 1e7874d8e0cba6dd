package stream

import (
	"errors"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
)

// Join makes work that is enqueued on s from now on wait for everything enqueued on the
// others so far; s may be among them. It is WaitStream for each of them. For Chorus's own
// packages.
func Join(s *Stream, others []*Stream) error {
	for _, o := range others {
		if err := s.WaitStream(o); err != nil {
			return err
		}
	}
	return nil
}

// Fork makes work that is enqueued on the others from now on wait for everything enqueued
// on s so far: with one event, where WaitStream has one for each. s may be among them.
// Where it fails for one, those behind that one do not wait. For Chorus's own packages.
func Fork(s *Stream, others []*Stream) error {
	some := false
	for _, o := range others {
		if err := o.mayFollow(s); err != nil {
			return err
		}
		some = some || o != s
	}
	if !some {
		return nil
	}
	return s.marked(func(e cudadrv.Event) error {
		for _, o := range others {
			if o == s {
				continue
			}
			if err := o.wait(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// wait enqueues the wait for an event.
func (s *Stream) wait(e cudadrv.Event) error {
	return s.dev.Do("cuStreamWaitEvent", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamWaitEvent(s.h, e, 0) })
}

// marked calls fn with an event behind everything enqueued on s so far. What fn has
// enqueued to wait for it waits for that, though the event is then used again: CUDA keeps
// what a wait needs.
func (s *Stream) marked(fn func(e cudadrv.Event) error) error {
	m := s.dev.System().Local(&marksKey, func() any { return new(marks) }).(*marks)
	e, err := m.take(s.dev)
	if err != nil {
		return err
	}
	defer m.keep(s.dev, e)
	err = s.dev.Do("cuEventRecord", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e, s.h) })
	if err != nil {
		return err
	}
	return fn(e)
}

// marks are the events of a System that nobody uses at the moment.
type marks struct {
	mu    sync.Mutex
	spare map[*device.Device][]cudadrv.Event
}

var marksKey kept.Key

func (m *marks) take(d *device.Device) (e cudadrv.Event, err error) {
	m.mu.Lock()
	if list := m.spare[d]; len(list) > 0 {
		e, m.spare[d] = list[len(list)-1], list[:len(list)-1]
		m.mu.Unlock()
		return e, nil
	}
	m.mu.Unlock()
	err = d.Do("cuEventCreate", func(drv cudadrv.Driver) (r cudadrv.Result) {
		e, r = drv.EventCreate(cudadrv.EventDisableTiming)
		return r
	})
	return e, err
}

func (m *marks) keep(d *device.Device, e cudadrv.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.spare == nil {
		m.spare = map[*device.Device][]cudadrv.Event{}
	}
	m.spare[d] = append(m.spare[d], e)
}

// Close gives the events up, with the System.
func (m *marks) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for d, list := range m.spare {
		for _, e := range list {
			if d.Err() == nil {
				errs = append(errs, d.Do("cuEventDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) }))
			}
		}
	}
	m.spare = nil
	return errors.Join(errs...)
}
