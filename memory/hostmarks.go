package memory

import (
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// hostMarks tracks how far the streams that used pinned memory have progressed. All
// leases that ended on a stream since its last event share the next event, which is
// recorded only when the progress is queried.
type hostMarks struct {
	watches map[watchKey]*hostWatch // guarded by the allocator's lock

	mu     sync.Mutex // held while querying; not needed to end a lease
	spare  gpu.Events
	closed bool
}

type watchKey = *stream.Stream

// A hostWatch is one stream that leases wait for.
type hostWatch struct {
	s *stream.Stream

	// The allocator's lock guards these.
	leases int    // leases that wait for the stream
	last   uint64 // the number of the latest event
	wanted bool   // leases wait for the event after the latest one
	passed uint64

	// hostMarks.mu guards these.
	owed   bool // the latest event could not be recorded yet
	events []numbered
}

type numbered struct {
	event  cudadrv.Event
	number uint64
}

// A hostMark identifies an event of a stream by its number.
type hostMark struct {
	w      *hostWatch
	number uint64
}

// after makes the lease wait for the operations that its users have enqueued by now.
// The allocator's lock is held.
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

// passed reports whether all marks of the lease have passed. The allocator's lock is
// held.
func (l *hostLease) passed() bool {
	for _, k := range l.marks {
		if k.w.passed < k.number {
			return false
		}
	}
	return true
}

// endPassed queries how far the streams have progressed, without waiting for them, and
// ends the leases whose users have passed. It reports whether there were any.
func (h *host) endPassed() bool {
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
			_ = gpu.StreamOf(s).Release() // a stream that cannot be destroyed does no harm
		}
	}
	return len(over) > 0
}

// due returns the watches and assigns numbers to the events that must be recorded. A
// lease that ends from now on waits for the next event.
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

// pass records the progress of the streams and returns the leases that are over.
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

// record records event number w.last, unless the stream is being captured or the driver
// fails. m.mu is held.
func (m *hostMarks) record(w *hostWatch) bool {
	d := gpu.DeviceOf(w.s.Device())
	captured, err := gpu.StreamOf(w.s).Capturing()
	if err != nil || captured {
		return false
	}
	e, err := m.spare.Take(d)
	if err != nil {
		return false
	}
	if d.RecordEvent(e, gpu.StreamOf(w.s).Raw()) != nil {
		m.spare.Give(d, e)
		return false
	}
	w.events = append(w.events, numbered{e, w.last})
	return true
}

// query returns the number of the latest event that the stream has passed, or 0 if it
// has passed none since the last query. m.mu is held.
func (m *hostMarks) query(w *hostWatch) (passed uint64) {
	d := gpu.DeviceOf(w.s.Device())
	for len(w.events) > 0 {
		x := w.events[0]
		reached, _ := d.ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(x.event) })
		if !reached {
			break // not reached yet, or the device is lost
		}
		passed, w.events = x.number, w.events[1:]
		m.spare.Give(d, x.event)
	}
	return passed
}

// close destroys the spare events. Events that streams have not passed yet are
// destroyed with their contexts.
func (m *hostMarks) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return m.spare.Close()
}

// pollEvery is the interval of the background polling, the same as torch's.
const pollEvery = 100 * time.Microsecond

// poll calls settle until no lease is pending.
func (h *host) poll() {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for range tick.C {
		h.endPassed()
		h.mu.Lock()
		if h.closed || len(h.pending) == 0 {
			h.polling = false
			h.mu.Unlock()
			return
		}
		h.mu.Unlock()
	}
}
