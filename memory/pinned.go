package memory

import (
	"cmp"
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

// MakePinned allocates n elements of pinned memory, which all devices of dev's
// System can use (torch.Tensor.pin_memory), with undefined contents. It reuses
// closed memory, because the driver takes long to allocate (cuMemHostAlloc). If
// the system has no more memory, MakePinned returns unused pinned memory to it
// first, which waits for all devices. The options pinned_* of CHORUS_ALLOC_CONF
// control how it is allocated. Any goroutine may call MakePinned, also while
// streams are captured.
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

// Slice returns the elements i to j-1. The result shares h's memory, which only
// h can close. Like a Go slice expression it panics if the bounds are out of
// range.
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

// Data returns the memory as a Go slice, which is valid until Close, and nil
// after Close.
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

// Close releases the memory and returns at once. Operations that are already
// enqueued, and graphs that captured a copy from or to the memory, may still
// use it; the memory is reused only after them. Memory of PinSlice is unlocked
// as described there. Close is idempotent. Closing a part returns an error that
// matches ErrView.
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
		return fmt.Errorf("%s: the pinned memory of %d elements: %w", op, h.n, device.ErrClosed)
	}
	return nil
}

// ranges are the address ranges of a System's pinned memory. CopyFrom needs them
// because it must wait for a copy from pinned memory. Lookups take no lock; changes are
// rare.
type ranges struct {
	mu   sync.Mutex               // held by writers
	list atomic.Pointer[[]extent] // sorted; never modified in place
}

type extent struct{ start, bytes uintptr }

func (r *ranges) load() []extent {
	if l := r.list.Load(); l != nil {
		return *l
	}
	return nil
}

// add adds a range, or returns false if the range overlaps another one.
func (r *ranges) add(p unsafe.Pointer, bytes uintptr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.load()
	i := after(list, uintptr(p))
	if i > 0 && list[i-1].has(uintptr(p)) || i < len(list) && list[i].start-uintptr(p) < bytes {
		return false
	}
	list = slices.Insert(slices.Clone(list), i, extent{uintptr(p), bytes})
	r.list.Store(&list)
	return true
}

func (r *ranges) remove(p unsafe.Pointer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := slices.Clone(r.load())
	if i := after(list, uintptr(p)) - 1; i >= 0 && list[i].start == uintptr(p) {
		list = slices.Delete(list, i, i+1)
	}
	r.list.Store(&list)
}

func (e extent) has(p uintptr) bool { return p-e.start < e.bytes }

// after returns the index of the first range that begins after p.
func after(list []extent, p uintptr) int {
	i, found := slices.BinarySearchFunc(list, p, func(e extent, p uintptr) int { return cmp.Compare(e.start, p) })
	if found {
		i++
	}
	return i
}

// covers reports whether one range has all of the bytes at p and, if not, whether ranges have a part.
func (r *ranges) covers(p unsafe.Pointer, bytes uintptr) (whole, partly bool) {
	list, at := r.load(), uintptr(p)
	i := after(list, at)
	if i > 0 && list[i-1].has(at) {
		whole = bytes <= list[i-1].bytes-(at-list[i-1].start)
		return whole, !whole
	}
	return false, i < len(list) && list[i].start-at < bytes
}

// A registration is memory of the caller that the driver has page-locked.
type registration struct {
	host   *host
	dev    *device.Device
	p      unsafe.Pointer
	bytes  uintptr
	pinner runtime.Pinner
}

// PinSlice page-locks existing memory, of Go, of a mapped file or of C, so that all
// devices of dev's System can use it like memory of MakePinned (cuMemHostRegister,
// torch's _pin_memory_utils.pin_memory). The contents stay. PinSlice takes about as
// long as touching each page. It returns an error if the memory is already locked, in
// whole or in part, or if the slice is empty.
//
// Until Close the caller must not free the memory; the garbage collector keeps it.
// Close waits until all streams of all devices have done the work that is enqueued by now, because
// the driver does when it unlocks memory, and then unlocks it (_pin_memory_utils.unpin_memory). If
// that takes more than a minute, as when a collective waits for a rank that is not enqueued yet,
// Close returns an error and the memory stays locked. While a stream that used it is captured, or a graph
// holds it, Close returns an error and the memory stays locked.
func PinSlice[T Element](dev *device.Device, s []T) (*Pinned[T], error) {
	if dev == nil {
		return nil, fmt.Errorf("memory: pin slice: no device given")
	}
	if len(s) == 0 {
		return nil, fmt.Errorf("memory: pin slice: it is empty")
	}
	r := &registration{host: hostOf(dev), dev: dev, p: unsafe.Pointer(unsafe.SliceData(s)), bytes: uintptr(len(s) * sizeOf[T]())}
	if err := r.lock(); err != nil {
		return nil, fmt.Errorf("memory: pin slice of %d bytes at %#x: %w", r.bytes, uintptr(r.p), err)
	}
	h := &Pinned[T]{lease: &hostLease{}, p: r.p, n: len(s), pin: r}
	handle.Init(h, &h.owner, handle.About{Kind: "pinned slice", On: dev, Bytes: int(r.bytes)})
	return h, nil
}

func (r *registration) lock() error {
	if !r.host.pinned.add(r.p, r.bytes) {
		return fmt.Errorf("it is pinned already, in whole or in part: close that first: %w", device.Status(cudadrv.ErrorHostMemoryAlreadyRegistered))
	}
	r.pinner.Pin(r.p)
	err := register(r.dev, r.p, r.bytes)
	if err != nil {
		r.pinner.Unpin()
		r.host.pinned.remove(r.p)
	}
	return err
}

// close unlocks the memory after its last use.
func (r *registration) close(o *handle.Owner, l *hostLease) error {
	const op = "memory: unpin slice"
	users, left, err := l.endLease(op)
	if !left {
		return err
	}
	err = r.unlock(op, users)
	if err != nil && r.dev.Err() == nil {
		l.reopen() // operations that use it may still run
		return fmt.Errorf("%s of %d bytes at %#x: %w", op, r.bytes, uintptr(r.p), err)
	}
	o.Close()
	r.host.pinned.remove(r.p)
	r.pinner.Unpin()
	for _, s := range users {
		err = errors.Join(err, gpu.StreamOf(s).Release())
	}
	return err
}

func (r *registration) unlock(op string, users []*stream.Stream) error {
	for _, s := range users {
		if err := gpu.DeviceOf(s.Device()).Blocking(op); err != nil {
			return err
		}
		if err := syncBeside(s); err != nil {
			return err
		}
	}
	// The driver waits for all devices, too, but would keep other calls from the devices meanwhile.
	if err := gpu.DeviceOf(r.dev).System().Settle(unpinLimit); err != nil {
		return err
	}
	return unregister(r.dev, r.p)
}

// unpinLimit is the longest time that Close of memory of PinSlice waits for the devices. Tests change it.
var unpinLimit = time.Minute

// endLease ends the lease and returns its users. left is false if another call has ended
// the lease before, or if err says why it must continue.
func (l *hostLease) endLease(op string) (users []*stream.Stream, left bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, false, nil
	case l.busy > 0:
		return nil, false, fmt.Errorf("%s: a copy is being enqueued: close it after that", op)
	case len(l.graphs) > 0:
		return nil, false, fmt.Errorf("%s: %s uses it: close that first", op, l.holders())
	}
	for _, s := range l.users {
		if err := gpu.StreamOf(s).RefuseCapture(op, "close it after the capture"); err != nil {
			return nil, false, err
		}
	}
	l.closed = true
	return l.users, true, nil
}

func (l *hostLease) reopen() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = false
}
