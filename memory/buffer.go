package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/stream"
)

// A Buffer is one allocation of device memory, without a type.
type Buffer struct {
	//lint:ignore U1000 internal/mem finds the field by the method that it promotes
	bufferRef
	ptr   cudadrv.DevicePtr
	bytes uintptr
	by    freer // the allocator of the memory; nil if the buffer is empty
	heap  *heap

	captured bool // allocated by a capture: the graph owns the memory

	imported bool         // from another process
	foreign  func() error // frees memory that no allocator of this process owns; nil otherwise

	mu     sync.Mutex
	users  []*stream.Stream // the other streams that use the memory
	export *ipcExport       // set once the buffer has IPC handles
}

//lint:ignore U1000 the field above is of this type
type bufferRef = mem.BufferRef

// newBuffer returns a buffer that is freed in the order of s. Its owner is not armed yet.
func newBuffer(s *stream.Stream, bytes int) *Buffer {
	b := &Buffer{bytes: uintptr(bytes)}
	b.in().Stream = s
	return b
}

func (b *Buffer) in() *mem.Buffer { return mem.BufferOf(b) }

// Alloc allocates bytes of device memory in the order of s: operations that are
// enqueued on s from now on may use it. If memory of that size was freed on s before,
// Alloc reuses it at once, without calling the driver and without waiting
// (torch.empty). The contents are undefined. A size of zero allocates nothing.
//
// While s is captured into a graph the memory comes from the Pool of the capture
// and stays with the graph: every launch uses the same.
//
// If the device is out of memory, Alloc first returns all cached memory to the driver
// and tries again. If that fails too, the error is an *OutOfMemoryError.
func Alloc(s *stream.Stream, bytes int) (*Buffer, error) {
	l, err := laneOf("memory: allocate", s)
	if err != nil {
		return nil, err
	}
	if !gpu.StreamOf(s).Retain() {
		return nil, gpu.CheckStream("memory: allocate", s, nil)
	}
	b := newBuffer(s, bytes)
	b.heap = l.heap
	g, err := l.alloc(bytes)
	if err != nil {
		return nil, errors.Join(err, gpu.StreamOf(s).Release())
	}
	b.ptr, b.by, b.captured = cudadrv.DevicePtr(g.addr), g.by, g.captured
	handle.Init(b, &b.in().Owner, handle.About{Kind: "buffer", On: s.Device(), Bytes: bytes, Frequent: true})
	return b, nil
}

// Bytes returns the size.
func (b *Buffer) Bytes() int { return int(b.bytes) }

// Device returns the device whose memory it is.
func (b *Buffer) Device() *device.Device { return b.in().Stream.Device() }

// RecordStream records that operations on s use the buffer. Close then frees the memory
// only after the operations that are enqueued on s at the time of Close
// (torch.Tensor.record_stream). RecordStream enqueues nothing.
func (b *Buffer) RecordStream(s *stream.Stream) error {
	if s == nil || !gpu.StreamOf(s).Open() {
		return gpu.CheckStream("memory: record stream", s, nil)
	}
	if s == b.in().Stream {
		return nil
	}
	l, err := laneOf("memory: record stream", s)
	if err != nil {
		return err
	}
	if !gpu.StreamOf(s).Retain() {
		return gpu.CheckStream("memory: record stream", s, nil)
	}
	used, err := b.addUser(s, l)
	if !used {
		err = errors.Join(err, gpu.StreamOf(s).Release())
	}
	return err
}

// addUser takes over one reference to the stream, unless the buffer already has one.
func (b *Buffer) addUser(s *stream.Stream, l *lane) (added bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.in().Owner.Closed() {
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

// Close frees the memory in the order of its stream: after the operations that are
// already enqueued on that stream and on the streams of RecordStream. The host does not
// wait. Close is idempotent. While one of these streams is captured into a graph, Close
// returns a *device.CaptureError and the buffer stays open. Two buffers can be closed
// during a capture: memory that the capture itself allocated, which later allocations
// of the same capture then reuse, and an empty buffer.
func (b *Buffer) Close() error {
	if b == nil || b.in().Owner.Closed() {
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
	if !b.in().Owner.Close() || b.export.keep() {
		return nil
	}
	return b.giveBack()
}

// giveBack frees the memory and releases the streams. b.mu is held.
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
	if err := b.letGo(b.in().Stream); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// letGo releases a stream.
func (b *Buffer) letGo(s *stream.Stream) error {
	if b.heap != nil && gpu.InCallback() {
		b.heap.retire(s) // the release may destroy the stream, which calls the driver
		return nil
	}
	return gpu.StreamOf(s).Release()
}

// refuseCapture returns an error while a stream that must pass before the memory is
// freed is being captured. b.mu is held.
func (b *Buffer) refuseCapture() error {
	const op, advice = "memory: free", "the graph may use the memory: close the buffer when the graph is closed"
	if err := gpu.StreamOf(b.in().Stream).RefuseCapture(op, advice); err != nil {
		return err
	}
	for _, u := range b.users {
		if err := gpu.StreamOf(u).RefuseCapture(op, advice); err != nil {
			return err
		}
	}
	return nil
}
