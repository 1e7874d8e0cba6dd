package gpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
)

// An Event is an event of the driver, and the flags that it was created with.
type Event struct {
	Raw   cudadrv.Event
	Flags uint32
}

// EventOf returns the driver's event behind a public one.
func EventOf(x handle.Has[Event]) cudadrv.Event { return handle.Of(x).Raw }

// Events is a pool of unused events of a System, without timing. The zero value is empty.
type Events struct {
	mu   sync.Mutex
	free map[*Device][]cudadrv.Event
}

var eventsKey handle.Key

// Events returns the System's pool of events.
func (s *System) Events() *Events {
	return s.Local(&eventsKey, func() any { return new(Events) }).(*Events)
}

// Take returns an unused event.
func (p *Events) Take(d *Device) (cudadrv.Event, error) {
	p.mu.Lock()
	if list := p.free[d]; len(list) > 0 {
		e := list[len(list)-1]
		p.free[d] = list[:len(list)-1]
		p.mu.Unlock()
		return e, nil
	}
	p.mu.Unlock()
	return d.NewEvent(cudadrv.EventDisableTiming)
}

// Give returns an event to the pool. Waits that were enqueued for the event
// stay valid, because CUDA keeps their state.
func (p *Events) Give(d *Device, e cudadrv.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.free == nil {
		p.free = map[*Device][]cudadrv.Event{}
	}
	p.free[d] = append(p.free[d], e)
}

// Len returns the number of unused events of a device.
func (p *Events) Len(d *Device) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free[d])
}

// Close destroys the events when the System is closed.
func (p *Events) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for d, list := range p.free {
		for _, e := range list {
			if d.Err() == nil {
				errs = append(errs, d.DestroyEvent(e))
			}
		}
	}
	p.free = nil
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

// A Sequence serializes operations, whichever stream they are enqueued on, and whichever
// stream a graph with captured ones is launched on. It is used for memory that all these
// operations share. Hold, LetGo, Prepare and Launched implement Preparer for that memory.
type Sequence struct {
	mu     sync.Mutex    // held while an operation is enqueued
	users  []*Stream     // that have had operations; each is retained
	last   *Stream       // the stream of the latest operation, in a graph or not
	behind cudadrv.Event // recorded after the latest operation, if that was in a graph, or 0
	graphs Graphs        // that captured operations
	closed bool
}

// Begin orders s after the operations so far. Until End, other calls of Begin
// block. If the operation is captured, not it but each launch of its graph
// waits.
func (q *Sequence) Begin(s *Stream) error {
	q.mu.Lock()
	err := q.use(s)
	if err == nil {
		err = q.order(s)
	}
	if err != nil {
		q.mu.Unlock()
	}
	return err
}

// End ends the operation that Begin began.
func (q *Sequence) End() { q.mu.Unlock() }

func (q *Sequence) order(s *Stream) error {
	if AnyCapture() { // query the driver only if necessary
		if captured, err := s.Capturing(); captured || err != nil {
			return err
		}
	}
	return q.follow(s)
}

// Hold records that a graph has operations of the sequence.
func (q *Sequence) Hold(g Holder) { q.graphs.Hold(g) }

// LetGo undoes Hold.
func (q *Sequence) LetGo(g Holder) { q.graphs.LetGo(g) }

// Prepare records that a graph with operations of the sequence is launched on s.
func (q *Sequence) Prepare(x HasStream) error {
	s := x.stream()
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.use(s); err != nil {
		return err
	}
	return q.follow(s)
}

// Launched ends what Prepare began. It records an event, so that later
// operations on other streams wait for the graph only, and not for later
// operations on s.
func (q *Sequence) Launched(x HasStream, _ error) {
	s := x.stream()
	q.mu.Lock()
	defer q.mu.Unlock()
	behind, err := s.dev.sys.Events().Take(s.dev)
	if err != nil {
		return // later operations then wait for the whole stream
	}
	if s.dev.RecordEvent(behind, s.h) != nil {
		s.dev.sys.Events().Give(s.dev, behind)
		return
	}
	q.forget() // the earlier event is not needed any more
	q.last, q.behind = s, behind
}

var _ Preparer = (*Sequence)(nil)

// forget returns the event of the latest operation to the pool. The lock is held.
func (q *Sequence) forget() {
	if q.behind != 0 {
		q.last.dev.sys.Events().Give(q.last.dev, q.behind)
	}
	q.behind = 0
}

// Close calls end with the streams that had operations, and releases them. It
// returns an error if a graph with captured operations still exists, or if a
// stream is being captured. No operation can begin meanwhile. name identifies
// the shared memory in errors.
func (q *Sequence) Close(name string, end func(users []*Stream) error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.graphs.Refuse(name); err != nil {
		return err
	}
	for _, s := range q.users {
		if err := s.RefuseCapture(name, "its operations cannot be waited for"); err != nil {
			return err
		}
	}
	errs := []error{end(q.users)}
	for _, s := range q.users {
		errs = append(errs, s.Release())
	}
	q.forget()
	q.users, q.last, q.closed = nil, nil, true
	return errors.Join(errs...)
}

// follow orders s after the latest operation, if it is on another stream. The lock is
// held.
func (q *Sequence) follow(s *Stream) error {
	last := q.last
	defer func() { q.last = s }()
	defer q.forget()
	switch {
	case last == nil || last == s:
		return nil
	case q.behind != 0:
		return s.Wait(q.behind)
	}
	return s.WaitStream(last)
}

// use records that s gets an operation, and keeps s until the end of the
// sequence. The lock is held.
func (q *Sequence) use(s *Stream) error {
	if q.closed {
		return fmt.Errorf("use the memory that the operations share: %w", ErrClosed)
	}
	if slices.Contains(q.users, s) {
		return nil
	}
	if !s.Retain() {
		return s.Check("use", nil)
	}
	q.users = append(q.users, s)
	return nil
}
