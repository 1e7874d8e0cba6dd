package memory

import (
	"math"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
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
	free   gpu.Events
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

// after orders the end of the lease after the operations that its users have enqueued by now.
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

// endPassed queries, without waiting, how far the streams have progressed, ends
// the leases whose users have passed, and reports whether it ended any.
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
	e, err := m.free.Take(d)
	if err != nil {
		return false
	}
	if d.RecordEvent(e, gpu.StreamOf(w.s).Raw()) != nil {
		m.free.Give(d, e)
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
		m.free.Give(d, x.event)
	}
	return passed
}

// close destroys the free events. Events that streams have not passed yet are
// destroyed with their contexts.
func (m *hostMarks) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return m.free.Close()
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

// HostStats are the statistics of a System's pinned memory, with torch's names and
// meanings (torch.cuda.host_memory_stats). Sizes are in bytes, rounded as the allocator
// rounds them. The value is a copy.
type HostStats struct {
	Allocations    Stat // blocks that the allocator owns, used or cached
	AllocatedBytes Stat // of Allocations
	ActiveRequests Stat // blocks in use, including closed blocks that streams still use
	ActiveBytes    Stat // of ActiveRequests

	NumHostAlloc  int64  // allocations from the system
	NumHostFree   int64  // blocks returned to the system
	HostAllocTime Timing // of the allocations
	HostFreeTime  Timing // of the frees
}

// A Timing summarizes the durations of calls, in microseconds.
type Timing struct{ Total, Max, Min, Count, Avg int64 }

// Flat returns the statistics with torch's keys, such as
// "active_bytes.peak" (torch.cuda.host_memory_stats).
func (s HostStats) Flat() map[string]int64 {
	flat := map[string]int64{}
	flatten(flat, "", s.Nested())
	return flat
}

// Nested returns the statistics nested as in torch: a value is an int64 or another
// map[string]any (torch.cuda.host_memory_stats_as_nested_dict).
func (s HostStats) Nested() map[string]any {
	return map[string]any{
		"allocations":     s.Allocations.nested(),
		"allocated_bytes": s.AllocatedBytes.nested(),
		"active_requests": s.ActiveRequests.nested(),
		"active_bytes":    s.ActiveBytes.nested(),
		"num_host_alloc":  s.NumHostAlloc,
		"num_host_free":   s.NumHostFree,
		"host_alloc_time": s.HostAllocTime.nested(),
		"host_free_time":  s.HostFreeTime.nested(),
	}
}

func (t Timing) nested() map[string]any {
	return map[string]any{"total": t.Total, "max": t.Max, "min": t.Min, "count": t.Count, "avg": t.Avg}
}

// ReadHostStats returns the statistics of the pinned memory of dev's System
// (torch.cuda.host_memory_stats). They do not include memory of PinSlice, and
// without a device they are zero.
func ReadHostStats(dev *device.Device) HostStats {
	if dev == nil {
		return HostStats{}
	}
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	s := HostStats(h.stats)
	s.NumHostAlloc, s.NumHostFree = s.HostAllocTime.Count, s.HostFreeTime.Count
	return s
}

// ResetPeakHostStats resets the peaks of ReadHostStats and the minimum and maximum
// durations (torch.cuda.reset_peak_host_memory_stats).
func ResetPeakHostStats(dev *device.Device) {
	if dev == nil {
		return
	}
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.stats.all() {
		x.Peak = x.Current
	}
	for _, t := range []*Timing{&h.stats.HostAllocTime, &h.stats.HostFreeTime} {
		t.Max, t.Min = 0, 0
	}
}

// ResetAccumulatedHostStats sets the totals of ReadHostStats to zero
// (torch.cuda.reset_accumulated_host_memory_stats).
func ResetAccumulatedHostStats(dev *device.Device) {
	if dev == nil {
		return
	}
	h := hostOf(dev)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.stats.all() {
		x.Allocated, x.Freed = 0, 0
	}
	for _, t := range []*Timing{&h.stats.HostAllocTime, &h.stats.HostFreeTime} {
		t.Total, t.Count, t.Avg = 0, 0, 0
	}
}

// hostCounts is HostStats as the allocator updates it.
type hostCounts HostStats

func (c *hostCounts) all() []*Stat {
	return []*Stat{&c.Allocations, &c.AllocatedBytes, &c.ActiveRequests, &c.ActiveBytes}
}

// own counts an allocated block, or a freed block if by is -1.
func (c *hostCounts) own(bytes, by int64, took time.Duration) {
	c.Allocations.add(by)
	c.AllocatedBytes.add(by * bytes)
	if by > 0 {
		c.HostAllocTime.add(took)
	} else {
		c.HostFreeTime.add(took)
	}
}

// request counts a block that was taken, or a block that came back if by is -1.
func (c *hostCounts) request(bytes, by int64) {
	c.ActiveRequests.add(by)
	c.ActiveBytes.add(by * bytes)
}

func (s *Stat) add(n int64) {
	s.Current += n
	s.Peak = max(s.Peak, s.Current)
	if n > 0 {
		s.Allocated += n
	} else {
		s.Freed -= n
	}
}

func (t *Timing) add(took time.Duration) {
	us := took.Microseconds()
	if t.Min == 0 && t.Max == 0 {
		t.Min = math.MaxInt64
	}
	t.Min, t.Max = min(t.Min, us), max(t.Max, us)
	t.Total += us
	t.Count++
	t.Avg = t.Total / t.Count
}
