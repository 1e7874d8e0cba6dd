package gds

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
)

// A worker moves windows one after the other, while the copies of earlier windows are in
// progress. It belongs to one goroutine.
type worker struct {
	t          *transfer
	copyStream *copyStream
	held       []held
	turn       int
}

// held is a slot of a worker.
type held struct {
	slot   *slot // nil if it has none
	flying bool  // copies from or to it are pending
	w      window
	bytes  int64 // bytes being copied
}

func newWorker(t *transfer) (*worker, error) {
	l, err := takeCopyStream(gpu.DeviceOf(t.dev))
	if err != nil {
		return nil, err
	}
	return &worker{t: t, copyStream: l, held: make([]held, min(t.f.depth, maxDepth))}, nil
}

// freeSlot returns the index of a slot without pending copies, after finish has handled its
// contents. If other workers wait for slots, it returns its slot and waits in turn.
func (w *worker) freeSlot(finish func(i int) error) (int, error) {
	i := w.turn
	w.turn = (w.turn + 1) % len(w.held)
	if err := finish(i); err != nil {
		return 0, err
	}
	h := &w.held[i]
	if h.slot != nil && !w.t.ring.pressed() {
		return i, nil
	}
	if err := w.drop(h); err != nil {
		return 0, err
	}
	if h.slot = w.more(); h.slot != nil {
		return i, nil
	}
	for j := range w.held { // the oldest first
		if k := (w.turn + j) % len(w.held); w.held[k].slot != nil {
			w.turn = (k + 1) % len(w.held)
			return k, finish(k)
		}
	}
	return i, w.wait(h)
}

// more returns a slot if one is available at once, or nil.
func (w *worker) more() *slot {
	t := w.t
	if t.scarce() != nil {
		return nil
	}
	x, err := t.ring.tryAcquire(t.dev, t.slot)
	if err != nil {
		t.lack(err)
	}
	return x
}

// wait waits for a slot for a worker without slots. If no memory can be pinned the worker
// ends; other workers may have slots and do the work.
func (w *worker) wait(h *held) (err error) {
	t := w.t
	h.slot, err = t.ring.acquire(t.ctx, t.over, t.dev, t.slot)
	if err == nil || t.ctx.Err() != nil || errors.Is(err, errNoMore) {
		return err
	}
	t.lack(err)
	return errNoMore
}

// drop returns a slot to the ring.
func (w *worker) drop(h *held) error {
	if h.slot == nil {
		return nil
	}
	x := h.slot
	h.slot = nil
	return w.t.ring.release(x)
}

// release releases everything, when no copies are pending.
func (w *worker) release() error {
	errs := []error{w.copyStream.drain()}
	for i := range w.held {
		errs = append(errs, w.drop(&w.held[i]))
	}
	giveCopyStream(w.copyStream)
	return errors.Join(errs...)
}

// copy enqueues the copies between a slot and the pieces of a window.
func (w *worker) copy(i int, win window, move func(ptr cudadrv.DevicePtr, host unsafe.Pointer, bytes int64) error) error {
	h := &w.held[i]
	h.w, h.bytes = win, 0
	for j := win.first; j < win.last; {
		x, next := win.part(w.t.pieces, j)
		if err := move(x.ptr, h.slot.at(x.off-win.off), x.bytes); err != nil {
			return err
		}
		h.bytes += x.bytes
		j = next
	}
	h.flying = true
	return w.copyStream.mark(i)
}

// land waits for the copies of a slot, and reports whether there were any.
func (w *worker) land(i int) (bool, error) {
	h := &w.held[i]
	if !h.flying {
		return false, nil
	}
	h.flying = false
	if err := w.copyStream.await(i); err != nil {
		return false, err
	}
	return true, nil
}

// all finishes all slots, in their order.
func (w *worker) all(finish func(i int) error) error {
	for range w.held {
		if err := finish(w.turn); err != nil {
			return err
		}
		w.turn = (w.turn + 1) % len(w.held)
	}
	return nil
}

// maxDepth is the maximum number of slots of a worker.
const maxDepth = 4

// A copyStream is a stream for the copies of one worker, with an event for each slot. A device
// keeps its copyStreams for later calls, until its context is released.
type copyStream struct {
	dev    *gpu.Device
	stream cudadrv.Stream
	events [maxDepth]cudadrv.Event
}

