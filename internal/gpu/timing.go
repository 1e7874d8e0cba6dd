package gpu

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
)

const (
	// maxEvents limits the events of a device. Each operation whose time is not known yet needs two if
	// its stream was idle or has work that is not known, and one otherwise.
	maxEvents = 16384
	// anchorEvery is how often the clock of the device is compared with the host's. Events
	// measure time in float32 milliseconds, which are exact to 0.1 µs for so long.
	anchorEvery = time.Second
	// anchorError is the largest uncertainty of a comparison that replaces an earlier one.
	anchorError = 50 * time.Microsecond
	// anchorTime limits the wait for a comparison: the device may be busy or hang.
	anchorTime = 100 * time.Millisecond
)

// timing has the times of a CUDA device's operations for a timeline. An event of a pool is recorded
// after each operation, and one before it if its stream is idle or has work that is not known. The
// recorder's goroutine reads them.
type timing struct {
	d     *Device
	rec   *timeline.Recorder
	marks *marks
	timed atomic.Pointer[timed] // the decorated driver that was used last

	mu      sync.Mutex
	free    []cudadrv.Event
	events  int                             // that exist
	pending map[cudadrv.Stream][]*eventPair // in stream order
	whole   map[cudadrv.Stream]*eventPair   // collectives that are being enqueued; nil without events
	behind  map[cudadrv.Stream][]*moment    // ends of the last operations before the next one, if known
	closed  bool

	collecting sync.Mutex // guards the fields below
	side       cudadrv.Stream
	anchor     cudadrv.Event
	anchorAt   time.Time
}

// An eventPair is the events around an operation.
type eventPair struct {
	stream cudadrv.Stream
	start  *moment   // nil if the operation begins after others
	after  []*moment // the latest one is the begin
	end    *moment
	ticket *timeline.Ticket
}

// timingOf returns the device's timing for a recorder, or nil if the recording has ended: another
// one may have begun since.
func (d *Device) timingOf(rec *timeline.Recorder) *timing {
	for {
		old := d.timing.Load()
		if old != nil && old.rec == rec {
			return old
		}
		if rec.Ended() {
			return nil
		}
		t := newTiming(d, rec)
		if d.timing.CompareAndSwap(old, t) {
			rec.AddSource(timeline.Source{Collect: t.collect, Close: t.close})
			return t
		}
	}
}

func newTiming(d *Device, rec *timeline.Recorder) *timing {
	return &timing{d: d, rec: rec, marks: marksOf(d.sys), pending: map[cudadrv.Stream][]*eventPair{},
		whole: map[cudadrv.Stream]*eventPair{}, behind: map[cudadrv.Stream][]*moment{}}
}

// quietly is Do without the decorated driver.
func (d *Device) quietly(call Call) error {
	return d.doWith(call, call, nil)
}

// relaxed is DoRelaxed without the decorated driver, for the recorder's own
// calls, because a program or another library may capture a graph meanwhile.
func (t *timing) relaxed(call Call) error { return t.d.quietly(inRelaxedMode(call)) }

// begin records the event before an operation. It returns nil if the operation
// is not recorded, because the stream is captured or the pool is exhausted.
func (t *timing) begin(drv cudadrv.Driver, kind, name string, s cudadrv.Stream, bytes uint64) *eventPair {
	p := t.take(drv, s)
	if p != nil {
		p.ticket = t.rec.Enqueue(kind, name, timeline.Stream{Device: t.d.ordinal, Handle: uint64(s)}, bytes)
	}
	return p
}

// take returns a pair whose begin is a moment of other operations, or recorded on the stream.
func (t *timing) take(drv cudadrv.Driver, s cudadrv.Stream) *eventPair {
	if status, r := drv.StreamIsCapturing(s); r != cudadrv.Success || status != cudadrv.CaptureNone {
		return nil
	}
	p := &eventPair{stream: s, after: t.busyUntil(drv, s)}
	ok := true
	if p.after == nil {
		if p.start = t.moment(drv); p.start != nil {
			p.after = []*moment{p.start}
			ok = drv.EventRecord(p.start.event, s) == cudadrv.Success
		}
	}
	if p.end = t.moment(drv); !ok || len(p.after) == 0 || p.end == nil {
		t.give(p)
		t.forget(s)
		t.rec.Drop()
		return nil
	}
	return p
}

// moment returns a moment with an unused event, or nil.
func (t *timing) moment(drv cudadrv.Driver) *moment {
	if e := t.event(drv); e != 0 {
		return &moment{t: t, event: e}
	}
	return nil
}

