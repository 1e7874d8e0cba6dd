package memory

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// An Allocator allocates and frees device memory. [Driver] calls the driver for each
// block, [OpenPlugin] loads an allocator from a shared library, and nccl.Allocator
// allocates memory with NCCL.
//
// Both methods may be called by several goroutines at the same time, and while
// streams are captured into graphs.
type Allocator interface {
	// Alloc allocates bytes of memory, at least one, on the device of s and returns its
	// address. Operations that are enqueued on s from now on may use it. An error that
	// matches device.ErrorOutOfMemory means that the device has no more memory.
	Alloc(s *stream.Stream, bytes int) (ptr uint64, err error)
	// Free takes memory back that Alloc has returned; bytes is the size given to Alloc.
	// Operations already enqueued on s may still use the memory; operations on other
	// streams have been ordered before them. A pool that outlives the stream of a
	// segment passes the default stream instead, after all work on the segment has
	// completed.
	Free(s *stream.Stream, ptr uint64, bytes int) error
}

// Driver is the Allocator of the driver itself (cuMemAlloc, cuMemFree). Its Free
// waits until all work of the device has completed.
var Driver Allocator = driverAllocator{}

type driverAllocator struct{}

func (driverAllocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := checkAlloc(s, bytes); err != nil {
		return 0, err
	}
	var ptr cudadrv.DevicePtr
	err := gpu.DeviceOf(s.Device()).DoRelaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
		ptr, r = drv.MemAlloc(uintptr(bytes))
		return r
	})
	if errors.Is(err, device.ErrorOutOfMemory) {
		return 0, outOfMemory(s.Device(), uintptr(bytes), err)
	}
	if err != nil {
		return 0, fmt.Errorf("memory: allocate %d bytes: %w", bytes, err)
	}
	return uint64(ptr), nil
}

func (driverAllocator) Free(s *stream.Stream, ptr uint64, bytes int) error {
	if err := checkFree(s); err != nil {
		return err
	}
	err := gpu.DeviceOf(s.Device()).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(cudadrv.DevicePtr(ptr)) })
	if err != nil {
		return fmt.Errorf("memory: free %d bytes at %#x: %w", bytes, ptr, err)
	}
	return nil
}

// checkAlloc validates the arguments of every Alloc.
func checkAlloc(s *stream.Stream, bytes int) error {
	if err := gpu.CheckStream("memory: allocate", s, nil); err != nil {
		return err
	}
	if bytes <= 0 {
		return fmt.Errorf("memory: allocate %d bytes on %s: want more than none", bytes, s.Device())
	}
	return nil
}

// checkFree accepts a closed stream, since memory may outlive its stream.
func checkFree(s *stream.Stream) error {
	if s == nil {
		return fmt.Errorf("memory: free: no stream given")
	}
	return nil
}

// asyncAllocator allocates each block from the driver's own memory pool, in stream
// order (cudaMallocAsync). The driver's pool caches freed memory.
type asyncAllocator struct{}

var asyncKey handle.Key

func (asyncAllocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := keepFreed(s.Device()); err != nil {
		return 0, err
	}
	var p cudadrv.DevicePtr
	err := gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		p, r = drv.MemAllocAsync(uintptr(bytes), gpu.StreamOf(s).Raw())
		return r
	})
	return uint64(p), err
}

func (asyncAllocator) Free(s *stream.Stream, ptr uint64, _ int) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemFreeAsync(cudadrv.DevicePtr(ptr), gpu.StreamOf(s).Raw())
	})
}

// keepFreed sets the release threshold of the driver's pool once, so that the pool
// keeps freed memory instead of returning it to the system at every synchronization.
func keepFreed(d *device.Device) error {
	once := gpu.DeviceOf(d).Local(&asyncKey, func() any {
		return sync.OnceValue(func() error {
			pool, err := gpu.DeviceOf(d).DefaultPool()
			if err != nil {
				return err
			}
			return gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result {
				return drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, ^uint64(0))
			})
		})
	}).(func() error)
	return once()
}

// trim waits for the device and then releases the memory that the driver's pool caches.
func (asyncAllocator) trim(d *device.Device) error {
	pool, err := gpu.DeviceOf(d).DefaultPool()
	if err != nil {
		return err
	}
	err = gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
	if err != nil {
		return err
	}
	return gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemPoolTrimTo(pool, 0) })
}

