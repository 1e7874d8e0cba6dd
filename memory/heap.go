package memory

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
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

	hasPending atomic.Bool // retired is not empty
	closed     atomic.Bool // the System was closed

	mu         sync.Mutex
	freeEvents []*event
	retired    []*stream.Stream // streams to release
	engines    []*uncached      // every engine this heap has ever had
	used       bool             // memory was allocated

	adopted adoptions

	forget func() // removes the heap from the status of the process
}

var (
	heapKey   handle.Key // of the heap, once it exists
	makingKey handle.Key // of the constructor of the heap
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

var heapsKey handle.Key

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
func (l *streamCache) plain() *alloc.Arena {
	if gpu.AnyCapture() || l.pool.Load() != nil || l.heap.engine.Load() != nil || l.heap.hasPending.Load() || l.heap.dev.Err() != nil {
		return nil
	}
	return l.arena.Load()
}

// alloc allocates memory for operations on the streamCache's stream: from the pool of the
// stream's capture, from the pool in use, or from the engine of the heap.
func (l *streamCache) alloc(bytes int) (g grant, err error) {
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
	l.heap.releasePending()
	if err != nil {
		return grant{}, l.heap.explain(bytes, err)
	}
	g.by = l.heap.native
	return g, nil
}

// capturing returns the arena for the capture that the stream takes part in, or nil if
// the stream is not captured.
func (l *streamCache) capturing() (*alloc.Arena, error) {
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

func (a auditor) Allocated(s alloc.Stream, addr, bytes uint64) {
	a.MemAllocated(cudadrv.DevicePtr(addr), uintptr(bytes), gpu.StreamOf(s.(*streamCache).s).Raw())
}

func (a auditor) Freed(s alloc.Stream, addr, bytes uint64) {
	a.MemFreed(cudadrv.DevicePtr(addr), uintptr(bytes), gpu.StreamOf(s.(*streamCache).s).Raw())
}

// EmptyCache returns all cached memory that is not in use to the driver
// (torch.cuda.empty_cache), except the memory of an open Pool. The host waits for the
// streams that RecordStream named for freed blocks. A segment stays if a part is in use.
func EmptyCache(d *device.Device) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	return h.empty()
}

func (h *heap) empty() error {
	err := h.native.Empty()
	h.releasePending()
	if a, ok := h.async(); ok {
		err = errors.Join(err, a.trim(h.dev))
	}
	if err != nil {
		return fmt.Errorf("memory: empty the cache of %s: %w", h.dev, err)
	}
	return nil
}

// StatsOf returns the statistics of the device's allocator (torch.cuda.memory_stats).
// All values are of one moment; the call visits every stream that has allocated. For
// cudaMallocAsync and for allocators of ChangeAllocator, only the allocations and the
// reserved memory are known. If the program used both such an allocator and the caching
// allocator, each peak is the sum of their two peaks, which may be from different
// times.
func StatsOf(d *device.Device) (Stats, error) {
	h, err := heapOf(d)
	if err != nil {
		return Stats{}, err
	}
	s := h.nativeStats()
	h.mu.Lock()
	engines := slices.Clone(h.engines)
	h.mu.Unlock()
	for _, e := range engines {
		if err := e.add(&s); err != nil {
			return Stats{}, fmt.Errorf("memory: read the statistics of %s: %w", d, err)
		}
	}
	return s, nil
}

func (h *heap) nativeStats() Stats {
	r, c := h.native.ReadAll(), h.native.Counts()
	s := Stats{
		OversizeAllocations: Stat(c.OversizeBlocks), OversizeSegments: Stat(c.OversizeSegments),
		AllocRetries: c.Retries, OOMs: c.OutOfMemory, SyncAllStreams: c.Syncs, DeviceAllocs: c.Taken, DeviceFrees: c.Given,
		MaxSplitSize: -1,
	}
	if most := options.Load().MaxSplit; most != math.MaxUint64 {
		s.MaxSplitSize = int64(most)
	}
	for g, to := range map[alloc.Gauge]*PoolStats{
		alloc.Allocation: &s.Allocation, alloc.Segments: &s.Segment, alloc.Active: &s.Active, alloc.InactiveSplit: &s.InactiveSplit,
		alloc.AllocatedBytes: &s.AllocatedBytes, alloc.ReservedBytes: &s.ReservedBytes, alloc.ActiveBytes: &s.ActiveBytes,
		alloc.InactiveSplitBytes: &s.InactiveSplitBytes, alloc.RequestedBytes: &s.RequestedBytes,
	} {
		*to = PoolStats{All: Stat(r[g].All), Small: Stat(r[g].Small), Large: Stat(r[g].Large)}
	}
	return s
}

// add adds the engine's statistics to s.
func (e *uncached) add(s *Stats) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.stats
	if a, ok := e.a.(asyncAllocator); ok {
		var err error
		if x.ReservedBytes.All.Current, x.ReservedBytes.All.Peak, err = a.reserved(e.h.dev); err != nil {
			return err
		}
	}
	to, from := s.ofEngines(), x.ofEngines()
	for i := range to {
		to[i].sum(*from[i])
	}
	s.OOMs += x.OOMs
	s.DeviceAllocs += x.DeviceAllocs
	s.DeviceFrees += x.DeviceFrees
	return nil
}