// event returns an unused event, or 0.
func (t *timing) event(drv cudadrv.Driver) cudadrv.Event {
	t.mu.Lock()
	if n := len(t.free); n > 0 {
		e := t.free[n-1]
		t.free = t.free[:n-1]
		t.mu.Unlock()
		return e
	}
	full := t.closed || t.events >= maxEvents
	if !full {
		t.events++
	}
	t.mu.Unlock()
	if full {
		return 0
	}
	e, r := drv.EventCreate(cudadrv.EventDefault)
	if r != cudadrv.Success {
		t.mu.Lock()
		t.events--
		t.mu.Unlock()
		return 0
	}
	return e
}

// give returns the events of a pair to the pool.
func (t *timing) give(p *eventPair) {
	t.mu.Lock()
	t.keep(p)
	closed := t.closed
	t.mu.Unlock()
	if closed {
		t.destroyFree()
	}
}

// keep is give for callers that hold mu, while the timing is not closed.
func (t *timing) keep(p *eventPair) {
	for _, m := range []*moment{p.start, p.end} {
		if m != nil {
			t.free = append(t.free, m.event)
		}
	}
}

// abandon is keep for a pair whose times the recorder does not read. Streams of other devices may be behind its
// moments.
func (t *timing) abandon(p *eventPair) {
	for _, m := range []*moment{p.start, p.end} {
		if m != nil {
			m.when.CompareAndSwap(nil, &time.Time{})
		}
	}
	t.keep(p)
}

// end records the event after an operation that the driver has accepted.
func (t *timing) end(drv cudadrv.Driver, p *eventPair, accepted bool) {
	if p == nil {
		return
	}
	if accepted && drv.EventRecord(p.end.event, p.stream) == cudadrv.Success && t.await(p) {
		return
	}
	p.ticket.Cancel()
	t.give(p)
	t.forget(p.stream)
}

// await adds a pair to the pending ones, so that the next operation of the
// stream begins after it. It returns false if the timing is closed.
func (t *timing) await(p *eventPair) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.pending[p.stream] = append(t.pending[p.stream], p)
	t.behind[p.stream] = []*moment{p.end}
	return true
}

// beginWhole records the event before a collective.
func (t *timing) beginWhole(drv cudadrv.Driver, s *Stream) {
	p := t.take(drv, s.h)
	if p != nil {
		if p.ticket = t.rec.Whole(s.Place()); p.ticket == nil {
			t.give(p)
			return
		}
	}
	t.mu.Lock()
	old := t.whole[s.h] // of a collective that was refused or has failed
	t.whole[s.h] = p
	t.mu.Unlock()
	if old != nil {
		t.end(drv, old, false)
	}
}

// endWhole records the event after a collective.
func (t *timing) endWhole(drv cudadrv.Driver, s cudadrv.Stream) {
	t.mu.Lock()
	p, open := t.whole[s]
	delete(t.whole, s)
	if open {
		delete(t.behind, s) // NCCL's work is after the last part
	}
	t.mu.Unlock()
	t.end(drv, p, true)
}

// collect ends the tickets of operations that have completed. An operation that began after one of
// another device may stay until the collect after the other device's.
func (t *timing) collect() {
	t.collecting.Lock()
	defer t.collecting.Unlock()
	if t.lost() || !t.compare() {
		return
	}
	t.mu.Lock()
	pending := maps.Clone(t.pending) // others only append to the lists
	t.mu.Unlock()
	if len(pending) == 0 {
		return
	}
	var failed *moment
	_ = t.relaxed(func(drv cudadrv.Driver) cudadrv.Result {
		for _, list := range pending {
			if m := readTimes(drv, list); m != nil {
				failed = m
			}
		}
		return cudadrv.Success
	})
	if failed != nil { // so that the device knows its error
		_ = t.relaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(failed.event) })
	}
	for s, list := range pending {
		t.complete(s, list)
	}
}

// readTimes reads the times of a stream's pairs that are complete. It returns a moment whose time the
// driver does not tell.
func readTimes(drv cudadrv.Driver, list []*eventPair) (failed *moment) {
	for _, p := range list {
		if !p.end.read(drv) {
			break
		}
		if p.start != nil {
			p.start.read(drv)
		}
		if p.end.when.Load().IsZero() {
			failed = p.end
		}
	}
	return failed
}

// complete ends the tickets of the first pairs of a stream whose times are known.
func (t *timing) complete(s cudadrv.Stream, list []*eventPair) {
	n := 0
	for ; n < len(list) && t.done(list[n]); n++ {
	}
	t.mu.Lock()
	for _, p := range list[:n] {
		t.keep(p)
	}
	if t.pending[s] = t.pending[s][n:]; len(t.pending[s]) == 0 {
		delete(t.pending, s)
	}
	t.mu.Unlock()
}

