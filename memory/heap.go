package memory

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/alloc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// A heap has the memory of one device: that of the caching allocator, which pools
// and captures use in any case, and that of an Allocator which takes its place for
// all else.
type heap struct {
	dev    *device.Device
	total  uint64 // bytes
	native *alloc.Device

	engine atomic.Pointer[uncached] // for what is in no pool; nil is native
	cached *uncached                // the engine while caching is on, guarded by mu
	plain  *uncached                // the engine while it is off, once it was, guarded by mu

	owes   atomic.Bool // there is something in retired
	closed atomic.Bool // with the System

	mu      sync.Mutex
	spare   []*event
	retired []*stream.Stream // to be released
	engines []*uncached      // all that ever were the engine
	used    bool             // something was allocated
}

var (
	heapKey   kept.Key // of the heap, once it is there
	makingKey kept.Key // of what makes it
)

// heapOf returns the device's heap. The error is a mistake in the options, or of the
// driver; the next call tries again.
func heapOf(d *device.Device) (*heap, error) {
	if d == nil {
		return nil, errors.New("memory: no device given")
	}
	if v, ok := d.Kept(&heapKey); ok {
		return v.(*heap), nil
	}
	making := d.Local(&makingKey, func() any { return new(sync.Mutex) }).(*sync.Mutex)
	making.Lock()
	defer making.Unlock()
	if v, ok := d.Kept(&heapKey); ok {
		return v.(*heap), nil
	}
	h, err := newHeap(d)
	if err != nil {
		return nil, err
	}
	return d.Local(&heapKey, func() any { return h }).(*heap), nil
}

func newHeap(d *device.Device) (*heap, error) {
	s, err := settings()
	if err != nil {
		return nil, err
	}
	if _, err := d.Context(); err != nil {
		return nil, err
	}
	total, r := d.Driver().DeviceTotalMem(d.Handle())
	if err := d.Check("cuDeviceTotalMem", r); err != nil {
		return nil, err
	}
	h := &heap{dev: d, total: uint64(total)}
	cfg := alloc.Config{Source: driverSource{h}, Total: uint64(total), Low: h.low, Barred: barred, Capturing: stream.AnyCapture, Free: h.left, Sync: h.sync}
	if cfg.Pages, err = newPages(h, uint64(total)); err != nil {
		return nil, err
	}
	if cfg.Pages == nil && s.Expandable {
		return nil, fmt.Errorf("memory: expandable_segments:True: %s cannot map physical memory: leave the option out", d)
	}
	if a, ok := d.Driver().(cudadrv.Auditor); ok {
		cfg.Auditor = auditor{a}
	}
	h.native = alloc.NewDevice(cfg, options)
	if s.Backend == backendAsync {
		h.cached = h.uncached(asyncAllocator{})
		h.engine.Store(h.cached)
	}
	d.System().Local(&heapsKey, func() any { return &heaps{} }).(*heaps).add(h)
	return h, nil
}

// heaps are those of one System.
type heaps struct {
	mu   sync.Mutex
	list []*heap
}

var heapsKey kept.Key

func (x *heaps) add(h *heap) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list = append(x.list, h)
}

// Close gives back what is cached, since the contexts may be others' too, and lets
// nothing more be allocated.
func (x *heaps) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var errs []error
	for _, h := range x.list {
		h.closed.Store(true)
		h.native.Close()
		if h.dev.Err() == nil {
			errs = append(errs, h.empty())
		}
	}
	return errors.Join(errs...)
}

// left returns what the driver has left, or 0 where it cannot say.
func (h *heap) left() uint64 {
	free, _, _ := h.dev.MemoryInfo()
	return free
}

