package memory

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/stream"
)

// notPinned is the advice for a copy of ordinary host memory in a capture.
const notPinned = "the host would wait or its memory be gone in a later launch: copy from and to pinned memory, or before the capture"

// CopyFrom copies src to x in the order of s and returns when src may be reused; the
// copy may still be in progress (cuMemcpyHtoDAsync). src is ordinary memory of length
// x.Len(). With CopyFromPinned the host does not wait at all.
func (x Slice[T]) CopyFrom(s *stream.Stream, src []T) error {
	const op = "memory: copy from host"
	if err := x.checkHost(op, s, len(src)); err != nil || x.n == 0 {
		return err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, notPinned); err != nil {
		return err
	}
	// CUDA stages ordinary memory before it returns, but not pinned memory.
	pinned := hostOf(s.Device()).pinned.has(unsafe.Pointer(unsafe.SliceData(src)))
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

// CopyTo copies x to dst in the order of s and returns when dst is filled. It waits for
// all operations that are enqueued on s before it; to bound that wait, call Sync(ctx)
// on s first. dst has length x.Len().
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
	if err := x.download(s, unsafe.Pointer(unsafe.SliceData(dst))); err != nil {
		return err
	}
	return syncBeside(s)
}

// syncBeside waits for a stream that is not captured. The caller has called Blocking.
func syncBeside(s *stream.Stream) error {
	return gpu.DeviceOf(s.Device()).DoBeside(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(gpu.StreamOf(s).Raw()) })
}

// CopyFromPinned enqueues the copy of src to x on s. The host does not wait. src must
// not change until s has passed the copy, but may be closed.
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

// CopyToPinned enqueues the copy of x to dst on s. The host does not wait. dst is
// filled when s has passed the copy.
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
	by, err := mem.WayBetween(dst.Device(), src.Device())
	if err != nil {
		return err
	}
	switch by {
	case mem.Direct:
		// With unified addressing the driver finds the devices of both addresses.
		return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(dst.raw(), src.raw(), uintptr(src.Bytes()), gpu.StreamOf(s).Raw())
		})
	case mem.Staged:
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