// done ends the ticket of a pair if its times are known.
func (t *timing) done(p *eventPair) bool {
	end := p.end.when.Load()
	if end == nil {
		return false
	}
	begin, known := latest(p.after)
	if !known {
		return false
	}
	if begin.IsZero() || end.IsZero() {
		p.ticket.Cancel()
		t.rec.Drop()
		return true
	}
	if begin.After(*end) { // the begin is by another comparison of clocks, or another device's
		begin = *end
	}
	p.ticket.Done(begin, *end)
	return true
}

// lost reports whether the device cannot be used.
func (t *timing) lost() bool { return t.d.sys.Closed() || t.d.Err() != nil }

// at converts the milliseconds since the anchor.
func (t *timing) at(ms float32) time.Time {
	return t.anchorAt.Add(time.Duration(float64(ms) * float64(time.Millisecond)))
}

// compare compares the clock of the device with the host's, if it is time. It reports whether they
// were compared at least once.
func (t *timing) compare() bool {
	if t.anchor != 0 && time.Since(t.anchorAt) < anchorEvery {
		return true
	}
	err := t.relaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
		if t.side == 0 {
			if t.side, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0); r != cudadrv.Success {
				return r
			}
		}
		return t.moveAnchor(drv)
	})
	return err == nil && t.anchor != 0
}

// moveAnchor records an event on a stream without other work, a few times, and keeps the one whose
// time the host knows best.
func (t *timing) moveAnchor(drv cudadrv.Driver) cudadrv.Result {
	best := time.Duration(-1)
	for range 5 {
		e, r := drv.EventCreate(cudadrv.EventDefault)
		if r != cudadrv.Success {
			return r
		}
		before := time.Now()
		if r = drv.EventRecord(e, t.side); r == cudadrv.Success {
			poll.UntilNoLaterThan(anchorTime, func() bool { r = drv.EventQuery(e); return r != cudadrv.ErrorNotReady })
		}
		took := time.Since(before)
		if r != cudadrv.Success || best >= 0 && took >= best || t.anchor != 0 && best < 0 && took > anchorError {
			_ = drv.EventDestroy(e)
			switch r {
			case cudadrv.Success:
				continue
			case cudadrv.ErrorNotReady: // the earlier anchor stays
				return cudadrv.Success
			}
			return r
		}
		if t.anchor != 0 {
			_ = drv.EventDestroy(t.anchor)
		}
		best, t.anchor, t.anchorAt = took, e, before.Add(took/2)
	}
	return cudadrv.Success
}

// close releases the events and the stream, except the events of a call in
// progress, which releases them itself.
func (t *timing) close() {
	t.collecting.Lock()
	defer t.collecting.Unlock()
	t.mu.Lock()
	t.closed = true
	for _, list := range t.pending {
		for _, p := range list {
			t.abandon(p)
		}
	}
	for _, p := range t.whole {
		if p != nil {
			t.abandon(p)
		}
	}
	clear(t.pending)
	clear(t.whole)
	clear(t.behind)
	t.marks.forget(t.rec)
	if t.anchor != 0 {
		t.free = append(t.free, t.anchor)
	}
	t.mu.Unlock()
	t.destroyFree()
	if t.side != 0 && !t.lost() {
		_ = t.relaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamDestroy(t.side) })
	}
	t.d.timing.CompareAndSwap(t, nil)
}

// destroyFree destroys the free events.
func (t *timing) destroyFree() {
	t.mu.Lock()
	list := t.free
	t.free = nil
	t.mu.Unlock()
	if len(list) == 0 || t.lost() {
		return
	}
	_ = t.relaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
		for _, e := range list {
			r = drv.EventDestroy(e)
		}
		return r
	})
}

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

// latest returns the latest of some moments, or zero if the driver does not
// tell one, or the device of one is lost. known is false if the time of one is
// not read yet.
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

var marksKey handle.Key

// marksOf returns the System's marks.
func marksOf(s *System) *marks {
	return s.Local(&marksKey, func() any { return &marks{of: map[cudadrv.Event][]*moment{}, never: map[cudadrv.Event]bool{}} }).(*marks)
}

// set sets the moments of an event, which are not known if the list is empty.
func (m *marks) set(e cudadrv.Event, list []*moment) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(list) == 0 || m.never[e] {
		delete(m.of, e)
		return
	}
	m.of[e] = list
}

// exclude removes an event until it is destroyed, also for later recordings,
// because graphs or other processes record it again and the driver's decoration
// does not see them.
func (m *marks) exclude(e cudadrv.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.of, e)
	m.never[e] = true
}

// destroyed forgets an event, because the driver may reuse its handle.
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
