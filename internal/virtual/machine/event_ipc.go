package machine

import (
	"encoding/binary"
	"os"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
)

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

// mark returns the last recorded mark, or nil. m.mu is held.
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

// share publishes the last record. m.mu is held.
func (e *event) share() {
	if e.shared == nil {
		return
	}
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	e.shared.last, e.shared.by = e.last, e.dev.m
}

// unshare invalidates the opened events. m.mu is held.
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