// reserved returns how much memory the driver's pool has reserved, now and at its peak.
func (asyncAllocator) reserved(d *device.Device) (now, peak int64, err error) {
	pool, err := gpu.DeviceOf(d).DefaultPool()
	if err != nil {
		return 0, 0, err
	}
	var values [2]int64
	for i, attr := range []int32{cudadrv.MemPoolAttrReservedCurrent, cudadrv.MemPoolAttrReservedHigh} {
		err := gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result {
			v, r := drv.MemPoolGetAttribute(pool, attr)
			values[i] = int64(v)
			return r
		})
		if err != nil {
			return 0, 0, err
		}
	}
	return values[0], values[1], nil
}

// resetPeak resets the peak of the driver's pool to its current size.
func (asyncAllocator) resetPeak(d *device.Device) error {
	pool, err := gpu.DeviceOf(d).DefaultPool()
	if err != nil {
		return err
	}
	return gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReservedHigh, 0)
	})
}

// async returns the driver's own allocator if it is in use.
func (h *heap) async() (a asyncAllocator, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cached != nil {
		a, ok = h.cached.a.(asyncAllocator)
	}
	return a, ok
}

// driverSource allocates segments from the driver.
type driverSource struct{ h *heap }

func (s driverSource) Alloc(_ alloc.Stream, bytes uint64) (uint64, error) {
	p, err := gpu.ValueInTime(gpu.DeviceOf(s.h.dev), func(drv cudadrv.Driver) (cudadrv.DevicePtr, cudadrv.Result) {
		return drv.MemAlloc(uintptr(bytes))
	})
	return uint64(p), noMemory(err)
}

func (s driverSource) Free(_ alloc.Stream, addr, _ uint64) error {
	return gpu.DeviceOf(s.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(cudadrv.DevicePtr(addr)) })
}

// Async is false: cuMemFree waits for the device.
func (driverSource) Async() bool { return false }

// noMemory marks an out-of-memory error so that the allocator recognizes it.
func noMemory(err error) error {
	if errors.Is(err, device.ErrorOutOfMemory) {
		return fmt.Errorf("%w: %w", alloc.ErrNoMemory, err)
	}
	return err
}

// allocatorSource allocates segments from a user's Allocator.
type allocatorSource struct{ a Allocator }

func (s allocatorSource) Alloc(l alloc.Stream, bytes uint64) (uint64, error) {
	p, err := s.a.Alloc(l.(*streamCache).s, int(bytes))
	return p, noMemory(err)
}

// Free passes the default stream if the segment's stream was destroyed, because all
// work of that stream has completed.
func (s allocatorSource) Free(on alloc.Stream, addr, bytes uint64) error {
	l := on.(*streamCache)
	if l.ended.Load() {
		return s.a.Free(stream.Default(l.heap.dev), addr, int(bytes))
	}
	return s.a.Free(l.s, addr, int(bytes))
}

// Async is true: Free of an Allocator need not wait.
func (allocatorSource) Async() bool { return true }

// OpenPlugin returns an Allocator of a shared library
// (torch.cuda.memory.CUDAPluggableAllocator). The library exports two C functions with
// the given names:
//
//	void *alloc(ssize_t size, int device, cudaStream_t stream);
//	void free(void *ptr, ssize_t size, int device, cudaStream_t stream);
//
// They are called on any thread, several at the same time, with the device's primary
// context bound. On virtual devices there is no context, and C code cannot use the stream.
// If alloc returns NULL, the error is an *OutOfMemoryError. The library stays loaded until
// the process ends. A name without a slash is searched as the system searches for
// libraries.
func OpenPlugin(path, allocName, freeName string) (Allocator, error) {
	const op = "memory: open plug-in"
	if path == "" {
		return nil, fmt.Errorf("%s: no library given", op)
	}
	lib, err := dl.Open(&dl.Spec{Name: filepath.Base(path), Sonames: []string{path}})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	p := &plugin{path: lib.Path()}
	for _, f := range []struct {
		name string
		fn   *uintptr
	}{{allocName, &p.alloc}, {freeName, &p.free}} {
		fn, ok := lib.Symbol(f.name)
		if !ok {
			return nil, fmt.Errorf("%s: %s has no function %q: is it declared extern \"C\"?", op, lib.Path(), f.name)
		}
		*f.fn = fn
	}
	return p, nil
}

type plugin struct {
	path        string
	alloc, free uintptr
}

