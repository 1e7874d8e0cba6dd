package memory

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// A host is the caching allocator for pinned memory of one System (torch's
// CachingHostAllocator). Sizes are rounded up to powers of two. Blocks are neither
// split nor merged, so each size has one list of free blocks.
type host struct {
	settings func() (alloc.Settings, error)
	marks    hostMarks
	pinned   ranges

	mu      sync.Mutex
	closed  bool
	free    map[uintptr][]*hostBlock // by size; the last one is reused first
	pending []*hostLease             // closed leases that wait for their marks
	polling bool                     // a goroutine polls pending
	doomed  []*hostBlock             // to return to the system when the devices are idle
	reaping bool                     // a goroutine returns them
	stats   hostCounts

	slab hostSlab
}

// A hostBlock is one piece of pinned memory.
type hostBlock struct {
	dev   *device.Device // the device whose context allocated it
	ptr   unsafe.Pointer
	bytes uintptr
	free  func() error // nil if it is part of the slab
}

var hostKey kept.Key

// hostOf returns the allocator for dev's System.
func hostOf(dev *device.Device) *host {
	return gpu.DeviceOf(dev).System().Local(&hostKey, func() any { return newHost(settings) }).(*host)
}

func newHost(settings func() (alloc.Settings, error)) *host {
	h := &host{settings: settings, free: map[uintptr][]*hostBlock{}}
	h.marks.watches = map[watchKey]*hostWatch{}
	return h
}

// take returns a block of at least bytes; bytes is not 0.
func (h *host) take(dev *device.Device, bytes uintptr) (*hostBlock, *hostLease, error) {
	opts, err := h.settings()
	if err != nil {
		return nil, nil, err
	}
	if err := dev.Err(); err != nil {
		return nil, nil, fmt.Errorf("memory: make pinned: the device was lost before: %w", err)
	}
	size := hostSize(&opts, bytes)
	b := h.hit(size)
	if b == nil && !opts.PinnedBackground && h.endPassed() {
		b = h.hit(size)
	}
	if b == nil {
		if b, err = h.make(dev, size, &opts); err != nil {
			return nil, nil, err
		}
	}
	l := &hostLease{}
	l.end = func() { h.over(l, b) }
	return b, l, nil
}

// hostSize is the size of the block for a request.
func hostSize(opts *alloc.Settings, bytes uintptr) uintptr {
	if uint64(bytes) > opts.PinnedMaxRound || bits.Len64(uint64(bytes-1)) >= 63 {
		return roundUp(bytes, hostPage)
	}
	return 1 << bits.Len64(uint64(bytes-1))
}

// hit returns a cached block, or nil.
func (h *host) hit(size uintptr) *hostBlock {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := h.free[size]
	if len(list) == 0 {
		return nil
	}
	b := list[len(list)-1]
	h.free[size] = list[:len(list)-1]
	h.stats.request(int64(size), +1)
	return b
}

// make allocates a block from the system, without holding the lock because that takes
// long.
func (h *host) make(dev *device.Device, size uintptr, opts *alloc.Settings) (*hostBlock, error) {
	b, err := h.timed(dev, size, opts)
	if errors.Is(err, device.ErrorOutOfMemory) {
		h.endPassed()
		if err := h.discardAll(append(h.unused(), h.takeDoomed()...)); err != nil {
			return nil, err
		}
		b, err = h.timed(dev, size, opts)
	}
	return b, err
}

// over frees the block of a lease, after its users have passed. The lease's lock is not
// held.
func (h *host) over(l *hostLease, b *hostBlock) {
	if len(l.users) == 0 {
		h.giveBack(b)
		return
	}
	l.end = func() { h.giveBack(b) }
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return // the memory was freed with the contexts
	}
	h.marks.after(l)
	h.pending = append(h.pending, l)
	if opts, err := h.settings(); err == nil && opts.PinnedBackground && !h.polling {
		h.polling = true
		go h.poll()
	}
}

