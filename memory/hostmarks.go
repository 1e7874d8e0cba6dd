package memory

import (
	"errors"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/stream"
)

// hostMarks knows how far the streams are that used pinned memory. All leases
// that ended on a stream since its last event share the next one, which is
// recorded only when somebody asks.
type hostMarks struct {
	watches map[watchKey]*hostWatch // the allocator's lock guards it

	mu     sync.Mutex // held by who asks, and not by who only ends a lease
	spare  map[*device.Device][]cudadrv.Event
	closed bool
}

type watchKey = *stream.Stream

// A hostWatch is one stream that leases wait for.
type hostWatch struct {
	s *stream.Stream

	// The allocator's lock guards these.
	leases int    // that wait
	last   uint64 // the number of the last event
	wanted bool   // leases wait for the one after it
	passed uint64

	// hostMarks.mu guards these.
	owed   bool // the last event could not be recorded yet
	events []numbered
}

type numbered struct {
	event  cudadrv.Event
	number uint64
}

// A hostMark is an event of a stream by its number.
type hostMark struct {
	w      *hostWatch
	number uint64
}

// after lets the lease wait for what its users do by now. The allocator's lock is
// held.
func (m *hostMarks) after(l *hostLease) {
	for _, s := range l.users {
		w := m.watches[s]
		if w == nil {
			w = &hostWatch{s: s}
			m.watches[s] = w
		}
		w.leases++
		w.wanted = true
		l.marks = append(l.marks, hostMark{w, w.last + 1})
	}
}

// passed reports whether the lease waits no more. The allocator's lock is held.
func (l *hostLease) passed() bool {
	for _, k := range l.marks {
		if k.w.passed < k.number {
			return false
		}
	}
	return true
}

// settle looks how far the streams are, without waiting for them, and takes back
// what they have done with. It reports whether there was any such.
func (h *host) settle() bool {
	m := &h.marks
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return false
	}
	watches := h.due()
	for _, w := range watches {
		if w.owed {
			w.owed = !m.record(w)
		}
	}
	passed := make([]uint64, len(watches))
	for i, w := range watches {
		passed[i] = m.query(w)
	}
	over := h.pass(watches, passed)
	for _, l := range over {
		l.end()
		for _, s := range l.users {
			_ = s.Release() // a stream that cannot be destroyed costs nobody anything
		}
	}
	return len(over) > 0
}

// due returns the watches, and numbers the events that have to be recorded: a
// lease that ends from now on waits for the next.
func (h *host) due() (list []*hostWatch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, w := range h.marks.watches {
		if w.wanted {
			w.wanted, w.owed = false, true
			w.last++
		}
		list = append(list, w)
	}
	return list
}

// pass notes how far the streams are and returns the leases that are over.
func (h *host) pass(watches []*hostWatch, passed []uint64) (over []*hostLease) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, w := range watches {
		w.passed = max(w.passed, passed[i])
	}
	rest := h.pending[:0]
	for _, l := range h.pending {
		if !l.passed() {
			rest = append(rest, l)
			continue
		}
		over = append(over, l)
		for _, k := range l.marks {
			if k.w.leases--; k.w.leases == 0 {
				delete(h.marks.watches, k.w.s)
			}
		}
	}
	clear(h.pending[len(rest):])
	h.pending = rest
	return over
}

// record records the event that has the number w.last, unless the stream is being
// captured or the driver refuses. m.mu is held.
func (m *hostMarks) record(w *hostWatch) bool {
	d := w.s.Device()
	status := cudadrv.CaptureNone
	err := d.Do("cuStreamIsCapturing", func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(w.s.Raw())
		return r
	})
	if err != nil || status != cudadrv.CaptureNone {
		return false
	}
	var e cudadrv.Event
	if list := m.spare[d]; len(list) > 0 {
		e, m.spare[d] = list[len(list)-1], list[:len(list)-1]
	} else if newEvent(d, &e) != nil {
		return false
	}
	if record(d, e, w.s.Raw()) != nil {
		m.keep(d, e)
		return false
	}
	w.events = append(w.events, numbered{e, w.last})
	return true
}

// query returns the number of the last event that the stream has passed, or 0 if
// it has passed none since it was asked. m.mu is held.
func (m *hostMarks) query(w *hostWatch) (passed uint64) {
	d := w.s.Device()
	for len(w.events) > 0 {
		x := w.events[0]
		err := d.DoRelaxed("cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(x.event) })
		if err != nil {
			break // not ready, or the device is lost
		}
		passed, w.events = x.number, w.events[1:]
		m.keep(d, x.event)
	}
	return passed
}

func (m *hostMarks) keep(d *device.Device, e cudadrv.Event) {
	if m.spare == nil {
		m.spare = map[*device.Device][]cudadrv.Event{}
	}
	m.spare[d] = append(m.spare[d], e)
}

// close gives the events up; those of streams that have not passed them go with
// their contexts.
func (m *hostMarks) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	var errs []error
	for d, list := range m.spare {
		for _, e := range list {
			errs = append(errs, d.Do("cuEventDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) }))
		}
	}
	m.spare = nil
	return errors.Join(errs...)
}

// pollEvery is how often streams are asked in the background, as torch does.
const pollEvery = 100 * time.Microsecond

// poll settles until nothing is pending.
func (h *host) poll() {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for range tick.C {
		h.settle()
		h.mu.Lock()
		if h.closed || len(h.pending) == 0 {
			h.polling = false
			h.mu.Unlock()
			return
		}
		h.mu.Unlock()
	}
}
