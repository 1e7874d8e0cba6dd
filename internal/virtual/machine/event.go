package machine

import (
	"encoding/binary"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

// A Mark is a point in a stream that other streams and the host can wait for.
type Mark struct {
	done chan struct{}   // closed when the stream reaches it
	at   sanitizer.Stamp // set before done is closed
	when time.Time
}

// Mark returns a mark that is reached after all operations enqueued so far.
// m.mu is held.
func (s *Stream) Mark() *Mark {
	k := &Mark{done: make(chan struct{})}
	if !s.working {
		k.at, k.when = s.now, time.Now()
		close(k.done)
		return k
	}
	s.pushMark("mark", k)
	return k
}

func (s *Stream) pushMark(name string, k *Mark) {
	s.push(&Op{Name: name, always: true, run: func(*Op) {
		m := s.dev.m
		m.mu.Lock()
		k.at, k.when = s.now, time.Now()
		s.marked = true
		close(k.done)
		m.mu.Unlock()
	}})
}

// marks adds a mark to each stream of the device, and returns them together with
// the marks of destroyed streams with pending work. m.mu is held.
func (d *Device) marks() []*Mark {
	d.ended = d.unseen()
	marks := slices.Clone(d.ended)
	for _, s := range d.m.streams {
		if s.dev == d {
			marks = append(marks, s.Mark())
		}
	}
	return marks
}

// unseen returns the marks of destroyed streams that the host has not waited for.
func (d *Device) unseen() []*Mark {
	return slices.DeleteFunc(d.ended, func(k *Mark) bool { return k.seenBy(d.m.host) })
}

// reached reports whether the stream has reached the mark.
func (k *Mark) reached() bool {
	select {
	case <-k.done:
		return true
	default:
		return false
	}
}

// seenBy reports whether the host has waited for the mark.
func (k *Mark) seenBy(host sanitizer.Clock) bool {
	return k.reached() && host.Covers(k.at)
}

// Await blocks until the streams of a device reach the marks or the device is
// lost. Operations that the host enqueues later then follow the marks.
func (m *Machine) Await(dev *Device, marks ...*Mark) cudadrv.Result {
	m.mu.Lock()
	lost := dev.lost
	m.mu.Unlock()
	for _, k := range marks {
		select {
		case <-k.done:
		case <-lost:
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if dev.status != cudadrv.Success {
		return dev.status
	}
	for _, k := range marks {
		m.host = m.host.JoinStamp(k.at)
	}
	return cudadrv.Success
}

// An event holds the mark of its last record.
type event struct {
	dev      *Device
	flags    uint32
	last     *Mark
	captured *capturedMark // of its last record, if it was captured
	shared   *sharedEvent  // with another machine
}

func (d driver) EventCreate(flags uint32) (cudadrv.Event, cudadrv.Result) {
	c, r := d.begin("cuEventCreate")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	const known = cudadrv.EventBlockingSync | cudadrv.EventDisableTiming | cudadrv.EventInterprocess
	if flags&^known != 0 || flags&cudadrv.EventInterprocess != 0 && flags&cudadrv.EventDisableTiming == 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	h := cudadrv.Event(d.m.Handle())
	d.m.events[h] = &event{dev: c.dev, flags: flags}
	return h, cudadrv.Success
}

func (d driver) EventDestroy(h cudadrv.Event) cudadrv.Result {
	c, r := d.beginEnding("cuEventDestroy")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	e := d.m.events[h]
	if e == nil {
		return cudadrv.ErrorInvalidHandle
	}
	e.unshare()
	delete(d.m.events, h)
	return cudadrv.Success
}

func (d driver) EventRecord(h cudadrv.Event, sh cudadrv.Stream) cudadrv.Result {
	return d.recordEvent("cuEventRecord", h, sh, 0)
}

func (d driver) EventRecordWithFlags(h cudadrv.Event, sh cudadrv.Stream, flags uint32) cudadrv.Result {
	return d.recordEvent("cuEventRecordWithFlags", h, sh, flags)
}

func (d driver) recordEvent(name string, h cudadrv.Event, sh cudadrv.Stream, flags uint32) cudadrv.Result {
	c, s, r := d.beginStream(name, sh)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	e := d.m.event(h)
	if e == nil || e.dev != s.dev {
		return cudadrv.ErrorInvalidHandle
	}
	if flags&^cudadrv.EventExternal != 0 {
		return cudadrv.ErrorInvalidValue
	}
	if s.capture != nil && e.flags&cudadrv.EventInterprocess != 0 {
		return cudadrv.ErrorStreamCaptureUnsupported
	}
	if s.capture != nil && flags != 0 {
		s.addExternal(c.name, h, externalRecord{e})
		return cudadrv.Success
	}
	if s.capture != nil {
		e.recordCaptured(s)
		return cudadrv.Success
	}
	if flags != 0 {
		return cudadrv.ErrorInvalidValue // outside of a capture
	}
	if c.hang {
		s.Enqueue(c.name, func(*Op) { c.m.faults.Hang() })
	}
	e.record(c.name, s)
	return cudadrv.Success
}

// record records the event on a stream that is not captured. m.mu is held.
func (e *event) record(name string, s *Stream) {
	e.captured = nil
	e.last = &Mark{done: make(chan struct{})}
	e.share()
	s.pushMark(name, e.last)
}

// beginEvent is begin for calls on an event.
func (d driver) beginEvent(name string, h cudadrv.Event) (call, *event, cudadrv.Result) {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	e := d.m.event(h)
	if e == nil {
		r = cudadrv.ErrorInvalidHandle
	} else if r = e.dev.status; r == cudadrv.Success {
		if r = e.spoils(); r == cudadrv.Success {
			r = d.m.PermitsUnsafe() // querying any event is unsafe
		}
	}
	if r != cudadrv.Success {
		c.end()
	}
	return c, e, r
}

func (d driver) EventQuery(h cudadrv.Event) cudadrv.Result {
	c, e, r := d.beginEvent("cuEventQuery", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	k := e.mark()
	if k == nil {
		return cudadrv.Success
	}
	select {
	case <-k.done:
		d.m.host = d.m.host.JoinStamp(k.at)
		return cudadrv.Success
	default:
		return cudadrv.ErrorNotReady
	}
}

func (d driver) EventSynchronize(h cudadrv.Event) cudadrv.Result {
	c, e, r := d.beginEvent("cuEventSynchronize", h)
	if r != cudadrv.Success {
		return r
	}
	k := e.mark()
	c.end()
	if k == nil {
		return cudadrv.Success
	}
	return d.m.Await(e.dev, k)
}

func (d driver) EventElapsedTime(start, end cudadrv.Event) (float32, cudadrv.Result) {
	c, a, r := d.beginEvent("cuEventElapsedTime", start)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	b := d.m.event(end)
	if b != nil && b.captured != nil {
		return 0, b.spoils()
	}
	if b == nil || a.dev != b.dev || (a.flags|b.flags)&cudadrv.EventDisableTiming != 0 ||
		a.last == nil || b.last == nil {
		return 0, cudadrv.ErrorInvalidHandle
	}
	for _, k := range []*Mark{a.last, b.last} {
		select {
		case <-k.done:
		default:
			return 0, cudadrv.ErrorNotReady
		}
	}
	return float32(b.last.when.Sub(a.last.when).Seconds() * 1e3), cudadrv.Success
}

// A sharedEvent is an interprocess event. Two machines of one process simulate
// two processes.
type sharedEvent struct {
	handle cudadrv.IpcEventHandle
	from   *Machine // that created it
	uuid   cudadrv.UUID

	mu   sync.Mutex
	last *Mark
	by   *Machine // machine of the stream of the last record
	gone bool     // the original event was destroyed
}

// sharedEvents maps handles to events.
var sharedEvents struct {
	last     atomic.Uint64
	byHandle sync.Map // cudadrv.IpcEventHandle to *sharedEvent
}

var eventMagic = []byte("chorus virtual event")

func newEventHandle() (h cudadrv.IpcEventHandle) {
	b := binary.LittleEndian.AppendUint64(eventMagic[:len(eventMagic):len(eventMagic)], uint64(os.Getpid()))
	copy(h[:], binary.LittleEndian.AppendUint64(b, sharedEvents.last.Add(1)))
	return h
}

// event returns the event of a handle, or nil. An opened event becomes invalid
// when the original is destroyed. m.mu is held.
func (m *Machine) event(h cudadrv.Event) *event {
	e := m.events[h]
	if e == nil || e.shared == nil {
		return e
	}
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	if e.shared.gone {
		return nil
	}
	return e
}

// mark returns the last recorded mark, or nil. If the event is shared, another
// machine may have recorded it. m.mu is held.
func (e *event) mark() *Mark {
	if e.shared == nil {
		return e.last
	}
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	if k := e.shared.last; k != nil && e.shared.by != e.dev.m {
		return &Mark{done: k.done} // omit the stamp, which belongs to another machine's clock
	}
	return e.shared.last
}

// share publishes the last record of a shared event to the machines that opened
// it. m.mu is held.
func (e *event) share() {
	if e.shared == nil {
		return
	}
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	e.shared.last, e.shared.by = e.last, e.dev.m
}

// unshare invalidates the events that were opened from this one, which is about
// to be destroyed. m.mu is held.
func (e *event) unshare() {
	if e.shared == nil || e.shared.from != e.dev.m {
		return
	}
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	e.shared.gone = true
	sharedEvents.byHandle.Delete(e.shared.handle)
}

func (d driver) IpcGetEventHandle(eh cudadrv.Event) (h cudadrv.IpcEventHandle, r cudadrv.Result) {
	c, r := d.begin("cuIpcGetEventHandle")
	if r != cudadrv.Success {
		return h, r
	}
	defer c.end()
	e := d.m.event(eh)
	if e == nil || e.flags&cudadrv.EventInterprocess == 0 || e.shared != nil && e.shared.from != d.m {
		return h, cudadrv.ErrorInvalidHandle
	}
	if e.shared == nil {
		e.shared = &sharedEvent{handle: newEventHandle(), from: d.m, uuid: e.dev.uuid}
		e.share()
		sharedEvents.byHandle.Store(e.shared.handle, e.shared)
	}
	return e.shared.handle, cudadrv.Success
}

func (d driver) IpcOpenEventHandle(h cudadrv.IpcEventHandle) (cudadrv.Event, cudadrv.Result) {
	c, r := d.begin("cuIpcOpenEventHandle")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	v, ok := sharedEvents.byHandle.Load(h)
	if !ok {
		if binary.LittleEndian.Uint64(h[len(eventMagic):]) != uint64(os.Getpid()) && string(h[:len(eventMagic)]) == string(eventMagic) {
			return 0, cudadrv.ErrorNotSupported
		}
		return 0, cudadrv.ErrorInvalidValue
	}
	shared := v.(*sharedEvent)
	shared.mu.Lock()
	gone := shared.gone // destroyed in the meantime
	shared.mu.Unlock()
	switch {
	case shared.from == d.m:
		return 0, cudadrv.ErrorInvalidContext // like CUDA for the process that created it
	case gone || shared.uuid != c.dev.uuid:
		return 0, cudadrv.ErrorInvalidHandle
	}
	eh := cudadrv.Event(d.m.Handle())
	d.m.events[eh] = &event{dev: c.dev, flags: cudadrv.EventDisableTiming | cudadrv.EventInterprocess, shared: shared}
	return eh, cudadrv.Success
}
