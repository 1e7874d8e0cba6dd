package gpu

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/timeline"
)

// maxBehind limits the moments that an operation begins after.
const maxBehind = 8

// A moment is the time of an event of a timing. An operation that its stream begins at once after
// others shares the moments of their ends, so that no further event delays the device.
type moment struct {
	t     *timing
	event cudadrv.Event // belongs to the pair, and is reused after when is known
	when  atomic.Pointer[time.Time]
}

// read reads the time if the device has passed the event. The zero time means that the driver does
// not tell it.
func (m *moment) read(drv cudadrv.Driver) (ready bool) {
	if m.when.Load() != nil {
		return true
	}
	ms, r := drv.EventElapsedTime(m.t.anchor, m.event)
	var at time.Time
	switch r {
	case cudadrv.ErrorNotReady:
		return false
	case cudadrv.Success:
		at = m.t.at(ms)
	}
	m.when.Store(&at)
	return true
}

// ahead reports whether the device has not come to the moment. An event whose moment is known may be
// in use for another one or destroyed, which the lock prevents during the query.
func (m *moment) ahead(drv cudadrv.Driver) bool {
	m.t.mu.Lock()
	defer m.t.mu.Unlock()
	return m.when.Load() == nil && drv.EventQuery(m.event) == cudadrv.ErrorNotReady
}

// latest returns the latest of some moments. It is zero if the driver does not tell one, or the
// device of one is lost. known is false if the time of one is not read yet.
func latest(list []*moment) (at time.Time, known bool) {
	for i, m := range list {
		when := m.when.Load()
		switch {
		case when == nil && m.t.lost():
			return time.Time{}, true
		case when == nil:
			return at, false
		case when.IsZero():
			return *when, true
		case i == 0 || when.After(at):
			at = *when
		}
	}
	return at, true
}

// marks are the moments that events of streams stand for, on all devices: an event that is recorded
// next after an operation stands for its end.
type marks struct {
	mu    sync.Mutex
	of    map[cudadrv.Event][]*moment
	never map[cudadrv.Event]bool // events that graphs or other processes record, too
}

var marksKey kept.Key

// marksOf returns the System's marks.
func marksOf(s *System) *marks {
	return s.Local(&marksKey, func() any { return &marks{of: map[cudadrv.Event][]*moment{}, never: map[cudadrv.Event]bool{}} }).(*marks)
}

// set sets the moments of an event. An empty list means that they are not known.
func (m *marks) set(e cudadrv.Event, list []*moment) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(list) == 0 || m.never[e] {
		delete(m.of, e)
		return
	}
	m.of[e] = list
}

// exclude removes an event until it is destroyed, because graphs or other processes record it again
// and the driver's decoration does not see them. A later recording needs to know this, too.
func (m *marks) exclude(e cudadrv.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.of, e)
	m.never[e] = true
}

// destroyed forgets an event. The driver may reuse its handle.
func (m *marks) destroyed(e cudadrv.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.of, e)
	delete(m.never, e)
}

func (m *marks) get(e cudadrv.Event) []*moment {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.of[e]
}

// forget removes the moments of a recording.
func (m *marks) forget(rec *timeline.Recorder) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.of, func(_ cudadrv.Event, list []*moment) bool { return list[0].t.rec == rec })
}

// recorded notes that an event is recorded on a stream, if the driver has accepted it.
func (t *timing) recorded(e cudadrv.Event, s cudadrv.Stream, accepted bool) {
	if AnyCapture() || !accepted {
		t.marks.set(e, nil) // it may be an event of a graph
		return
	}
	t.marks.set(e, t.endsOf(s))
}

// waited notes that a stream waits for an event, if the driver has accepted it.
func (t *timing) waited(s cudadrv.Stream, e cudadrv.Event, accepted bool) {
	var more []*moment
	if accepted && !AnyCapture() {
		more = t.marks.get(e)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	list := t.behind[s]
	if len(list) == 0 || len(more) == 0 || slices.ContainsFunc(more, func(m *moment) bool { return m.t.rec != t.rec }) {
		delete(t.behind, s)
		return
	}
	list = slices.Clone(list)
	for _, m := range more {
		if !slices.Contains(list, m) {
			list = append(list, m)
		}
	}
	if len(list) > maxBehind {
		delete(t.behind, s)
		return
	}
	t.behind[s] = list
}

// forget notes that the work of a stream is not known.
func (t *timing) forget(s cudadrv.Stream) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.behind, s)
}

// endsOf returns the ends of the last operations of a stream. It returns nil if the driver may not
// see all operations: other libraries use the stream, or a collective is open, which NCCL may enqueue.
func (t *timing) endsOf(s cudadrv.Stream) []*moment {
	if t.d.othersUse(s) {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, open := t.whole[s]; open {
		return nil
	}
	return t.behind[s]
}

// busyUntil returns the moments after which the device begins the next operation of a stream. It
// returns nil if they are not known, if other work of the stream may not be known, or if the stream
// is idle: the operation begins later then.
func (t *timing) busyUntil(drv cudadrv.Driver, s cudadrv.Stream) []*moment {
	list := t.endsOf(s)
	if len(list) == 0 {
		return nil
	}
	mode, r := drv.ThreadExchangeStreamCaptureMode(cudadrv.CaptureRelaxed) // another thread may capture
	if r != cudadrv.Success {
		return nil
	}
	defer drv.ThreadExchangeStreamCaptureMode(mode)
	for _, m := range slices.Backward(list) {
		if m.ahead(drv) {
			return list
		}
	}
	return nil
}