// ofEngines returns the statistics of s that an engine also keeps.
func (s *Stats) ofEngines() []*Stat {
	return []*Stat{&s.Allocation.All, &s.Active.All, &s.AllocatedBytes.All, &s.ActiveBytes.All, &s.RequestedBytes.All, &s.ReservedBytes.All}
}

func (s *Stat) sum(o Stat) {
	s.Current += o.Current
	s.Peak += o.Peak
	s.Allocated += o.Allocated
	s.Freed += o.Freed
}

// ResetPeakStats resets the peaks to the current values
// (torch.cuda.reset_peak_memory_stats).
func ResetPeakStats(d *device.Device) error {
	return resetStats(d, (*alloc.Device).ResetPeaks, (*uncached).resetPeaks)
}

// ResetAccumulatedStats sets the totals of allocated and freed memory, retries and
// errors to zero (torch.cuda.reset_accumulated_memory_stats).
func ResetAccumulatedStats(d *device.Device) error {
	return resetStats(d, (*alloc.Device).ResetSums, (*uncached).resetSums)
}

func resetStats(d *device.Device, native func(*alloc.Device), engine func(*uncached) error) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	native(h.native)
	h.mu.Lock()
	engines := slices.Clone(h.engines)
	h.mu.Unlock()
	var errs []error
	for _, e := range engines {
		errs = append(errs, engine(e))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("memory: reset the statistics of %s: %w", d, err)
	}
	return nil
}

func (e *uncached) resetPeaks() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.stats.ofEngines() {
		s.Peak = s.Current
	}
	if a, ok := e.a.(asyncAllocator); ok {
		return a.resetPeak(e.h.dev)
	}
	return nil
}

func (e *uncached) resetSums() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.stats.ofEngines() {
		s.Allocated, s.Freed = 0, 0
	}
	e.stats.OOMs, e.stats.DeviceAllocs, e.stats.DeviceFrees = 0, 0, 0
	return nil
}

// Allocated returns the bytes that the program has allocated on the device, with the
// rounded size of each block (torch.cuda.memory_allocated).
func Allocated(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.AllocatedBytes.All.Current, err
}

// MaxAllocated returns the peak of Allocated since ResetPeakStats
// (torch.cuda.max_memory_allocated).
func MaxAllocated(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.AllocatedBytes.All.Peak, err
}

// Reserved returns the bytes that the allocator has reserved from the driver, used or
// cached
// (torch.cuda.memory_reserved, torch.cuda.memory_cached).
func Reserved(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.ReservedBytes.All.Current, err
}

