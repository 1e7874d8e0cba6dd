package memory

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/stream"
)

// notPinned is the advice for a copy of ordinary host memory in a capture.
const notPinned = "the host would wait or its memory be gone in a later launch: copy from and to pinned memory, or before the capture"

// CopyFrom enqueues a copy of src to x on s and returns when src may be reused;
// the copy may still be in progress (cuMemcpyHtoDAsync). src is ordinary memory
// of length x.Len(); with CopyFromPinned the host does not wait at all. If only
// a part of src is pinned, the error matches device.ErrorInvalidValue, as it
// does for CopyTo.
func (x Slice[T]) CopyFrom(s *stream.Stream, src []T) error {
	const op = "memory: copy from host"
	if err := x.checkHost(op, s, len(src)); err != nil || x.n == 0 {
		return err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, notPinned); err != nil {
		return err
	}
	// CUDA stages ordinary memory before it returns, but not pinned memory.
	pinned, err := pinnedMemory(op, s, unsafe.Pointer(unsafe.SliceData(src)), x.Bytes())
	if err != nil {
		return err
	}
	if pinned {
		if err := gpu.StreamOf(s).RefuseWait(op); err != nil {
			return err
		}
	}
	if err := gpu.DeviceOf(s.Device()).Blocking(op); err != nil {
		return err
	}
	if err := x.upload(s, unsafe.Pointer(unsafe.SliceData(src))); err != nil || !pinned {
		return err
	}
	return syncBeside(s)
}

// CopyTo enqueues a copy of x to dst on s and returns when dst is filled. It
// waits for all operations that are enqueued on s before it; to bound that
// wait, call Sync(ctx) on s first. dst must have length x.Len().
func (x Slice[T]) CopyTo(s *stream.Stream, dst []T) error {
	const op = "memory: copy to host"
	if err := x.checkHost(op, s, len(dst)); err != nil || x.n == 0 {
		return err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, notPinned); err != nil {
		return err
	}
	if err := gpu.StreamOf(s).RefuseWait(op); err != nil {
		return err
	}
	if err := gpu.DeviceOf(s.Device()).Blocking(op); err != nil {
		return err
	}
	if _, err := pinnedMemory(op, s, unsafe.Pointer(unsafe.SliceData(dst)), x.Bytes()); err != nil {
		return err
	}
	if err := x.download(s, unsafe.Pointer(unsafe.SliceData(dst))); err != nil {
		return err
	}
	return syncBeside(s)
}

// pinnedMemory reports whether host memory of a copy is pinned. CUDA refuses memory of which only a part
// is pinned.
func pinnedMemory(op string, s *stream.Stream, p unsafe.Pointer, bytes int) (bool, error) {
	whole, partly := hostOf(s.Device()).pinned.covers(p, uintptr(bytes))
	if partly {
		return false, fmt.Errorf("%s: only a part of the %d bytes at %p is pinned: pin all of them together, or copy the parts one by one: %w", op, bytes, p, device.ErrorInvalidValue)
	}
	return whole, nil
}

// syncBeside waits for a stream that is not captured, after the caller has
// called Blocking.
func syncBeside(s *stream.Stream) error {
	return gpu.DeviceOf(s.Device()).DoBeside(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(gpu.StreamOf(s).Raw()) })
}

// CopyFromPinned enqueues the copy of src to x on s without making the host
// wait. src must not change until s has passed the copy, but may be closed.
func (x Slice[T]) CopyFromPinned(s *stream.Stream, src *Pinned[T]) error {
	const op = "memory: copy from pinned memory"
	if err := src.check(op); err != nil {
		return err
	}
	if err := x.checkHost(op, s, src.Len()); err != nil || x.n == 0 {
		return err
	}
	if err := src.lease.beginUse(op, s); err != nil {
		return err
	}
	defer src.lease.done()
	return x.upload(s, src.p)
}

// CopyToPinned enqueues the copy of x to dst on s without making the host wait.
// dst is filled once s has passed the copy.
func (x Slice[T]) CopyToPinned(s *stream.Stream, dst *Pinned[T]) error {
	const op = "memory: copy to pinned memory"
	if err := dst.check(op); err != nil {
		return err
	}
	if err := x.checkHost(op, s, dst.Len()); err != nil || x.n == 0 {
		return err
	}
	if err := dst.lease.beginUse(op, s); err != nil {
		return err
	}
	defer dst.lease.done()
	return x.download(s, dst.p)
}

