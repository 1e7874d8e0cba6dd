package memory

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/alloc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// A lane is a stream as the allocators see it. There is one for each stream.
type lane struct {
	s     *stream.Stream
	heap  *heap
	arena atomic.Pointer[alloc.Arena] // of the default pool, once it was used
	pool  atomic.Pointer[poolUse]     // the last of uses, or nil
	ended atomic.Bool

	mu   sync.Mutex
	uses []*poolUse // calls of Pool.Use that have not returned
}

// A poolUse is one call of Pool.Use.
type poolUse struct {
	part  *alloc.Pool
	arena atomic.Pointer[alloc.Arena] // once it was used
}

// of returns the arena that the lane's stream allocates from. The first call may let the
// stream wait for a closed one whose arena it takes over, which would end a capture of the
// stream.
func (u *poolUse) of(l *lane) (*alloc.Arena, error) {
	if a := u.arena.Load(); a != nil {
		return a, nil
	}
	a, err := u.part.Arena(l)
	if err == nil {
		u.arena.Store(a) // another goroutine has got the same
	}
	return a, err
}

// use lets the stream allocate from a part of a pool until done is called. Several
// goroutines may do that at the same time, and so the first to begin may be the first
// to end.
func (l *lane) use(u *poolUse) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uses = append(l.uses, u)
	l.pool.Store(u)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.uses = slices.DeleteFunc(l.uses, func(o *poolUse) bool { return o == u })
		if n := len(l.uses); n > 0 {
			l.pool.Store(l.uses[n-1])
		} else {
			l.pool.Store(nil)
		}
	}
}

var laneKey kept.Key

// laneOf returns the lane of a stream that is open.
func laneOf(op string, s *stream.Stream) (*lane, error) {
	if !s.Open() {
		return nil, s.Check(op, nil)
	}
	if v, ok := s.Kept(&laneKey); ok {
		return v.(*lane), nil
	}
	return openLane(s)
}

func openLane(s *stream.Stream) (*lane, error) {
	v, err := s.Keep(&laneKey, func() (any, func() error, error) {
		h, err := heapOf(s.Device())
		if err != nil {
			return nil, nil, err
		}
		l := &lane{s: s, heap: h}
		return l, l.end, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*lane), nil
}

// end gives what the stream had to others, when the stream is destroyed.
func (l *lane) end() error {
	l.ended.Store(true)
	l.heap.native.End(l) // returns when no one who found it not ended is at work
	return nil
}

// current returns the stream's arena of the default pool.
func (l *lane) current() (*alloc.Arena, error) {
	if a := l.arena.Load(); a != nil {
		return a, nil
	}
	a, err := l.heap.native.Default().Arena(l)
	if err != nil {
		return nil, err
	}
	l.heap.use()
	l.arena.Store(a) // another goroutine has got the same
	return a, nil
}

// The methods of alloc.Stream. They work on a closed stream that is retained.

// Record returns an event, or nil while the stream is captured: an event would
// become part of the graph.
func (l *lane) Record() (alloc.Event, error) {
	status := cudadrv.CaptureNone
	err := l.heap.do("cuStreamIsCapturing", func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(l.s.Raw())
		return r
	})
	if err != nil || status != cudadrv.CaptureNone {
		return nil, err
	}
	if idle, err := l.idle(); err != nil || idle {
		return past{}, err
	}
	e, err := l.heap.event()
	if err != nil {
		return nil, err
	}
	err = l.heap.do("cuEventRecord", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e.raw, l.s.Raw()) })
	if err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// idle says whether the stream has done all that was enqueued.
func (l *lane) idle() (idle bool, err error) {
	err = l.heap.do("cuStreamQuery", func(drv cudadrv.Driver) cudadrv.Result {
		r := drv.StreamQuery(l.s.Raw())
		if r == cudadrv.ErrorNotReady {
			return cudadrv.Success
		}
		idle = r == cudadrv.Success
		return r
	})
	return idle, err
}

func (l *lane) Wait(e alloc.Event) error {
	x, ok := e.(*event)
	if !ok {
		return nil
	}
	return l.heap.do("cuStreamWaitEvent", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.StreamWaitEvent(l.s.Raw(), x.raw, 0)
	})
}

// Sync refuses a stream that is captured: the wait would end the capture.
func (l *lane) Sync() error {
	if err := l.s.RefuseCapture("memory: free", "what is captured has not run and cannot be waited for"); err != nil {
		return fmt.Errorf("%w: %w", alloc.ErrBusy, err)
	}
	return l.heap.do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(l.s.Raw()) })
}

func (l *lane) Number() uint64 { return uint64(l.s.Raw()) }
func (l *lane) Ended() bool    { return l.ended.Load() }
func (l *lane) Retain() bool   { return l.s.Retain() }

// Release is called with the allocator's locks held, which the end of a stream
// needs: so it is put off until they are not.
func (l *lane) Release() { l.heap.retire(l.s) }

// retire releases the stream with the next tidy.
func (h *heap) retire(s *stream.Stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.retired = append(h.retired, s)
	h.owes.Store(true)
}

// tidy releases the streams that the allocator needs no more. It is called after
// each operation.
func (h *heap) tidy() {
	if !h.owes.Load() || stream.InCallback() {
		return
	}
	h.mu.Lock()
	list := h.retired
	h.retired = nil
	h.owes.Store(false)
	h.mu.Unlock()
	for _, s := range list {
		_ = s.Release() // a stream that cannot be destroyed costs nobody anything
	}
}

// past is the event behind work that is known to be done: one that is recorded on an
// idle stream passes only a little later.
type past struct{}

func (past) Passed() (bool, error) { return true, nil }
func (past) Sync() error           { return nil }
func (past) Close()                {}

// An event marks a point in a stream; it goes back to its heap.
type event struct {
	heap *heap
	raw  cudadrv.Event
}

// event returns one that no one uses.
func (h *heap) event() (*event, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.spare); n > 0 {
		e := h.spare[n-1]
		h.spare = h.spare[:n-1]
		return e, nil
	}
	e := &event{heap: h}
	return e, newEvent(h.dev, &e.raw)
}

func (e *event) Passed() (passed bool, err error) {
	err = e.heap.do("cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result {
		r := drv.EventQuery(e.raw)
		if r == cudadrv.ErrorNotReady {
			return cudadrv.Success
		}
		passed = r == cudadrv.Success
		return r
	})
	return passed, err
}

func (e *event) Sync() error {
	return e.heap.do("cuEventSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventSynchronize(e.raw) })
}

func (e *event) Close() {
	e.heap.mu.Lock()
	defer e.heap.mu.Unlock()
	e.heap.spare = append(e.heap.spare, e)
}

// do is Device.Do for calls that may meet a capture of the same thread, which
// they do no harm.
func (h *heap) do(op string, call func(cudadrv.Driver) cudadrv.Result) error {
	if stream.AnyCapture() {
		return h.dev.DoRelaxed(op, call)
	}
	return h.dev.Do(op, call)
}
