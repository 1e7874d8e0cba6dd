package memory

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// A heap allocates the memory of one device. Pools and captures always use its caching
// allocator. For all other memory an Allocator may replace the caching allocator.
type heap struct {
	dev    *device.Device
	total  uint64 // bytes
	native *alloc.Device

	engine atomic.Pointer[uncached] // for memory in no pool; nil means native
	cached *uncached                // the engine while caching is on, guarded by mu
	plain  *uncached                // the engine while caching is off, set by the first switch, guarded by mu

	owes   atomic.Bool // retired is not empty
	closed atomic.Bool // the System was closed

	mu      sync.Mutex
	spare   []*event
	retired []*stream.Stream // streams to release
	engines []*uncached      // every engine this heap has ever had
	used    bool             // memory was allocated

	forget func() // removes the heap from the status of the process
}

var (
	heapKey   kept.Key // of the heap, once it exists
	makingKey kept.Key // of the constructor of the heap
)

// heapOf returns the device's heap. It fails if the options are invalid or if the
// driver fails; the next call tries again.
func heapOf(d *device.Device) (*heap, error) {
	if d == nil {
		return nil, errors.New("memory: no device given")
	}
	if v, ok := gpu.DeviceOf(d).Kept(&heapKey); ok {
		return v.(*heap), nil
	}
	making := gpu.DeviceOf(d).Local(&makingKey, func() any { return new(sync.Mutex) }).(*sync.Mutex)
	making.Lock()
	defer making.Unlock()
	if v, ok := gpu.DeviceOf(d).Kept(&heapKey); ok {
		return v.(*heap), nil
	}
	h, err := newHeap(d)
	if err != nil {
		return nil, err
	}
	return gpu.DeviceOf(d).Local(&heapKey, func() any { return h }).(*heap), nil
}

func newHeap(d *device.Device) (*heap, error) {
	s, err := settings()
	if err != nil {
		return nil, err
	}
	if _, err := gpu.DeviceOf(d).Context(); err != nil {
		return nil, err
	}
	var total uintptr
	err = gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		total, r = drv.DeviceTotalMem(gpu.DeviceOf(d).Handle())
		return r
	})
	if err != nil {
		return nil, err
	}
	h := &heap{dev: d, total: uint64(total)}
	cfg := alloc.Config{Ordinal: gpu.DeviceOf(d).Ordinal(), Source: driverSource{h}, Total: uint64(total), Low: h.low, Barred: barred, Capturing: gpu.Pending, Free: h.left, Sync: h.sync}
	if cfg.Pages, err = newPages(h, uint64(total)); err != nil {
		return nil, err
	}
	if cfg.Pages == nil && s.Expandable {
		return nil, fmt.Errorf("memory: expandable_segments:True: %s cannot map physical memory: leave the option out", d)
	}
	if a, ok := gpu.DeviceOf(d).Driver().(cudadrv.Auditor); ok {
		cfg.Auditor = auditor{a}
	}
	h.native = alloc.NewDevice(cfg, options)
	if s.Backend == backendAsync {
		h.cached = h.uncached(asyncAllocator{})
		h.engine.Store(h.cached)
	}
	gpu.DeviceOf(d).System().Local(&heapsKey, func() any { return &heaps{} }).(*heaps).add(h)
	return h, nil
}

// heaps are the heaps of one System.
type heaps struct {
	mu   sync.Mutex
	list []*heap
}

var heapsKey kept.Key

func (x *heaps) add(h *heap) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list = append(x.list, h)
	h.register()
}

// Close returns cached memory to the driver, since other libraries may use the contexts
// too, and makes further allocations fail.
func (x *heaps) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var errs []error
	for _, h := range x.list {
		h.closed.Store(true)
		h.forget()
		h.native.Close()
		if h.dev.Err() == nil {
			errs = append(errs, h.empty())
		}
	}
	return errors.Join(errs...)
}

// left returns the free memory of the device, or 0 if the driver does not report it.
func (h *heap) left() uint64 {
	free, _, _ := h.dev.MemoryInfo()
	return free
}

// sync waits for all work of the device. It fails with ErrBusy while any stream is
// captured, because the wait would invalidate the capture.
func (h *heap) sync() error {
	if gpu.AnyCapture() {
		return alloc.ErrBusy
	}
	return gpu.DeviceOf(h.dev).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
}

// barred returns an error in a host callback. CUDA forbids driver calls there, and a
// goroutine that holds a lock during a driver call may be waiting for the callback.
func barred() error {
	if gpu.InCallback() {
		return errCallback
	}
	return nil
}

var errCallback = fmt.Errorf("it needs the driver, which a callback must not use: do it outside, or allocate and free memory of that size before: %w", device.ErrorNotPermitted)

// low frees unused memory when the device is short of memory.
func (h *heap) low() { _ = IPCCollect(h.dev) } // memory that cannot be freed now stays allocated

// A grant is memory that a heap has allocated for a caller.
type grant struct {
	addr     uint64
	by       freer // nil if there is none
	captured bool  // it belongs to the capture of the stream
}

// plain returns the arena for an allocation that needs no special handling, or nil.
func (l *lane) plain() *alloc.Arena {
	if gpu.AnyCapture() || l.pool.Load() != nil || l.heap.engine.Load() != nil || l.heap.owes.Load() || l.heap.dev.Err() != nil {
		return nil
	}
	return l.arena.Load()
}

// alloc allocates memory for operations on the lane's stream: from the pool of the
// stream's capture, from the pool in use, or from the engine of the heap.
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
	if gpu.AnyCapture() {
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

// capturing returns the arena for the capture that the stream takes part in, or nil if
// the stream is not captured.
func (l *lane) capturing() (*alloc.Arena, error) {
	const op = "memory: allocate"
	pool, err := gpu.StreamOf(l.s).CapturePool()
	if errors.Is(err, device.Status(cudadrv.ErrorStreamCaptureInvalidated)) {
		return nil, &device.CaptureError{Op: op, Object: l.s.String(),
			Advice: "an earlier call has invalidated the capture: end the capture, and capture again without that call"}
	}
	if err != nil {
		return nil, err
	}
	if p, ok := pool.(*capturePool); ok {
		return (*Pool)(p).captured(l)
	}
	return nil, gpu.StreamOf(l.s).RefuseCapture(op, "the capture was begun by other means than Chorus: allocate before it")
}

// A freer frees the memory that it has allocated.
type freer interface {
	Free(addr uint64) error
	RecordStream(addr uint64, s alloc.Stream) error
}

// owner returns the engine that has allocated addr, or native.
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

// auditor reports allocations to virtual devices.
type auditor struct{ cudadrv.Auditor }

func (a auditor) Lend(s alloc.Stream, addr, bytes uint64) {
	a.MemLend(cudadrv.DevicePtr(addr), uintptr(bytes), gpu.StreamOf(s.(*lane).s).Raw())
}

func (a auditor) Return(s alloc.Stream, addr, bytes uint64) {
	a.MemReturn(cudadrv.DevicePtr(addr), uintptr(bytes), gpu.StreamOf(s.(*lane).s).Raw())
}
