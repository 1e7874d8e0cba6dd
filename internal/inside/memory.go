// Package inside holds the parts of packages memory and kernel that other packages of Chorus need
// and users do not. Of memory these are checks of buffers, pools of captures, and peer access. Of
// kernel these are precompiled sources, modules that live as long as their device, arguments in the
// memory of other devices, and the strided accesses of stand-ins. Public types embed them.
package inside

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// A Use is memory of a device that a part of Chorus uses, or a library that it calls.
type Use struct {
	Owner  string
	Bytes  uint64
	Inside bool // the caching allocator has allocated it, and counts it too
}

// accounts are the functions that Account has added for a device.
type accounts struct {
	mu   sync.Mutex
	list []*func() (Use, bool)
}

var accountsKey handle.Key

func accountsOf(dev *device.Device) *accounts {
	return gpu.DeviceOf(dev).Local(&accountsKey, func() any { return &accounts{} }).(*accounts)
}

// Account lets Uses call fn until stop is called. An allocation that has failed may be the
// caller, so fn must not wait for the device or for locks that are held meanwhile, and must not
// allocate device memory. If fn cannot tell the use without waiting, it returns false.
func Account(dev *device.Device, fn func() (Use, bool)) (stop func()) {
	a, entry := accountsOf(dev), &fn
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, entry)
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.list = slices.DeleteFunc(a.list, func(e *func() (Use, bool)) bool { return e == entry })
	}
}

// Uses returns what the functions of Account tell of a device, in their order.
func Uses(dev *device.Device) (list []Use) {
	a := accountsOf(dev)
	a.mu.Lock()
	fns := slices.Clone(a.list)
	a.mu.Unlock()
	for _, fn := range fns {
		if u, ok := (*fn)(); ok && u.Bytes > 0 {
			list = append(list, u)
		}
	}
	return list
}

// A Buffer is one allocation of device memory.
type Buffer struct {
	Owner  handle.Owner
	Stream *stream.Stream // orders the allocation and the free
	holds  atomic.Pointer[holds]
}

// holds are the Holds of a buffer.
type holds struct {
	mu     sync.Mutex
	n      int
	refuse func() error // why the memory cannot be freed now; set when the owner closes the buffer before the last Hold ends
	free   func() error
}

// A Hold keeps the memory of a buffer allocated, also when its owner has closed the buffer.
type Hold struct {
	b    *Buffer
	once sync.Once
}

// Hold returns a Hold, or nil if the buffer is closed.
func (b *Buffer) Hold() *Hold {
	b.holds.CompareAndSwap(nil, new(holds))
	h := b.holds.Load()
	h.mu.Lock()
	defer h.mu.Unlock()
	if b.Owner.Closed() {
		return nil
	}
	h.n++
	return &Hold{b: b}
}

// Keep reports whether a buffer that was closed has Holds. If so, the end of the last one calls free.
func (b *Buffer) Keep(refuse, free func() error) bool {
	h := b.holds.Load()
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.n == 0 {
		return false
	}
	h.refuse, h.free = refuse, free
	return true
}

// Refused returns why the end of x could not free the memory now, as while a stream that uses it is captured.
func (x *Hold) Refused() error {
	h := x.b.holds.Load()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.n > 1 || h.refuse == nil {
		return nil
	}
	return h.refuse()
}

// End ends the Hold, and frees the memory if it is the last one and the owner has closed the buffer. It is idempotent.
func (x *Hold) End() (err error) {
	x.once.Do(func() {
		h := x.b.holds.Load()
		h.mu.Lock()
		h.n--
		free := h.free
		if h.n > 0 {
			free = nil
		}
		h.mu.Unlock()
		if free != nil {
			err = free()
		}
	})
	return err
}

// A BufferRef has a Buffer. The public type embeds it.
type BufferRef struct{ b Buffer }

func (r *BufferRef) buffer() *Buffer { return &r.b }

// HasBuffer is implemented by the public type that embeds a BufferRef.
type HasBuffer interface{ buffer() *Buffer }

// BufferOf returns the Buffer of a public one, which is not nil.
func BufferOf(x HasBuffer) *Buffer { return x.buffer() }

// A BufferPointer is a pointer to a public buffer, which may be nil.
type BufferPointer interface {
	comparable
	HasBuffer
}

// OpenOn reports whether the buffer is open and in the memory of dev.
func (b *Buffer) OpenOn(dev *device.Device) bool {
	return b.Stream.Device() == dev && !b.Owner.Closed()
}

// CheckBuffer returns an error if an operation on dev cannot use n elements of x: the buffer is
// closed, or dev is not nil and another device. A slice of 0 elements needs no buffer.
func CheckBuffer[P BufferPointer](op string, x P, n int, dev *device.Device) error {
	var none P
	if x == none {
		if n == 0 {
			return nil
		}
		return fmt.Errorf("%s: a slice without memory", op)
	}
	b := x.buffer()
	on := b.Stream.Device()
	if b.Owner.Closed() {
		return fmt.Errorf("%s: %d elements on %s: %w", op, n, on, device.ErrClosed)
	}
	if dev != nil && on != dev {
		return fmt.Errorf("%s: the buffer is of %s, the operation runs on %s", op, on, dev)
	}
	return nil
}