// giveBack caches or frees a block that is not in use.
func (h *host) giveBack(b *hostBlock) {
	opts, err := h.settings()
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return
	}
	h.stats.request(int64(b.bytes), -1)
	keep := b.free == nil || err == nil && uint64(b.bytes) <= opts.PinnedMaxCached
	if keep {
		h.free[b.bytes] = append(h.free[b.bytes], b)
	}
	h.mu.Unlock()
	if !keep {
		_ = h.release([]*hostBlock{b}) // if the device is lost, that was already reported
	}
}

// unused removes the cached blocks, except for parts of the slab, and returns them.
func (h *host) unused() []*hostBlock {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []*hostBlock
	for size, blocks := range h.free {
		var stay []*hostBlock
		for _, b := range blocks {
			if b.free == nil {
				stay = append(stay, b)
			} else {
				list = append(list, b)
			}
		}
		h.free[size] = stay
	}
	return list
}

func (h *host) discardAll(list []*hostBlock) error {
	var errs []error
	for _, b := range list {
		errs = append(errs, h.discard(b))
	}
	return errors.Join(errs...)
}

// release returns blocks that are not in use to the system. The driver waits for all work of all
// devices when it frees pinned memory, and a program may still have to enqueue what that work
// waits for. So blocks are freed while the devices are idle, now or later by a goroutine.
func (h *host) release(list []*hostBlock) error {
	if len(list) == 0 {
		return nil
	}
	sys := gpu.DeviceOf(list[0].dev).System()
	for range quietTries { // streams end a little after their last operation
		if gpu.InCallback() {
			break // which must not call the driver
		}
		if sys.Quiet() {
			return h.discardAll(list)
		}
		time.Sleep(quietPause)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.doomed = append(h.doomed, list...)
	if !h.reaping && !h.closed {
		h.reaping = true
		go h.reap(sys)
	}
	return nil
}

const (
	quietTries  = 20
	quietPause  = 100 * time.Microsecond
	longestReap = 100 * time.Millisecond // between two tries of reap
)

// reap frees the doomed blocks when the devices are idle.
func (h *host) reap(sys *gpu.System) {
	for pause := time.Millisecond; ; pause = min(2*pause, longestReap) {
		time.Sleep(pause)
		if !sys.Quiet() {
			h.mu.Lock()
			done := h.closed
			h.mu.Unlock()
			if done {
				return
			}
			continue
		}
		_ = h.discardAll(h.takeDoomed()) // if the device is lost, that was already reported
		h.mu.Lock()
		if len(h.doomed) == 0 {
			h.reaping = false
			h.mu.Unlock()
			return
		}
		h.mu.Unlock()
	}
}

func (h *host) takeDoomed() []*hostBlock {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := h.doomed
	h.doomed = nil
	return list
}

// Close frees the cached blocks when the System is closed. The remaining blocks are
// freed with the contexts.
func (h *host) Close() error {
	h.endPassed()
	err := errors.Join(h.discardAll(append(h.unused(), h.takeDoomed()...)), h.marks.close())
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	if h.stats.ActiveRequests.Current > 0 {
		return err
	}
	return errors.Join(err, h.slab.close())
}

// EmptyHostCache returns the unused pinned memory of dev's System to the operating
// system (torch._C._host_emptyCache). It does not wait for streams: memory that they
// may still use stays. The driver waits for all devices when it frees pinned memory. If a stream
// of a device is busy, EmptyHostCache returns at once, and a goroutine frees the memory as soon as
// all streams are idle. Any goroutine may call it.
func EmptyHostCache(dev *device.Device) error {
	if dev == nil {
		return fmt.Errorf("memory: empty host cache: no device given")
	}
	h := hostOf(dev)
	h.endPassed()
	if err := h.release(h.unused()); err != nil {
		return fmt.Errorf("memory: empty host cache: %w", err)
	}
	return nil
}

func roundUp(n, to uintptr) uintptr { return (n + to - 1) / to * to }
