package memory

import (
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

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