// MaxReserved returns the peak of Reserved since ResetPeakStats
// (torch.cuda.max_memory_reserved, torch.cuda.max_memory_cached).
func MaxReserved(d *device.Device) (int64, error) {
	s, err := StatsOf(d)
	return s.ReservedBytes.All.Peak, err
}

// SetFraction limits how much memory the allocator reserves from the driver: a
// fraction of the device's memory, from 0 to 1. Allocations beyond it are out
// of memory (torch.cuda.set_per_process_memory_fraction). Memory that is
// already reserved stays reserved. 1 means no limit.
func SetFraction(d *device.Device, fraction float64) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	if !(fraction >= 0 && fraction <= 1) {
		return fmt.Errorf("memory: limit the memory of %s to %g of all: want a number from 0 to 1", d, fraction)
	}
	h.native.SetFraction(fraction)
	return nil
}

// Fraction returns the fraction set by SetFraction, or else by the options
// (torch.cuda.get_per_process_memory_fraction).
func Fraction(d *device.Device) (float64, error) {
	h, err := heapOf(d)
	if err != nil {
		return 0, err
	}
	return h.native.Fraction(), nil
}

// The names of the backends in the options.
const (
	backendNative = "native"
	backendAsync  = "cudaMallocAsync"
)

// options are the options of all devices, nil before their first use.
var options = new(atomic.Pointer[alloc.Settings])

// optionsText is the text of the options. It is stored before them.
var optionsText atomic.Pointer[string]

// environment reads the options from the environment, unless SetAllocatorSettings was
// called before.
var environment = sync.OnceValue(func() error {
	v := env.AllocConf
	if !v.IsSet() {
		if v = env.TorchAcceleratorAllocConf; !v.IsSet() {
			v = env.TorchAllocConf
		}
	}
	text := v.Value()
	s, err := alloc.ParseSettings(text)
	if err != nil {
		return fmt.Errorf("memory: %s: %w", v.Name, err)
	}
	optionsText.CompareAndSwap(nil, &text)
	options.CompareAndSwap(nil, &s)
	return nil
})

// settings returns the options, or an error if those in the environment are
// invalid.
func settings() (alloc.Settings, error) {
	if s := options.Load(); s != nil {
		return *s, nil
	}
	if err := environment(); err != nil {
		return alloc.Settings{}, err
	}
	return *options.Load(), nil
}

// SetAllocatorSettings changes the options of the allocators, in torch's
// format, such as "max_split_size_mb:128,expandable_segments:True", for later
// allocations (torch.cuda.memory._set_allocator_settings). Options that the
// text does not name get their defaults. The backend changes only for devices
// that this package has not used yet. If it fails, the options do not change.
// SetAllocatorSettings may be called at any time.
func SetAllocatorSettings(conf string) error {
	s, err := alloc.ParseSettings(conf)
	if err != nil {
		return fmt.Errorf("memory: set the allocator's options: %w", err)
	}
	optionsText.Store(&conf)
	options.Store(&s)
	return nil
}

