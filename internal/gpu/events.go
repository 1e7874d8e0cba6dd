package gpu

import (
	"errors"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
)

// Events is a pool of unused events of a System, without timing. The zero value is empty.
type Events struct {
	mu    sync.Mutex
	spare map[*Device][]cudadrv.Event
}

var eventsKey kept.Key

// Events returns the System's pool of events.
func (s *System) Events() *Events {
	return s.Local(&eventsKey, func() any { return new(Events) }).(*Events)
}

// Take returns an unused event.
func (p *Events) Take(d *Device) (cudadrv.Event, error) {
	p.mu.Lock()
	if list := p.spare[d]; len(list) > 0 {
		e := list[len(list)-1]
		p.spare[d] = list[:len(list)-1]
		p.mu.Unlock()
		return e, nil
	}
	p.mu.Unlock()
	return d.NewEvent(cudadrv.EventDisableTiming)
}

// Give returns an event to the pool. Waits that were enqueued for it stay valid, because
// CUDA keeps their state.
func (p *Events) Give(d *Device, e cudadrv.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.spare == nil {
		p.spare = map[*Device][]cudadrv.Event{}
	}
	p.spare[d] = append(p.spare[d], e)
}

// Len returns the number of unused events of a device.
func (p *Events) Len(d *Device) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.spare[d])
}

// Close destroys the events when the System is closed.
func (p *Events) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for d, list := range p.spare {
		for _, e := range list {
			if d.Err() == nil {
				errs = append(errs, d.DestroyEvent(e))
			}
		}
	}
	p.spare = nil
	return errors.Join(errs...)
}

// Mark records an event after everything enqueued on s so far and calls fn with it. Waits
// that fn enqueues stay valid although the event is reused afterwards.
func (s *Stream) Mark(fn func(e cudadrv.Event) error) error {
	pool := s.dev.sys.Events()
	e, err := pool.Take(s.dev)
	if err != nil {
		return err
	}
	defer pool.Give(s.dev, e)
	if err := s.dev.RecordEvent(e, s.h); err != nil {
		return err
	}
	return fn(e)
}
