package memory

import (
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
)

// Pinned is page-locked host memory (cuMemHostAlloc), which devices reach
// without a copy by the CPU: copies to and from it are asynchronous and as fast
// as the bus.
type Pinned[T Element] struct {
	owner handle.Owner
	dev   *device.Device
	p     unsafe.Pointer
	n     int
}

// MakePinned allocates n elements of pinned memory, which all devices of dev's
// system can use. The contents are undefined. It takes much longer than
// ordinary memory: allocate once and reuse.
func MakePinned[T Element](dev *device.Device, n int) (*Pinned[T], error) {
	size := sizeOf[T]()
	if dev == nil {
		return nil, fmt.Errorf("memory: make pinned: no device given")
	}
	if n < 0 || n > math.MaxInt/size {
		return nil, fmt.Errorf("memory: make %d pinned elements of %s: the length is out of range", n, DTypeOf[T]())
	}
	h := &Pinned[T]{dev: dev, n: n}
	if n > 0 {
		err := dev.Do("cuMemHostAlloc", func(drv cudadrv.Driver) (r cudadrv.Result) {
			h.p, r = drv.MemHostAlloc(uintptr(n*size), cudadrv.MemHostAllocPortable)
			return r
		})
		if err != nil {
			return nil, fmt.Errorf("memory: make %d pinned bytes: %w", n*size, err)
		}
		pinned.add(h.p, n*size)
	}
	handle.Init(h, &h.owner, "pinned host memory")
	return h, nil
}

// Len returns the number of elements.
func (h *Pinned[T]) Len() int { return h.n }

// Data returns the memory as a Go slice, valid until Close. It is nil after
// Close; a slice obtained before must not be used then.
func (h *Pinned[T]) Data() []T {
	if h == nil || h.owner.Closed() || h.n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(h.p), h.n)
}

// Close frees the memory. Copies from or to it must have completed. It is
// idempotent.
func (h *Pinned[T]) Close() error {
	if h == nil || !h.owner.Close() || h.n == 0 {
		return nil
	}
	pinned.remove(h.p)
	return h.dev.Do("cuMemFreeHost", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFreeHost(h.p) })
}

func (h *Pinned[T]) check(op string) error {
	if h == nil {
		return fmt.Errorf("%s: no pinned memory given", op)
	}
	if h.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	return nil
}

// pinned knows the ranges of pinned memory, because CopyFrom must wait for a
// copy out of them.
var pinned ranges

type ranges struct {
	mu sync.RWMutex
	m  map[uintptr]int // start to bytes
}

func (r *ranges) add(p unsafe.Pointer, bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m == nil {
		r.m = map[uintptr]int{}
	}
	r.m[uintptr(p)] = bytes
}

func (r *ranges) remove(p unsafe.Pointer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.m, uintptr(p))
}

func isPinned(p unsafe.Pointer) bool {
	pinned.mu.RLock()
	defer pinned.mu.RUnlock()
	for start, bytes := range pinned.m {
		if uintptr(p) >= start && uintptr(p)-start < uintptr(bytes) {
			return true
		}
	}
	return false
}
