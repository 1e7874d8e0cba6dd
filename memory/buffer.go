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
	by     freer // whose memory it is; nil if there is none
	heap   *heap

	captured bool // of a graph

	imported bool         // from another process
	foreign  func() error // gives memory back that is not of an allocator here; nil otherwise

	mu     sync.Mutex
	users  []*stream.Stream // the other streams that use it
	export *ipcExport       // once it has handles
}

// Alloc allocates bytes of device memory in the order of s: work that is
// enqueued on s from now on may use it. Where memory of that size was freed on s
// before, it is used again at once, and neither the driver is asked nor anything
// waited for (torch.empty). The contents are undefined. Zero bytes are no
// allocation.
//
// While s is captured into a graph the memory comes from the Pool of the capture
// and stays with the graph: every launch uses the same.
//
// When there is no memory left, all that is cached is given back to the driver
// before the error, an *OutOfMemoryError.
func Alloc(s *stream.Stream, bytes int) (*Buffer, error) {
	l, err := laneOf("memory: allocate", s)
	if err != nil {
		return nil, err
	}
	if !s.Retain() {
		return nil, s.Check("memory: allocate", nil)
	}
	b := &Buffer{stream: s, bytes: uintptr(bytes), heap: l.heap}
	g, err := l.alloc(bytes)
	if err != nil {
		return nil, errors.Join(err, s.Release())
	}
	b.ptr, b.by, b.captured = cudadrv.DevicePtr(g.addr), g.by, g.captured
	handle.Init(b, &b.owner, handle.About{Kind: "buffer", On: s.Device(), Bytes: bytes, Frequent: true})
	return b, nil
}

// Bytes returns the size.
func (b *Buffer) Bytes() int { return int(b.bytes) }

// Device returns the device whose memory it is.
func (b *Buffer) Device() *device.Device { return b.stream.Device() }

// OpenOn reports whether it is open and memory of a device. For Chorus's own packages.
func (b *Buffer) OpenOn(d *device.Device) bool { return b.stream.Device() == d && !b.owner.Closed() }

// Stream returns the stream in whose order the buffer was allocated and will be
// freed.
func (b *Buffer) Stream() *stream.Stream { return b.stream }

// RecordStream tells that work on s uses the buffer, so that Close frees it
// only after the work that is on s by then
// (torch.Tensor.record_stream). It enqueues nothing.
func (b *Buffer) RecordStream(s *stream.Stream) error {
	if !s.Open() {
		return s.Check("memory: record stream", nil)
	}
	if s == b.stream {
		return nil
	}
	l, err := laneOf("memory: record stream", s)
	if err != nil {
		return err
	}
	if !s.Retain() {
		return s.Check("memory: record stream", nil)
	}
	used, err := b.addUser(s, l)
	if !used {
		err = errors.Join(err, s.Release())
	}
	return err
}

// addUser takes over one reference to the stream, unless the buffer has it already.
func (b *Buffer) addUser(s *stream.Stream, l *lane) (added bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner.Closed() {
		return false, fmt.Errorf("memory: record stream: %w", device.ErrClosed)
	}
	if slices.Contains(b.users, s) {
		return false, nil
	}
	if b.by != nil {
		if err := b.by.RecordStream(uint64(b.ptr), l); err != nil {
			return false, b.heap.pointer("record stream", uint64(b.ptr), err)
		}
	}
	b.users = append(b.users, s)
	return true, nil
}

// Close frees the memory in the order of its stream: after everything that is
// enqueued there, and on the streams of RecordStream, by now. The host does not
// wait. Close is idempotent. While one of these streams is captured into a graph
// the buffer stays open: Close returns a *stream.CaptureError. That does not hold
// for memory of the capture itself, which later allocations of the same capture
// then use, nor for a buffer of no bytes.
func (b *Buffer) Close() error {
	if b == nil || b.owner.Closed() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.captured && b.bytes > 0 {
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
	var errs []error
	switch {
	case b.foreign != nil:
		errs = append(errs, b.foreign())
	case b.by != nil:
		if err := b.by.Free(uint64(b.ptr)); err != nil {
			errs = append(errs, b.heap.pointer("free", uint64(b.ptr), err))
		}
		b.heap.tidy()
	}
	for _, s := range b.users {
		if err := b.letGo(s); err != nil {
			errs = append(errs, err)
		}
	}
	if err := b.letGo(b.stream); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// letGo gives up a stream.
func (b *Buffer) letGo(s *stream.Stream) error {
	if b.heap != nil && stream.InCallback() {
		b.heap.retire(s) // it may be closed, and then the driver is asked
		return nil
	}
	return s.Release()
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
