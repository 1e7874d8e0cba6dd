package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// A Buffer is one allocation of device memory, without a type.
type Buffer struct {
	owner  handle.Owner
	stream *stream.Stream
	ptr    cudadrv.DevicePtr
	bytes  uintptr
	block  *block // of a Pool, if it was allocated in a capture

	imported bool         // from another process
	foreign  func() error // gives memory back that is not of an allocator here; nil otherwise

	mu     sync.Mutex
	users  []*stream.Stream // the other streams that used it
	export *ipcExport       // once it has handles
}

// Alloc allocates bytes of device memory in the order of s: work that is
// enqueued on s from now on may use it, and the host does not wait
// (cuMemAllocAsync). The contents are undefined. Zero bytes are no allocation.
//
// While s is captured into a graph the memory comes from the Pool of the capture
// and stays with the graph: every launch uses the same.
func Alloc(s *stream.Stream, bytes int) (*Buffer, error) {
	if err := s.Check("memory: allocate", nil); err != nil {
		return nil, err
	}
	if bytes < 0 {
		return nil, fmt.Errorf("memory: allocate %d bytes on %s: the size is negative", bytes, s.Device())
	}
	b := &Buffer{stream: s, bytes: uintptr(bytes)}
	if bytes > 0 {
		if err := b.alloc(); err != nil {
			return nil, err
		}
	}
	s.Retain()
	handle.Init(b, &b.owner, "buffer")
	return b, nil
}

// alloc gets the memory, from the pool of the capture if there is one.
func (b *Buffer) alloc() error {
	pool, err := b.stream.CapturePool()
	if err != nil {
		return err
	}
	if p, ok := pool.(*Pool); ok {
		if b.block, err = p.alloc(b.stream, b.bytes); err != nil {
			return err
		}
		b.ptr = b.block.ptr
		return nil
	}
	if err := b.stream.RefuseCapture("memory: allocate", "the capture was begun by other means than Chorus: allocate before it"); err != nil {
		return err
	}
	if _, err := environment(); err != nil {
		return err
	}
	if err := keepFreed(b.Device()); err != nil {
		return err
	}
	err = b.Device().Do("cuMemAllocAsync", func(drv cudadrv.Driver) (r cudadrv.Result) {
		b.ptr, r = drv.MemAllocAsync(b.bytes, b.stream.Raw())
		return r
	})
	if errors.Is(err, device.ErrorOutOfMemory) {
		return outOfMemory(b.Device(), b.bytes, err)
	}
	if err != nil {
		return fmt.Errorf("memory: allocate %d bytes: %w", b.bytes, err)
	}
	return nil
}

func outOfMemory(d *device.Device, bytes uintptr, cause error) error {
	free, total, _ := d.MemoryInfo() // zeros are what is known if this fails too
	return &OutOfMemoryError{Device: d.String(), Requested: uint64(bytes), Free: free, Total: total, Err: cause}
}

type poolKey struct{}

// keepFreed tells the driver's pool once to keep freed memory instead of
// returning it to the system at every synchronisation.
func keepFreed(d *device.Device) error {
	once := d.Local(poolKey{}, func() any {
		return sync.OnceValue(func() error {
			// The pool exists only once the device has a context.
			if _, err := d.Context(); err != nil {
				return err
			}
			pool, r := d.Driver().DeviceGetDefaultMemPool(d.Handle())
			if err := d.Check("cuDeviceGetDefaultMemPool", r); err != nil {
				return err
			}
			return d.Check("cuMemPoolSetAttribute",
				d.Driver().MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, ^uint64(0)))
		})
	}).(func() error)
	return once()
}

// Bytes returns the size.
func (b *Buffer) Bytes() int { return int(b.bytes) }

// Device returns the device whose memory it is.
func (b *Buffer) Device() *device.Device { return b.stream.Device() }

// Stream returns the stream in whose order the buffer was allocated and will be
// freed.
func (b *Buffer) Stream() *stream.Stream { return b.stream }

// RecordStream tells that work on s uses the buffer, so that Close frees it
// only after the work that is on s by then
// (torch.Tensor.record_stream). It enqueues nothing.
func (b *Buffer) RecordStream(s *stream.Stream) error {
	if err := s.Check("memory: record stream", nil); err != nil {
		return err
	}
	if s == b.stream {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner.Closed() {
		return fmt.Errorf("memory: record stream: %w", device.ErrClosed)
	}
	if !slices.Contains(b.users, s) {
		s.Retain()
		b.users = append(b.users, s)
	}
	return nil
}

// Close frees the memory in the order of its stream: after everything that is
// enqueued there, and on the streams of RecordStream, by now. The host does not
// wait. Close is idempotent. While one of these streams is captured into a graph
// the buffer stays open: Close returns a *stream.CaptureError. That does not hold
// for memory of the capture itself, which later allocations of the same capture
// then use.
func (b *Buffer) Close() error {
	if b == nil || b.owner.Closed() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.block == nil {
		if err := b.refuseCapture(); err != nil {
			return err
		}
	}
	if b.foreign != nil {
		if err := b.awaitUsers(); err != nil {
			return err
		}
	}
	if !b.owner.Close() || b.export.keep() {
		return nil
	}
	return b.giveBack()
}

// giveBack gives up the memory and the streams. b.mu is held.
func (b *Buffer) giveBack() error {
	if b.foreign != nil {
		return errors.Join(b.foreign(), b.release())
	}
	return errors.Join(b.free(), b.release())
}

// free gives the memory back. b.mu is held.
func (b *Buffer) free() error {
	if b.block != nil {
		return b.block.segment.pool.free(b.block, len(b.users) > 0)
	}
	var errs []error
	for _, u := range b.users {
		errs = append(errs, b.stream.Follow(u))
	}
	if b.bytes > 0 {
		errs = append(errs, b.Device().Do("cuMemFreeAsync", func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemFreeAsync(b.ptr, b.stream.Raw())
		}))
	}
	return errors.Join(errs...)
}

// release gives the streams up. b.mu is held.
func (b *Buffer) release() error {
	errs := []error{b.stream.Release()}
	for _, u := range b.users {
		errs = append(errs, u.Release())
	}
	return errors.Join(errs...)
}

// refuseCapture returns an error while a stream that the buffer is freed after
// is captured. b.mu is held.
func (b *Buffer) refuseCapture() error {
	const op, advice = "memory: free", "the graph may use the memory: close the buffer when the graph is closed"
	if err := b.stream.RefuseCapture(op, advice); err != nil {
		return err
	}
	for _, u := range b.users {
		if err := u.RefuseCapture(op, advice); err != nil {
			return err
		}
	}
	return nil
}