func (p *plugin) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := checkAlloc(s, bytes); err != nil {
		return 0, err
	}
	var ptr uintptr
	err := p.call(s, func(d *device.Device) {
		f := dl.Get().In(uintptr(bytes), uintptr(d.Ordinal()), s.Handle())
		ptr = f.Call(p.alloc)
		f.Put()
	})
	if err != nil {
		return 0, fmt.Errorf("memory: allocate %d bytes: %w", bytes, err)
	}
	if ptr == 0 {
		return 0, outOfMemory(s.Device(), uintptr(bytes), fmt.Errorf("%s returned NULL: %w", p.path, device.Status(cudadrv.ErrorOutOfMemory)))
	}
	return uint64(ptr), nil
}

func (p *plugin) Free(s *stream.Stream, ptr uint64, bytes int) error {
	if err := checkFree(s); err != nil {
		return err
	}
	err := p.call(s, func(d *device.Device) {
		f := dl.Get().In(uintptr(ptr), uintptr(bytes), uintptr(d.Ordinal()), s.Handle())
		f.Call(p.free)
		f.Put()
	})
	if err != nil {
		return fmt.Errorf("memory: free %d bytes at %#x: %w", bytes, ptr, err)
	}
	return nil
}

// call calls C with the context of the stream's device bound, and with the thread in
// the relaxed capture mode.
func (p *plugin) call(s *stream.Stream, fn func(*device.Device)) error {
	d := s.Device()
	return gpu.DeviceOf(d).Bound(func() error {
		return gpu.DeviceOf(d).Relaxed(func() error {
			fn(d)
			return nil
		})
	})
}

// ChangeAllocator installs a as the allocator of all memory of the device that
// is neither in a Pool nor allocated by a capture. Each block is one call of a,
// and freed memory is not cached (torch.cuda.memory.change_current_allocator).
// Any goroutine may call ChangeAllocator, which fails after the first
// allocation on the device.
func ChangeAllocator(d *device.Device, a Allocator) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	if a == nil {
		return fmt.Errorf("memory: change the allocator of %s: no allocator given", d)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used {
		return fmt.Errorf("memory: change the allocator of %s: memory was allocated already: change it before the first allocation", d)
	}
	h.cached = h.uncached(a)
	h.engine.Store(h.cached)
	return nil
}

// EnableCaching switches the caching of freed memory off or on, for memory that is not
// in a Pool (torch.cuda.caching_allocator_enable). Without caching, each block is an
// allocation of the driver and freeing it waits for the device, which helps to find
// memory errors. Memory allocated before the call is freed as it was allocated.
func EnableCaching(d *device.Device, on bool) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if on {
		h.engine.Store(h.cached)
		return nil
	}
	if h.plain == nil {
		h.plain = h.uncached(Driver)
	}
	h.engine.Store(h.plain)
	return nil
}

// An uncached engine calls an Allocator for each block and does not cache freed memory.
type uncached struct {
	h *heap
	a Allocator

	mu    sync.Mutex
	loans map[uint64]*loan // by address
	asked int64            // bytes of allocations in progress
	stats Stats            // except the values that only the Allocator knows
}

// absurd is a size that no device has. Drivers report different errors for such sizes.
const absurd = 1 << 60

// A loan is an allocated block.
type loan struct {
	l     *streamCache
	bytes int
	users []*streamCache // other streams that use the block
}

// uncached returns an engine that passes every call to a and caches nothing.
// The heap is locked, or not shared yet.
func (h *heap) uncached(a Allocator) *uncached {
	e := &uncached{h: h, a: a, loans: map[uint64]*loan{}}
	h.engines = append(h.engines, e)
	return e
}

func (e *uncached) has(addr uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.find(addr) != nil
}

// find returns the loan that contains addr, or nil. e.mu is held.
func (e *uncached) find(addr uint64) *loan {
	if x := e.loans[addr]; x != nil {
		return x
	}
	for base, x := range e.loans {
		if addr-base < uint64(x.bytes) {
			return x
		}
	}
	return nil
}

func (e *uncached) alloc(l *streamCache, bytes int) (addr uint64, err error) {
	e.h.markUsed()
	if e.h.closed.Load() {
		return 0, e.explain(bytes, alloc.ErrClosed)
	}
	if !l.Retain() {
		return 0, e.explain(bytes, alloc.ErrEnded)
	}
	err = device.ErrorOutOfMemory
	if e.reserve(bytes) {
		addr, err = e.a.Alloc(l.s, bytes)
		err = e.addLoan(l, addr, bytes, err)
	}
	if err == nil {
		return addr, nil
	}
	_ = gpu.StreamOf(l.s).Release() // a stream that cannot be destroyed does no harm
	if errors.Is(err, device.ErrorOutOfMemory) {
		e.mu.Lock()
		e.stats.OOMs++
		e.mu.Unlock()
	}
	return 0, e.explain(bytes, err)
}