// Backend returns the name of the device's allocator: "native", "cudaMallocAsync", or
// "pluggable" for an allocator of ChangeAllocator (torch.cuda.get_allocator_backend).
func Backend(d *device.Device) (string, error) {
	h, err := heapOf(d)
	if err != nil {
		return "", err
	}
	if _, ok := h.async(); ok {
		return backendAsync, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cached != nil {
		return "pluggable", nil
	}
	return backendNative, nil
}

// pages allocates physical memory from the driver and maps it, for expandable segments.
// Its methods are called one at a time, except reopen.
type pages struct {
	h    *heap
	size uint64
	// reach is the size of a segment's address range in bytes. It exceeds the device's
	// memory, so that there is always room after the last block.
	reach uint64
	prop  cudadrv.MemAllocationProp
	known *mappedPages
}

// leastPage is the minimum page size, even if the driver supports smaller pages: the
// size of a small segment.
const leastPage = 2 << 20

// newPages returns nil if the device does not support virtual memory management.
func newPages(h *heap, total uint64) (alloc.PageSource, error) {
	d := h.dev
	attr := func(a cudadrv.Attribute) (bool, error) {
		v, err := gpu.DeviceOf(d).Attribute(a)
		return v != 0, err
	}
	can, err := attr(cudadrv.AttrVMMSupported)
	if err != nil || !can {
		return nil, err
	}
	p := &pages{h: h, prop: cudadrv.MemAllocationProp{Device: gpu.DeviceOf(d).Handle()}, known: pagesOf(d)}
	fd, err := attr(cudadrv.AttrPosixFDHandleSupported)
	if err != nil {
		return nil, err
	}
	if fd {
		p.prop.HandleTypes = cudadrv.MemHandlePosixFD
	}
	if p.prop.GPUDirectRDMACapable, err = attr(cudadrv.AttrGPUDirectRDMAWithVMM); err != nil {
		return nil, err
	}
	var least uintptr
	err = gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		least, r = drv.MemGetAllocationGranularity(p.prop, cudadrv.MemGranularityMinimum)
		return r
	})
	if err != nil {
		return nil, err
	}
	p.size = (leastPage + uint64(least) - 1) / uint64(least) * uint64(least)
	p.reach = (total + total/8 + p.size - 1) / p.size * p.size
	gpu.DeviceOf(d).OnPeer(p.reopen)
	return p, nil
}

func (p *pages) PageSize() uint64 { return p.size }
func (p *pages) Reach() uint64    { return p.reach }

func (p *pages) Reserve(bytes uint64) (addr uint64, err error) {
	a, err := gpu.ValueInTime(gpu.DeviceOf(p.h.dev), func(drv cudadrv.Driver) (cudadrv.DevicePtr, cudadrv.Result) {
		return drv.MemAddressReserve(uintptr(bytes), uintptr(p.size), 0)
	})
	return uint64(a), err
}

func (p *pages) Unreserve(addr, bytes uint64) error {
	return gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemAddressFree(cudadrv.DevicePtr(addr), uintptr(bytes))
	})
}

func (p *pages) Create() (page uint64, err error) {
	m, err := gpu.ValueInTime(gpu.DeviceOf(p.h.dev), func(drv cudadrv.Driver) (cudadrv.MemHandle, cudadrv.Result) {
		return drv.MemCreate(uintptr(p.size), p.prop)
	})
	return uint64(m), noMemory(err)
}

func (p *pages) Release(page uint64) error {
	return gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemRelease(cudadrv.MemHandle(page)) })
}

func (p *pages) Map(addr, page uint64) error {
	err := gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemMap(cudadrv.DevicePtr(addr), uintptr(p.size), 0, cudadrv.MemHandle(page))
	})
	if err == nil {
		p.known.mapped(addr, p.size, cudadrv.MemHandle(page))
	}
	return noMemory(err)
}

func (p *pages) Unmap(addr, bytes uint64) error {
	err := gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemUnmap(cudadrv.DevicePtr(addr), uintptr(bytes))
	})
	if err == nil {
		p.known.unmapped(addr, bytes)
	}
	return err
}

// Open gives the device, and the peers that can access its memory, access to the range.
func (p *pages) Open(addr, bytes uint64) error {
	devices := []cudadrv.Device{gpu.DeviceOf(p.h.dev).Handle()}
	for _, peer := range gpu.DeviceOf(p.h.dev).Guests() {
		devices = append(devices, peer.Handle())
	}
	return noMemory(p.access(addr, bytes, devices...))
}

// reopen gives a new peer access to all mapped pages.
func (p *pages) reopen(peer *gpu.Device) error {
	for _, at := range p.known.addresses() {
		if err := p.access(at, p.size, peer.Handle()); err != nil {
			return err
		}
	}
	return nil
}

func (p *pages) access(addr, bytes uint64, devices ...cudadrv.Device) error {
	return gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemSetAccess(cudadrv.DevicePtr(addr), uintptr(bytes), cudadrv.MemAccessReadWrite, devices...)
	})
}