// Copy enqueues the copy of src to dst on s, a stream of either slice's device. Both
// slices have the same length and may be on two devices. Between two devices the memory
// is copied directly if the hardware can, and through the host otherwise
// (cuMemcpyPeerAsync); a copy through the host cannot be captured into a graph. The
// first copy between two devices tests the direct path, which takes the host some
// milliseconds; see device.Device.PeerWorks. Work on the other device must be ordered
// with s by an event. dst and src must not overlap, unless they are the same elements: the engines
// of a GPU copy parts in any order.
func Copy[T Element](s *stream.Stream, dst, src Slice[T]) error {
	const op = "memory: copy"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if err := src.check(op); err != nil {
		return err
	}
	if err := dst.check(op); err != nil {
		return err
	}
	if dst.n != src.n {
		return fmt.Errorf("%s: the destination has %d elements, the source %d", op, dst.n, src.n)
	}
	if src.n == 0 {
		return nil
	}
	if a, b, n := dst.raw(), src.raw(), cudadrv.DevicePtr(src.Bytes()); a != b && a < b+n && b < a+n {
		return fmt.Errorf("%s of %d elements: the destination overlaps the source, %d elements away: the result would be undefined; copy by way of other memory",
			op, src.n, (max(a, b)-min(a, b))/cudadrv.DevicePtr(sizeOf[T]()))
	}
	if s.Device() != src.Device() && s.Device() != dst.Device() {
		return fmt.Errorf("%s from %s to %s: %s is of neither device", op, src.Device(), dst.Device(), s)
	}
	by, err := inside.WayBetween(dst.Device(), src.Device())
	if err != nil {
		return err
	}
	switch by {
	case inside.Direct:
		// With unified addressing the driver finds the devices of both addresses.
		return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(dst.raw(), src.raw(), uintptr(src.Bytes()), gpu.StreamOf(s).Raw())
		})
	case inside.Staged:
		return copyStaged(s, dst, src)
	}
	return copyPeer(s, dst, src)
}

// copyPeer copies between devices that cannot access each other's memory.
func copyPeer[T Element](s *stream.Stream, dst, src Slice[T]) error {
	from, err := gpu.DeviceOf(src.Device()).Context()
	if err != nil {
		return err
	}
	to, err := gpu.DeviceOf(dst.Device()).Context()
	if err != nil {
		return err
	}
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyPeerAsync(dst.raw(), to, src.raw(), from, uintptr(src.Bytes()), gpu.StreamOf(s).Raw())
	})
}

// Zero enqueues a fill of x with zero bytes on s.
func (x Slice[T]) Zero(s *stream.Stream) error {
	if err := x.checkHost("memory: zero", s, x.n); err != nil || x.n == 0 {
		return err
	}
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(x.raw(), 0, uintptr(x.Bytes()), gpu.StreamOf(s).Raw())
	})
}

func (x Slice[T]) upload(s *stream.Stream, src unsafe.Pointer) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(x.raw(), src, uintptr(x.Bytes()), gpu.StreamOf(s).Raw())
	})
}

func (x Slice[T]) download(s *stream.Stream, dst unsafe.Pointer) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoHAsync(dst, x.raw(), uintptr(x.Bytes()), gpu.StreamOf(s).Raw())
	})
}

// checkHost validates a copy between x and n elements of host memory on s.
func (x Slice[T]) checkHost(op string, s *stream.Stream, n int) error {
	if err := x.check(op); err != nil {
		return err
	}
	var dev *gpu.Device // nil for the zero Slice
	if x.buf != nil {
		dev = gpu.DeviceOf(x.buf.Device())
	}
	if err := gpu.CheckStream(op, s, dev); err != nil {
		return err
	}
	if n != x.n {
		return fmt.Errorf("%s: the host has %d elements, the device %d", op, n, x.n)
	}
	return nil
}

// stageBytes is the size of a stage: large enough that the bus limits the copy, not the
// calls of the host.
const stageBytes = 4 << 20

// A stager copies from one device to another through two pieces of pinned memory: while
// one is filled the other is emptied. The host only enqueues. The stager lives as long
// as the contexts of the devices.
type stager struct {
	mu       sync.Mutex
	from, to *gpu.Device
	out, in  cudadrv.Stream   // on from and on to
	begin    [2]cudadrv.Event // on from and on to: the position of the user's stream
	stages   [2]stage
	ready    bool
}