// reserve reports whether the process may allocate the bytes, and reserves them until
// enter is called.
func (e *uncached) reserve(bytes int) bool {
	if bytes >= absurd {
		return false
	}
	f := e.h.native.Fraction()
	e.mu.Lock()
	defer e.mu.Unlock()
	if has := e.stats.AllocatedBytes.All.Current + e.asked; f < 1 && has+int64(bytes) > int64(f*float64(e.h.total)) {
		return false
	}
	e.asked += int64(bytes)
	return true
}

// addLoan replaces a reservation by the block that the Allocator has returned, if it
// succeeded.
func (e *uncached) addLoan(l *streamCache, addr uint64, bytes int, err error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked -= int64(bytes)
	if err != nil {
		return err
	}
	if addr == 0 || e.loans[addr] != nil { // freeing it would free the memory of its other user
		return fmt.Errorf("the allocator gave the address %#x: want one that is not 0, of memory that it has not given out already", addr)
	}
	e.loans[addr] = &loan{l: l, bytes: bytes}
	e.count(1, int64(bytes))
	e.stats.DeviceAllocs++
	return nil
}

// explain is heap.explain with the engine's statistics, except that it returns
// an *OutOfMemoryError of the Allocator itself unchanged.
func (e *uncached) explain(bytes int, err error) error {
	if !errors.Is(err, device.ErrorOutOfMemory) {
		return e.h.explain(bytes, err)
	}
	if _, ok := errors.AsType[*OutOfMemoryError](err); ok {
		return err
	}
	x := outOfMemory(e.h.dev, uintptr(bytes), err).(*OutOfMemoryError)
	if bytes >= absurd {
		x.Wanted = 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	x.Allocated, x.Reserved, x.Fraction = uint64(e.stats.AllocatedBytes.All.Current), uint64(e.stats.AllocatedBytes.All.Current), e.h.native.Fraction()
	return x
}

// Free frees a block once pending work has finished on its stream and on the other
// streams that use it.
func (e *uncached) Free(addr uint64) error {
	e.mu.Lock()
	x := e.loans[addr]
	if x == nil {
		e.mu.Unlock()
		return &alloc.PointerError{Addr: addr}
	}
	if err := x.refuseCapture(); err != nil {
		e.mu.Unlock()
		return err
	}
	delete(e.loans, addr)
	e.count(-1, -int64(x.bytes))
	e.stats.DeviceFrees++
	e.mu.Unlock()
	var errs []error
	for _, u := range x.users {
		errs = append(errs, gpu.StreamOf(x.l.s).Follow(gpu.StreamOf(u.s)), gpu.StreamOf(u.s).Release())
	}
	return errors.Join(append(errs, e.a.Free(x.l.s, addr, x.bytes), gpu.StreamOf(x.l.s).Release())...)
}

// refuseCapture returns an error while a stream of the loan is captured: the free would
// become part of the graph.
func (x *loan) refuseCapture() error {
	const op, advice = "memory: free", "the graph may use the memory: free it when the graph is closed"
	for _, l := range append(x.users, x.l) {
		if err := gpu.StreamOf(l.s).RefuseCapture(op, advice); err != nil {
			return err
		}
	}
	return nil
}

// RecordStream records that another stream uses a block.
func (e *uncached) RecordStream(addr uint64, s alloc.Stream) error {
	l := s.(*streamCache)
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.find(addr)
	if x == nil {
		return &alloc.PointerError{Addr: addr}
	}
	if x.l != l && !slices.Contains(x.users, l) {
		if !l.Retain() {
			return alloc.ErrEnded
		}
		x.users = slices.DeleteFunc(x.users, func(u *streamCache) bool {
			done := u.Done()
			if done {
				u.Release()
			}
			return done
		})
		x.users = append(x.users, l)
	}
	return nil
}

// count adds blocks and their bytes, or subtracts them.
func (e *uncached) count(blocks, bytes int64) {
	for _, p := range []*PoolStats{&e.stats.Allocation, &e.stats.Active} {
		p.All.add(blocks)
	}
	for _, p := range []*PoolStats{&e.stats.AllocatedBytes, &e.stats.ActiveBytes, &e.stats.RequestedBytes, &e.stats.ReservedBytes} {
		p.All.add(bytes)
	}
}

// markUsed records that memory was allocated.
func (h *heap) markUsed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = true
}
