package memory

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

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

// take allocates a part of the slab, or returns nil if the rest is too small. The first
// call allocates the slab.
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
