package memory

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// Pinned is page-locked host memory. Copies to and from it are asynchronous and run at
// the speed of the bus, because the CPU does not copy.
type Pinned[T Element] struct {
	owner handle.Owner
	lease *hostLease // nil if there are no elements
	p     unsafe.Pointer
	n     int
	pin   *registration // of PinSlice
	whole *Pinned[T]    // the memory that this is a part of, or nil
}

// MakePinned allocates n elements of pinned memory, which all devices of dev's System
// can use (torch.Tensor.pin_memory). The contents are undefined. Closed memory is
// reused; new memory takes the driver long (cuMemHostAlloc). If the system has no more memory,
// MakePinned returns unused pinned memory to it first, which waits for all devices. The options pinned_* of
// CHORUS_ALLOC_CONF control how it is allocated. Any goroutine may call MakePinned,
// also while streams are captured.
func MakePinned[T Element](dev *device.Device, n int) (*Pinned[T], error) {
	size := sizeOf[T]()
	if dev == nil {
		return nil, fmt.Errorf("memory: make pinned: no device given")
	}
	if n < 0 || n > math.MaxInt/size {
		return nil, fmt.Errorf("memory: make %d pinned elements of %s: the length is out of range", n, DTypeOf[T]())
	}
	h := &Pinned[T]{n: n}
	if n > 0 {
		b, l, err := hostOf(dev).take(dev, uintptr(n*size))
		if err != nil {
			return nil, err
		}
		h.p, h.lease = b.ptr, l
	}
	handle.Init(h, &h.owner, handle.About{Kind: "pinned host memory", On: dev, Bytes: n * size, Frequent: true})
	return h, nil
}

// Len returns the number of elements.
func (h *Pinned[T]) Len() int { return h.n }

// Slice returns the elements i to j-1. The result shares h's memory and only h can
// close it. Like a Go slice expression it panics if the bounds are out of range.
func (h *Pinned[T]) Slice(i, j int) *Pinned[T] {
	if i < 0 || j < i || j > h.n {
		panic(fmt.Sprintf("memory: slice bounds [%d:%d] out of range of %d pinned elements", i, j, h.n))
	}
	return &Pinned[T]{lease: h.lease, p: unsafe.Add(h.p, i*sizeOf[T]()), n: j - i, whole: h.root()}
}

// root returns the memory that h is a part of, or h.
func (h *Pinned[T]) root() *Pinned[T] {
	if h.whole != nil {
		return h.whole
	}
	return h
}

// Data returns the memory as a Go slice, which is valid until Close. After Close it
// returns nil.
func (h *Pinned[T]) Data() []T {
	if h == nil || h.root().owner.Closed() || h.n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(h.p), h.n)
}

// RecordStream records that operations on s use the memory other than by Chorus's
// copies, for example a kernel that was given its address (record_event of torch's
// CachingHostAllocator). While s is captured, the graph holds the memory.
func (h *Pinned[T]) RecordStream(s *stream.Stream) error {
	const op = "memory: record stream"
	if err := h.check(op); err != nil {
		return err
	}
	if err := gpu.CheckStream(op, s, nil); err != nil || h.n == 0 {
		return err
	}
	if err := h.lease.beginUse(op, s); err != nil {
		return err
	}
	h.lease.done()
	return nil
}

// Close releases the memory and returns at once. Operations that are already enqueued,
// and graphs that captured a copy from or to the memory, may still use it; the memory
// is reused only after them. For memory of PinSlice, see there. Close is idempotent.
// Closing a part returns an error that matches ErrView.
func (h *Pinned[T]) Close() error {
	if h != nil && h.whole != nil {
		return fmt.Errorf("memory: close a part of pinned memory: %w", ErrView)
	}
	if h == nil || h.owner.Closed() {
		return nil
	}
	if h.pin != nil {
		return h.pin.close(&h.owner, h.lease)
	}
	if h.owner.Close() && h.n > 0 {
		h.lease.close()
	}
	return nil
}

func (h *Pinned[T]) check(op string) error {
	if h == nil {
		return fmt.Errorf("%s: no pinned memory given", op)
	}
	if h.root().owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	return nil
}
