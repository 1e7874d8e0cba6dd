package virtual

import (
	"encoding/binary"
	"os"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A sharedEvent is an interprocess event. Two machines of one process stand for
// two processes; real ones share nothing.
type sharedEvent struct {
	handle cudadrv.IpcEventHandle
	from   *Machine // that made it
	uuid   cudadrv.UUID

	mu   sync.Mutex
	last *mark
	by   *Machine // whose stream recorded last
	gone bool     // the event of from was destroyed
}

// sharedEvents has what handles stand for.
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

// event returns the event of a handle, or nil. One that was opened is nothing
// once the one that it was opened from is destroyed. m.mu is held.
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

// mark returns what the event has recorded last, or nil. m.mu is held.
func (e *event) mark() *mark {
	if e.shared == nil {
		return e.last
	}
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	if k := e.shared.last; k != nil && e.shared.by != e.dev.m {
		return &mark{done: k.done} // the stamp is of another machine's clock
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

// unshare ends the event for those who opened it. m.mu is held.
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
	gone := shared.gone // by now
	shared.mu.Unlock()
	switch {
	case shared.from == d.m:
		return 0, cudadrv.ErrorInvalidContext // as CUDA refuses the process that made it
	case gone || shared.uuid != c.dev.uuid:
		return 0, cudadrv.ErrorInvalidHandle
	}
	eh := cudadrv.Event(d.m.handle())
	d.m.events[eh] = &event{dev: c.dev, flags: cudadrv.EventDisableTiming | cudadrv.EventInterprocess, shared: shared}
	return eh, cudadrv.Success
}
