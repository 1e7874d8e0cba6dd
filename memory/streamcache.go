package memory

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// A streamCache is the state of a stream in the allocators. Each stream has one.
type streamCache struct {
	s     *stream.Stream
	heap  *heap
	arena atomic.Pointer[alloc.Arena] // of the default pool; set by its first use
	pool  atomic.Pointer[poolUse]     // the last of uses, or nil
	ended atomic.Bool

	mu   sync.Mutex
	uses []*poolUse // calls of Pool.Use in progress
}

// A poolUse is one call of Pool.Use.
type poolUse struct {
	part  *alloc.Pool
	arena atomic.Pointer[alloc.Arena] // set by its first use
}

// of returns the arena that the streamCache's stream allocates from. The first call may take
// over the arena of a closed stream, and then makes this stream wait for that one,
// which would invalidate a capture of this stream.
func (u *poolUse) of(l *streamCache) (*alloc.Arena, error) {
	if a := u.arena.Load(); a != nil {
		return a, nil
	}
	a, err := u.part.Arena(l)
	if err == nil {
		u.arena.Store(a) // another goroutine would store the same arena
	}
	return a, err
}

// usePool directs the stream's allocations to a part of a pool until done is called. Several
// goroutines may do that at the same time, in any order of their ends.
func (l *streamCache) usePool(u *poolUse) (done func()) {
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

var streamCacheKey handle.Key

// streamCacheOf returns the streamCache of an open stream.
func streamCacheOf(op string, s *stream.Stream) (*streamCache, error) {
	if s == nil || !gpu.StreamOf(s).Open() {
		return nil, gpu.CheckStream(op, s, nil)
	}
	if v, ok := gpu.StreamOf(s).Kept(&streamCacheKey); ok {
		return v.(*streamCache), nil
	}
	return openStreamCache(s)
}

func openStreamCache(s *stream.Stream) (*streamCache, error) {
	v, err := gpu.StreamOf(s).Keep(&streamCacheKey, func() (any, func() error, error) {
		h, err := heapOf(s.Device())
		if err != nil {
			return nil, nil, err
		}
		l := &streamCache{s: s, heap: h}
		return l, l.handOver, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*streamCache), nil
}

// handOver passes the stream's memory on to others when the stream is destroyed.
func (l *streamCache) handOver() error {
	l.ended.Store(true)
	l.heap.native.End(l) // returns after all goroutines that found the stream open have left
	return nil
}

// current returns the stream's arena of the default pool.
func (l *streamCache) current() (*alloc.Arena, error) {
	if a := l.arena.Load(); a != nil {
		return a, nil
	}
	a, err := l.heap.native.Default().Arena(l)
	if err != nil {
		return nil, err
	}
	l.heap.markUsed()
	l.arena.Store(a) // another goroutine would store the same arena
	return a, nil
}

// The following methods implement alloc.Stream. They work on a closed but retained
// stream.

// Record returns an event, or nil while the stream is captured, because the event would
// become part of the graph.
func (l *streamCache) Record() (alloc.Event, error) {
	status := cudadrv.CaptureNone
	err := l.heap.do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(gpu.StreamOf(l.s).Raw())
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
	err = l.heap.do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e.raw, gpu.StreamOf(l.s).Raw()) })
	if err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// idle reports whether all operations of the stream have completed.
func (l *streamCache) idle() (bool, error) {
	return gpu.DeviceOf(l.heap.dev).ReadyBeside(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(gpu.StreamOf(l.s).Raw()) })
}

func (l *streamCache) Wait(e alloc.Event) error {
	x, ok := e.(*event)
	if !ok {
		return nil
	}
	return l.heap.do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.StreamWaitEvent(gpu.StreamOf(l.s).Raw(), x.raw, 0)
	})
}

// Sync fails if the stream is captured: the wait would invalidate the capture.
func (l *streamCache) Sync() error {
	if err := gpu.StreamOf(l.s).RefuseCapture("memory: free", "captured operations have not run and cannot be waited for"); err != nil {
		return fmt.Errorf("%w: %w", alloc.ErrBusy, err)
	}
	return l.heap.do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(gpu.StreamOf(l.s).Raw()) })
}

func (l *streamCache) Number() uint64 { return uint64(gpu.StreamOf(l.s).Raw()) }
func (l *streamCache) Ended() bool    { return l.ended.Load() }
func (l *streamCache) Done() bool     { return isDone(l.s) }
func (l *streamCache) Retain() bool   { return gpu.StreamOf(l.s).Retain() }

// isDone reports whether a retained stream is closed and all its operations have completed.
func isDone(s *stream.Stream) bool {
	return !gpu.StreamOf(s).Open() && !gpu.AnyCapture() && !gpu.InCallback() && idle(s)
}

// Release retires the stream. It is called with the allocator's locks held, and the
// destruction of the stream needs these locks, so releasePending releases the stream later.
func (l *streamCache) Release() { l.heap.retire(l.s) }

// retire marks the stream for release by the next releasePending.
func (h *heap) retire(s *stream.Stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.retired = append(h.retired, s)
	h.hasPending.Store(true)
}

// releasePending releases the retired streams, outside of the allocator's
// locks. It is called after each operation.
func (h *heap) releasePending() {
	if !h.hasPending.Load() || gpu.InCallback() {
		return
	}
	h.mu.Lock()
	list := h.retired
	h.retired = nil
	h.hasPending.Store(false)
	h.mu.Unlock()
	for _, s := range list {
		_ = gpu.StreamOf(s).Release() // a stream that cannot be destroyed does no harm
	}
}

// past is the event of an idle stream: all its operations are known to be complete, so
// it needs no event of the driver.
type past struct{}

func (past) Passed() (bool, error) { return true, nil }
func (past) Sync() error           { return nil }
func (past) Close()                {}

// An event is an event of the driver that returns to its heap when closed.
type event struct {
	heap *heap
	raw  cudadrv.Event
}

// event returns an unused event.
func (h *heap) event() (*event, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.freeEvents); n > 0 {
		e := h.freeEvents[n-1]
		h.freeEvents = h.freeEvents[:n-1]
		return e, nil
	}
	raw, err := gpu.DeviceOf(h.dev).NewEvent(cudadrv.EventDisableTiming)
	return &event{h, raw}, err
}

func (e *event) Passed() (bool, error) {
	return gpu.DeviceOf(e.heap.dev).ReadyBeside(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(e.raw) })
}

func (e *event) Sync() error {
	return e.heap.do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventSynchronize(e.raw) })
}

func (e *event) Close() {
	e.heap.mu.Lock()
	defer e.heap.mu.Unlock()
	e.heap.freeEvents = append(e.heap.freeEvents, e)
}

// do is gpu.Device.DoBeside.
func (h *heap) do(call gpu.Call) error { return gpu.DeviceOf(h.dev).DoBeside(call) }