// copyStreams are the unused copyStreams of a device.
type copyStreams struct {
	mu   sync.Mutex
	free []*copyStream
}

var copyStreamsKey handle.Key

func copyStreamsOf(dev *gpu.Device) *copyStreams {
	return dev.Local(&copyStreamsKey, func() any { return new(copyStreams) }).(*copyStreams)
}

// takeCopyStream returns an idle copyStream.
func takeCopyStream(dev *gpu.Device) (*copyStream, error) {
	if l := copyStreamsOf(dev).take(); l != nil {
		return l, nil
	}
	l := &copyStream{dev: dev}
	if err := l.allocate(); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// take returns an existing copyStream, or nil.
func (x *copyStreams) take() *copyStream {
	x.mu.Lock()
	defer x.mu.Unlock()
	n := len(x.free)
	if n == 0 {
		return nil
	}
	l := x.free[n-1]
	x.free = x.free[:n-1]
	return l
}

// giveCopyStream returns a drained copyStream.
func giveCopyStream(l *copyStream) {
	list := copyStreamsOf(l.dev)
	list.mu.Lock()
	defer list.mu.Unlock()
	list.free = append(list.free, l)
}

func (l *copyStream) allocate() (err error) {
	l.stream, err = l.dev.NewStream(0)
	for i := range l.events {
		if err != nil {
			return err
		}
		l.events[i], err = l.dev.NewEvent(cudadrv.EventDisableTiming | cudadrv.EventBlockingSync)
	}
	return err
}

// close destroys the resources that open has created, except those that the
// driver does not destroy, which are released with the context.
func (l *copyStream) close() {
	for _, e := range l.events {
		if e != 0 {
			_ = l.dev.DestroyEvent(e)
		}
	}
	if l.stream != 0 {
		_ = l.dev.DestroyStream(l.stream)
	}
}

func (l *copyStream) upload(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes int64) error {
	return l.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(dst, src, uintptr(bytes), l.stream)
	})
}

func (l *copyStream) download(src cudadrv.DevicePtr, dst unsafe.Pointer, bytes int64) error {
	return l.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoHAsync(dst, src, uintptr(bytes), l.stream)
	})
}

// mark records event i after the operations on the copyStream.
func (l *copyStream) mark(i int) error { return l.dev.RecordEvent(l.events[i], l.stream) }

// pollTime is how long a worker polls for the end of its copies before its thread sleeps.
// Waking the thread, especially in a virtual machine, may take longer than the copies.
// Tests change it.
var pollTime = 200 * time.Microsecond

// await waits for event i, which takes a short time, because only copies
// precede it.
func (l *copyStream) await(i int) error {
	for start := time.Now(); time.Since(start) < pollTime; runtime.Gosched() {
		if passed, err := l.passed(i); passed || err != nil {
			return err
		}
	}
	return l.dev.SyncEvent(l.events[i])
}

// passed reports whether event i has passed.
func (l *copyStream) passed(i int) (bool, error) { return l.dev.QueryEvent(l.events[i]) }

// drain waits for everything on the copyStream.
func (l *copyStream) drain() error { return l.dev.SyncStream(l.stream) }

// A ring limits the pinned memory that all files of a System use. The memory comes from
// package memory, which caches it for the next call until memory.EmptyHostCache. Waiting
// calls are served in order.
type ring struct {
	bound   int64 // in bytes
	err     error // of parsing the bound in the environment
	make    func(dev *device.Device, bytes int) (*memory.Pinned[byte], error)
	waiters atomic.Int32

	mu      sync.Mutex
	used    int64
	waiting []*waiter
	slots   int           // slots in use or being allocated
	given   chan struct{} // closed when a slot is returned, or the last allocation of one fails
}

// A waiter is a call that waits for a slot.
type waiter struct {
	bytes int64
	come  chan struct{}
}

// A slot is pinned memory that a worker fills and empties.
type slot struct {
	pinned *memory.Pinned[byte]
	buf    []byte
	bytes  int64
}

func (x *slot) at(i int64) unsafe.Pointer { return unsafe.Pointer(&x.buf[i]) }

var ringKey handle.Key

// ringOf returns the ring of the device's System.
func ringOf(dev *device.Device) (*ring, error) {
	r := gpu.DeviceOf(dev).System().Local(&ringKey, func() any { return newRing() }).(*ring)
	return r, r.err
}

