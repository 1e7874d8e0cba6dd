package memory

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// A host is the caching allocator for pinned memory of one System (torch's
// CachingHostAllocator). Sizes are rounded up to powers of two. Blocks are neither
// split nor merged, so each size has one list of free blocks.
type host struct {
	settings func() (alloc.Settings, error)
	audit    cudadrv.Auditor // may be nil
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

var hostKey handle.Key

// hostOf returns the allocator for dev's System.
func hostOf(dev *device.Device) *host {
	return gpu.DeviceOf(dev).System().Local(&hostKey, func() any {
		h := newHost(settings)
		h.audit, _ = gpu.DeviceOf(dev).Driver().(cudadrv.Auditor)
		return h
	}).(*host)
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
	if h.audit != nil {
		h.audit.HostAllocated(b.ptr, b.bytes)
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

// over frees the block of a lease once its users have passed. The lease's lock
// is not held.
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

// Close frees the cached blocks when the System is closed, and leaves the
// remaining blocks, which are freed with the contexts.
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

// EmptyHostCache returns the unused pinned memory of dev's System to the
// operating system (torch._C._host_emptyCache). It does not wait for streams:
// memory that they may still use stays, so call Device.Sync before if all of it
// should go. The driver waits for all devices when it frees pinned memory. If a
// stream of a device is busy, EmptyHostCache returns at once, and a goroutine
// frees the memory as soon as all streams are idle. Any goroutine may call
// EmptyHostCache.
func EmptyHostCache(dev *device.Device) error {
	if dev == nil {
		return fmt.Errorf("memory: empty host cache: no device given")
	}
	h := hostOf(dev)
	h.endPassed()
	for range quietTries { // an idle stream passes an event a little after it was recorded
		if gpu.InCallback() || !h.waits() {
			break
		}
		time.Sleep(quietPause)
		h.endPassed()
	}
	if err := h.release(append(h.unused(), h.takeDoomed()...)); err != nil {
		return fmt.Errorf("memory: empty host cache: %w", err)
	}
	return nil
}

// waits reports whether closed memory waits for streams.
func (h *host) waits() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.pending) > 0
}

func roundUp(n, to uintptr) uintptr { return (n + to - 1) / to * to }

// A hostLease is the use of one piece of pinned memory. It begins when the memory is
// allocated and ends when no device uses it any more. It is a gpu.Preparer for the
// graphs that captured a copy from or to the memory.
type hostLease struct {
	end func() // called once, at the end of the lease

	mu     sync.Mutex
	closed bool // by its owner; streams and graphs may still use the memory
	busy   int  // calls that are enqueueing an operation
	graphs []gpu.Holder
	users  []*stream.Stream // whose operations use it; each is retained

	marks []hostMark // the positions of the users; guarded by the allocator's lock
}

// manyUsers is the number of users that makes the list drop idle streams, so that
// long-lived memory does not keep every stream alive that ever used it.
const manyUsers = 8

// beginUse records that the caller is about to enqueue an operation on s that
// uses the memory, and fails if the owner has closed the memory. The caller
// calls done after it has enqueued the operation.
func (l *hostLease) beginUse(op string, s *stream.Stream) error {
	if err := l.addUser(s, false); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Prepare records that a launch of a graph on s will use the memory. The graph holds
// the memory, so the owner may have closed it.
func (l *hostLease) Prepare(s gpu.HasStream) error { return l.addUser(s.(*stream.Stream), true) }

// Launched ends the use that Prepare began.
func (l *hostLease) Launched(gpu.HasStream, error) { l.done() }

var _ gpu.Preparer = (*hostLease)(nil)

func (l *hostLease) addUser(s *stream.Stream, held bool) error {
	if !gpu.StreamOf(s).Retain() {
		return fmt.Errorf("%s: %w", s, device.ErrClosed)
	}
	noted, err := l.addRetained(s, held)
	if !noted {
		err = errors.Join(err, gpu.StreamOf(s).Release())
	}
	return err
}

// addRetained is addUser for a stream that is retained; it keeps that reference if it adds s as
// a user.
func (l *hostLease) addRetained(s *stream.Stream, held bool) (noted bool, err error) {
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return false, err
	}
	l.mu.Lock()
	if l.closed && !held {
		l.mu.Unlock()
		return false, fmt.Errorf("the pinned memory: %w", device.ErrClosed)
	}
	if capture == 0 {
		noted = l.note(s)
	}
	l.busy++
	l.mu.Unlock()
	if capture == 0 {
		return noted, nil
	}
	if err := gpu.StreamOf(s).Captured(l); err != nil {
		l.done()
		return false, err
	}
	return false, nil
}

// note adds s to the users unless it is one already. l.mu is held.
func (l *hostLease) note(s *stream.Stream) bool {
	if slices.Contains(l.users, s) {
		return false
	}
	if len(l.users) >= manyUsers && l.busy == 0 {
		l.forgetIdle()
	}
	l.users = append(l.users, s)
	return true
}

// forgetIdle drops the users whose operations have completed. l.mu is held.
func (l *hostLease) forgetIdle() {
	l.users = slices.DeleteFunc(l.users, func(s *stream.Stream) bool {
		if gpu.AnyCapture() || !idle(s) {
			return false
		}
		_ = gpu.StreamOf(s).Release() // a stream that cannot be destroyed does no harm
		return true
	})
}

// idle reports whether all work of a retained stream has completed.
func idle(s *stream.Stream) bool {
	done, _ := gpu.DeviceOf(s.Device()).ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(gpu.StreamOf(s).Raw()) })
	return done
}

// done ends a use that use began.
func (l *hostLease) done() {
	l.mu.Lock()
	l.busy--
	l.unlock()
}