// sync waits for all work of the device, unless something is captured: the wait
// would end the capture.
func (h *heap) sync() error {
	if stream.AnyCapture() {
		return alloc.ErrBusy
	}
	return h.dev.Do("cuCtxSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
}

// barred refuses callbacks: CUDA forbids them the driver, and who waits with a lock for
// the driver may wait for them.
func barred() error {
	if stream.InCallback() {
		return errCallback
	}
	return nil
}

var errCallback = fmt.Errorf("it needs the driver, which a callback must not use: do it outside, or allocate and free memory of that size before: %w", device.ErrorNotPermitted)

// low frees what nobody needs any more, when memory is short.
func (h *heap) low() { _ = IPCCollect(h.dev) } // what it cannot free, it cannot

// A grant is memory that was given out.
type grant struct {
	addr     uint64
	by       freer // nil if there is none
	captured bool  // it belongs to the capture that the stream takes part in
}

// plain returns the arena for an allocation about which nothing is special, or nil.
func (l *lane) plain() *alloc.Arena {
	if stream.AnyCapture() || l.pool.Load() != nil || l.heap.engine.Load() != nil || l.heap.owes.Load() || l.heap.dev.Err() != nil {
		return nil
	}
	return l.arena.Load()
}

// alloc allocates for work on the lane's stream: from the pool of the capture that
// the stream takes part in, from the pool that is in use, or as everybody else.
func (l *lane) alloc(bytes int) (g grant, err error) {
	if bytes < 0 {
		return grant{}, fmt.Errorf("memory: allocate %d bytes on %s: the size is negative", bytes, l.heap.dev)
	}
	if bytes == 0 {
		return grant{}, nil
	}
	if err := l.heap.dev.Err(); err != nil {
		return grant{}, fmt.Errorf("memory: allocate %d bytes: the device was lost before: %w", bytes, err)
	}
	var a *alloc.Arena
	if stream.AnyCapture() {
		if a, err = l.capturing(); err != nil {
			return grant{}, err
		}
		g.captured = a != nil
	}
	if a == nil {
		u, e := l.pool.Load(), l.heap.engine.Load()
		switch {
		case u != nil:
			a, err = u.of(l)
		case e != nil:
			addr, err := e.alloc(l, bytes)
			return grant{addr: addr, by: e}, err
		default:
			a, err = l.current()
		}
		if err != nil {
			return grant{}, l.heap.explain(bytes, err)
		}
	}
	g.addr, err = a.Alloc(uint64(bytes))
	l.heap.tidy()
	if err != nil {
		return grant{}, l.heap.explain(bytes, err)
	}
	g.by = l.heap.native
	return g, nil
}

// capturing returns the arena for the capture that the stream takes part in, or nil
// where it takes part in none.
func (l *lane) capturing() (*alloc.Arena, error) {
	const op = "memory: allocate"
	pool, err := l.s.CapturePool()
	if errors.Is(err, device.Status(cudadrv.ErrorStreamCaptureInvalidated)) {
		return nil, &stream.CaptureError{Op: op, Object: l.s.String(),
			Advice: "an earlier call has invalidated the capture: end the capture, and capture again without that call"}
	}
	if err != nil {
		return nil, err
	}
	if p, ok := pool.(*Pool); ok {
		return p.captured(l)
	}
	return nil, l.s.RefuseCapture(op, "the capture was begun by other means than Chorus: allocate before it")
}

// A freer has given memory out and takes it back.
type freer interface {
	Free(addr uint64) error
	RecordStream(addr uint64, s alloc.Stream) error
}

// owner returns who has given an address out, or native.
func (h *heap) owner(addr uint64) freer {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range h.engines {
		if d.has(addr) {
			return d
		}
	}
	return h.native
}

// auditor tells virtual devices what is given out.
type auditor struct{ cudadrv.Auditor }

func (a auditor) Lend(s alloc.Stream, addr, bytes uint64) {
	a.MemLend(cudadrv.DevicePtr(addr), uintptr(bytes), s.(*lane).s.Raw())
}

func (a auditor) Return(s alloc.Stream, addr, bytes uint64) {
	a.MemReturn(cudadrv.DevicePtr(addr), uintptr(bytes), s.(*lane).s.Raw())
}