type stage struct {
	p     unsafe.Pointer
	full  cudadrv.Event // on from
	empty cudadrv.Event // on to
}

// stagersKey is the key of a device's stagers, by destination device.
var stagersKey handle.Key

// copyStaged enqueues a copy between devices through pinned memory.
func copyStaged[T Element](s *stream.Stream, dst, src Slice[T]) error {
	if err := gpu.StreamOf(s).RefuseCapture("memory: copy", "copies between these devices are staged, and a staged one cannot be launched again: copy before the capture"); err != nil {
		return err
	}
	from, to := gpu.DeviceOf(src.Device()), gpu.DeviceOf(dst.Device())
	stagers := from.Local(&stagersKey, func() any { return new(sync.Map) }).(*sync.Map)
	g, ok := stagers.Load(to)
	if !ok {
		g, _ = stagers.LoadOrStore(to, &stager{from: from, to: to})
	}
	return g.(*stager).copy(gpu.StreamOf(s), dst.raw(), src.raw(), uintptr(src.Bytes()))
}

func (g *stager) copy(s *gpu.Stream, dst, src cudadrv.DevicePtr, bytes uintptr) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.allocate(); err != nil {
		return err
	}
	begin := g.begin[0]
	if s.Device() == g.to {
		begin = g.begin[1]
	}
	if err := s.Device().RecordEvent(begin, s.Raw()); err != nil {
		return err
	}
	if err := g.from.WaitEvent(g.out, begin); err != nil { // and in waits for out
		return err
	}
	if err := g.enqueue(s, dst, src, bytes); err != nil {
		// s does not wait for the operations that are already enqueued, and they use
		// the memory.
		return errors.Join(err, g.drain())
	}
	return nil
}

// enqueue enqueues the copies and makes s wait for the last one.
func (g *stager) enqueue(s *gpu.Stream, dst, src cudadrv.DevicePtr, bytes uintptr) error {
	last := 0
	for at := uintptr(0); at < bytes; at += stageBytes {
		last = int(at / stageBytes % 2)
		if err := g.pass(&g.stages[last], dst+cudadrv.DevicePtr(at), src+cudadrv.DevicePtr(at), min(stageBytes, bytes-at)); err != nil {
			return err
		}
	}
	return s.Wait(g.stages[last].empty)
}

// drain waits for the operations that the stager has enqueued.
func (g *stager) drain() error {
	return errors.Join(g.from.SyncStream(g.out), g.to.SyncStream(g.in))
}

// pass fills a stage once it is empty, and then empties it.
func (g *stager) pass(x *stage, dst, src cudadrv.DevicePtr, n uintptr) error {
	if err := g.from.WaitEvent(g.out, x.empty); err != nil {
		return err
	}
	err := g.from.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemcpyDtoHAsync(x.p, src, n, g.out) })
	if err != nil {
		return err
	}
	if err := g.from.RecordEvent(x.full, g.out); err != nil {
		return err
	}
	if err := g.to.WaitEvent(g.in, x.full); err != nil {
		return err
	}
	err = g.to.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemcpyHtoDAsync(dst, x.p, n, g.in) })
	if err != nil {
		return err
	}
	return g.to.RecordEvent(x.empty, g.in)
}

// allocate creates the streams, events and memory that do not exist yet, so that it can be
// called again after an error.
func (g *stager) allocate() (err error) {
	if g.ready {
		return nil
	}
	stream := func(dev *gpu.Device, s *cudadrv.Stream) {
		if err == nil && *s == 0 {
			*s, err = dev.NewStream(0)
		}
	}
	event := func(dev *gpu.Device, e *cudadrv.Event) {
		if err == nil && *e == 0 {
			*e, err = dev.NewEvent(cudadrv.EventDisableTiming)
		}
	}
	stream(g.from, &g.out)
	stream(g.to, &g.in)
	event(g.from, &g.begin[0])
	event(g.to, &g.begin[1])
	for i := range g.stages {
		x := &g.stages[i]
		event(g.from, &x.full)
		event(g.to, &x.empty)
		if err == nil && x.p == nil {
			err = g.from.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
				x.p, r = drv.MemHostAlloc(stageBytes, cudadrv.MemHostAllocPortable)
				return r
			})
		}
	}
	g.ready = err == nil
	return err
}