// unlock unlocks l.mu, and ends the lease if nothing uses the memory any more.
func (l *hostLease) unlock() {
	over := l.closed && l.busy == 0 && len(l.graphs) == 0 && l.end != nil
	end := l.end
	if over {
		l.end = nil
	}
	l.mu.Unlock()
	if over {
		end()
	}
}

// close records that the owner has closed the memory.
func (l *hostLease) close() {
	l.mu.Lock()
	l.closed = true
	l.unlock()
}

// Hold keeps the memory alive for a graph.
func (l *hostLease) Hold(g gpu.Holder) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.graphs = append(l.graphs, g)
}

// LetGo undoes Hold, but launches in progress stay among the users.
func (l *hostLease) LetGo(g gpu.Holder) {
	l.mu.Lock()
	if i := slices.Index(l.graphs, g); i >= 0 {
		l.graphs = slices.Delete(l.graphs, i, i+1)
	}
	l.unlock()
}

// holders returns the names of the graphs that hold the memory. l.mu is held.
func (l *hostLease) holders() string {
	var names []string
	for _, g := range l.graphs {
		names = append(names, g.String())
	}
	return strings.Join(names, ", ")
}

// hostPage is the granularity of locked memory.
const hostPage = 4096

// acquire allocates a block from the slab if the options ask for one, else from the
// system.
func (h *host) acquire(dev *device.Device, size uintptr, opts *alloc.Settings) (*hostBlock, error) {
	if opts.PinnedReserve > 0 {
		b, err := h.slab.take(dev, size, opts)
		if b != nil || err != nil {
			return b, err
		}
	}
	return lockedMemory(dev, size, opts)
}

// lockedMemory allocates pinned memory that all devices can use.
func lockedMemory(dev *device.Device, size uintptr, opts *alloc.Settings) (*hostBlock, error) {
	if opts.PinnedRegister {
		return mapped(dev, size, opts.PinnedThreads)
	}
	b := &hostBlock{dev: dev, bytes: size}
	err := gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		b.ptr, r = drv.MemHostAlloc(size, cudadrv.MemHostAllocPortable)
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("memory: make %d pinned bytes: %w", size, err)
	}
	b.free = func() error {
		return gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFreeHost(b.ptr) })
	}
	return b, nil
}

// mapped maps memory, touches its pages in parallel, because that is where
// cuMemHostAlloc spends most of its time, and registers it.
func mapped(dev *device.Device, size uintptr, threads int) (*hostBlock, error) {
	pages := roundUp(size, hostPage)
	mem, err := syscall.Mmap(-1, 0, int(pages), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("memory: map %d bytes to pin them: %w", pages, err)
	}
	touch(mem, threads)
	p := unsafe.Pointer(unsafe.SliceData(mem))
	if err := register(dev, p, pages); err != nil {
		return nil, errors.Join(fmt.Errorf("memory: pin %d bytes: %w", pages, err), syscall.Munmap(mem))
	}
	return &hostBlock{dev: dev, ptr: p, bytes: size, free: func() error {
		if err := unregister(dev, p); err != nil {
			return err // the driver still has the addresses: keep them mapped
		}
		return syscall.Munmap(mem)
	}}, nil
}

// touch writes to each page.
func touch(mem []byte, threads int) {
	var wg sync.WaitGroup
	part := int(roundUp(uintptr(len(mem)+threads-1)/uintptr(threads), hostPage))
	for at := 0; at < len(mem); at += part {
		wg.Go(func() {
			for i := at; i < min(at+part, len(mem)); i += hostPage {
				mem[i] = 0
			}
		})
	}
	wg.Wait()
}

func register(dev *device.Device, p unsafe.Pointer, bytes uintptr) error {
	return gpu.DeviceOf(dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemHostRegister(p, bytes, cudadrv.MemHostRegisterPortable)
	})
}

func unregister(dev *device.Device, p unsafe.Pointer) error {
	return gpu.DeviceOf(dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemHostUnregister(p) })
}

// timed is acquire, with its duration added to the statistics.
func (h *host) timed(dev *device.Device, size uintptr, opts *alloc.Settings) (*hostBlock, error) {
	start := time.Now()
	b, err := h.acquire(dev, size, opts)
	if err != nil {
		return nil, err
	}
	h.pinned.add(b.ptr, b.bytes)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stats.own(int64(size), +1, time.Since(start))
	h.stats.request(int64(size), +1)
	return b, nil
}

// discard returns a block to the system.
func (h *host) discard(b *hostBlock) error {
	h.pinned.remove(b.ptr)
	start := time.Now()
	err := b.free()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stats.own(int64(b.bytes), -1, time.Since(start))
	return err
}

// A hostSlab is memory that is pinned once and allocated from front to back. Freed
// parts stay in the free lists of the allocator.
type hostSlab struct {
	mu    sync.Mutex
	block *hostBlock
	used  uintptr
}

// take allocates a part of the slab, which the first call allocates, or returns
// nil if the rest is too small.
func (s *hostSlab) take(dev *device.Device, size uintptr, opts *alloc.Settings) (*hostBlock, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.block == nil {
		b, err := lockedMemory(dev, uintptr(opts.PinnedReserve), opts)
		if err != nil {
			return nil, fmt.Errorf("memory: pinned_reserve_segment_size_mb:%d: %w", opts.PinnedReserve>>20, err)
		}
		s.block = b
	}
	if size > s.block.bytes-s.used {
		return nil, nil
	}
	b := &hostBlock{dev: s.block.dev, ptr: unsafe.Add(s.block.ptr, s.used), bytes: size}
	s.used = min(s.used+roundUp(size, hostPage), s.block.bytes)
	return b, nil
}

// close frees the slab with all its parts.
func (s *hostSlab) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.block == nil {
		return nil
	}
	return s.block.free()
}