// An IPCOption is an option of IPC handles that users do not set.
type IPCOption struct{ peer bool }

// OpenOnPeer lets the handle be opened on a stream of any GPU that reaches the memory.
// Opening it makes no context on the GPU that has the memory, and the stream waits for
// nothing: the other process has waited for the work that wrote the memory.
func OpenOnPeer(x handle.Has[IPCOption]) { handle.Of(x).peer = true }

// OnPeer reports whether OpenOnPeer was called for the handle.
func OnPeer(x handle.Has[IPCOption]) bool { return handle.Of(x).peer }

// A CapturePool lets captures of graphs allocate from a memory pool, and NCCL register its
// memory.
type CapturePool interface {
	gpu.Holdable
	// Begin lets the capture of a graph allocate from the pool until End.
	Begin(graph string) error
	End()
	// Watch calls fn for each segment of the pool. It then calls fn for each segment that
	// the pool allocates, before its memory is used, and for each segment that the pool
	// frees, after the streams have passed it and before it is freed. stop calls fn for the
	// remaining segments as if they were freed and ends the calls; it is idempotent. If fn
	// returns an error for a new segment, the allocation fails with that error.
	//
	// fn may use the device but must not call memory: allocations that need the driver wait
	// for fn. A watched pool has no expandable segments, and a pool that has expandable
	// segments cannot be watched.
	Watch(fn func(d *device.Device, ptr, bytes uint64, taken bool) error) (stop func() error, err error)
}

// PoolOf returns the CapturePool of a public pool, or nil for the zero pool.
func PoolOf(x handle.Has[CapturePool]) CapturePool { return *handle.Of(x) }

// A PoolOption is an option of pools that users do not set.
type PoolOption struct{ private bool }

// MakePrivate lets the configuration make a pool without a handle that must be closed.
// Such a pool belongs to one graph or to a package of Chorus.
func MakePrivate(x handle.Has[PoolOption]) { handle.Of(x).private = true }

// IsPrivate reports whether MakePrivate was called.
func IsPrivate(x handle.Has[PoolOption]) bool { return handle.Of(x).private }

// A Way is how a copy goes from one device to another.
type Way int

// The ways.
const (
	Direct Way = iota // in one address space
	Driver            // by the driver, which copies over the host
	Staged            // over the host by Chorus: a direct copy gives wrong data
)

// WayBetween finds the way between two devices and opens it. The first call for two
// devices tests the way, unless a capture is going on, which forbids the test. Then
// WayBetween believes the driver.
func WayBetween(a, b *device.Device) (Way, error) {
	if a == b {
		return Direct, nil
	}
	open := gpu.DeviceOf(a).Local(&openKey, func() any { return new(sync.Map) }).(*sync.Map)
	if _, known := open.Load(b); known {
		return Direct, nil
	}
	by, final, err := findWay(a, b)
	if err == nil && by == Direct && final {
		open.Store(b, true)
	}
	return by, err
}

// openKey is the key of a device's set of peers. The direct way to each peer is open and
// tested.
var openKey handle.Key

// findWay also reports whether the way is final.
func findWay(a, b *device.Device) (by Way, final bool, err error) {
	can, err := a.CanAccessPeer(b)
	if err != nil || !can {
		return Driver, false, err
	}
	works, tested := gpu.DeviceOf(a).PeerTested(gpu.DeviceOf(b))
	if !tested && !gpu.AnyCapture() {
		works, err = a.PeerWorks(b)
		tested = true
	}
	if err != nil || tested && !works {
		return Staged, false, err
	}
	if err := gpu.DeviceOf(a).EnablePeer(gpu.DeviceOf(b)); err != nil {
		return Direct, false, err
	}
	return Direct, tested, gpu.DeviceOf(b).EnablePeer(gpu.DeviceOf(a))
}

// Reach lets kernels and copies on a device and on others use the memory of each other, and
// reports whether they can. The first call for two devices tests the way; see
// device.Device.PeerWorks.
func Reach(on *device.Device, others ...*device.Device) (bool, error) {
	for _, d := range others {
		if d == on {
			continue
		}
		if by, err := WayBetween(on, d); by != Direct || err != nil {
			return false, err
		}
	}
	return true, nil
}

// A SliceHeader has the layout of every memory.Slice. Package kernel writes it, to give the
// stand-in of a kernel the addresses and lengths of the launch's arguments: a slice without a
// buffer, whose offset is the address. No method of such a slice reaches memory.
type SliceHeader struct {
	Buffer unsafe.Pointer
	Offset uintptr
	Len    int
	Root   bool
}