func newRing() *ring {
	n, err := env.GDSPinned.Uint64()
	if err == nil && (n < minSlot || n > math.MaxInt64) {
		err = &env.ValueError{Name: env.GDSPinned.Name, Value: env.GDSPinned.Value(), Want: fmt.Sprintf("at least %d bytes", minSlot)}
	}
	return &ring{bound: int64(n), err: err, make: memory.MakePinned[byte], given: make(chan struct{})}
}

// errNoMore reports that all windows are taken, so that no slot is needed.
var errNoMore = errors.New("no more slots are wanted")

// acquire waits for a slot, unless ctx ends or over is closed. If no more memory can be
// pinned it waits for a slot of another worker.
func (r *ring) acquire(ctx context.Context, over <-chan struct{}, dev *device.Device, bytes int64) (*slot, error) {
	for {
		if err := r.awaitBytes(ctx, over, bytes); err != nil {
			return nil, err
		}
		x, given, err := r.pin(dev, bytes)
		if given == nil {
			return x, err
		}
		select {
		case <-given:
		case <-over:
			return nil, errNoMore
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// awaitBytes waits until the limit permits the bytes.
func (r *ring) awaitBytes(ctx context.Context, over <-chan struct{}, bytes int64) error {
	t := r.queue(bytes)
	if t == nil {
		return nil
	}
	defer r.waiters.Add(-1)
	select {
	case <-t.come:
		return nil
	case <-over:
		r.withdraw(t)
		return errNoMore
	case <-ctx.Done():
		r.withdraw(t)
		return context.Cause(ctx)
	}
}

// tryAcquire returns a slot, or nil if none is available at once.
func (r *ring) tryAcquire(dev *device.Device, bytes int64) (*slot, error) {
	r.mu.Lock()
	ok := len(r.waiting) == 0 && r.used+bytes <= r.bound
	if ok {
		r.used += bytes
	}
	r.mu.Unlock()
	if !ok {
		return nil, nil
	}
	x, _, err := r.pin(dev, bytes)
	return x, err
}

// queue reserves the bytes, or adds a waiter.
func (r *ring) queue(bytes int64) *waiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 && r.used+bytes <= r.bound {
		r.used += bytes
		return nil
	}
	t := &waiter{bytes, make(chan struct{})}
	r.waiting = append(r.waiting, t)
	r.waiters.Add(1)
	return t
}

// withdraw gives back a place in the queue, or the bytes that were granted meanwhile.
func (r *ring) withdraw(t *waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiting, t); i >= 0 {
		r.waiting = slices.Delete(r.waiting, i, i+1)
	} else {
		r.used -= t.bytes
	}
	r.grant()
}

// pin allocates a slot for reserved bytes. If that fails while others have slots, given is
// closed when a slot is returned.
func (r *ring) pin(dev *device.Device, bytes int64) (x *slot, given <-chan struct{}, err error) {
	r.mu.Lock()
	r.slots++
	before := r.given
	r.mu.Unlock()
	p, err := r.make(dev, int(bytes))
	if err == nil {
		return &slot{p, p.Data(), bytes}, nil, nil
	}
	r.giveBack(bytes)
	err = fmt.Errorf("%w: %s bounds the pinned memory that files use", err, env.GDSPinned.Name)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots--
	if r.slots > 0 || r.given != before {
		return nil, before, err
	}
	r.tell() // wake the waiters for this slot, which will not exist
	return nil, nil, err
}

// release returns a slot without pending copies.
func (r *ring) release(x *slot) error {
	err := x.pinned.Close()
	r.giveBack(x.bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots--
	r.tell()
	return err
}

// tell wakes the workers that wait for memory of others. r.mu is held.
func (r *ring) tell() {
	close(r.given)
	r.given = make(chan struct{})
}

func (r *ring) giveBack(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used -= bytes
	r.grant()
}

// grant admits the first waiters while there is room for them. r.mu is held.
func (r *ring) grant() {
	for len(r.waiting) > 0 && r.used+r.waiting[0].bytes <= r.bound {
		r.used += r.waiting[0].bytes
		close(r.waiting[0].come)
		r.waiting = r.waiting[1:]
	}
}

// pressed reports whether a call waits for a slot.
func (r *ring) pressed() bool { return r.waiters.Load() > 0 }
