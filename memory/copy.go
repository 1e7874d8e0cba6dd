package memory

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// notPinned says why ordinary host memory cannot be captured.
const notPinned = "the host would wait or its memory be gone in a later launch: copy from and to pinned memory, or before the capture"

// CopyFrom copies src to x in the order of s and returns when src may be
// reused; the copy may still be on its way (cuMemcpyHtoDAsync). src is ordinary
// memory of len x.Len(); with CopyFromPinned the host does not wait at all.
func (x Slice[T]) CopyFrom(s *stream.Stream, src []T) error {
	const op = "memory: copy from host"
	if err := x.checkHost(op, s, len(src)); err != nil || x.n == 0 {
		return err
	}
	if err := s.RefuseCapture(op, notPinned); err != nil {
		return err
	}
	// CUDA stages ordinary memory before it returns, but not pinned memory.
	pinned := hostOf(s.Device()).pinned.has(unsafe.Pointer(unsafe.SliceData(src)))
	if pinned {
		if err := s.RefuseWait(op); err != nil {
			return err
		}
	}
	if err := s.Device().Blocking(op); err != nil {
		return err
	}
	if err := x.upload(s, unsafe.Pointer(unsafe.SliceData(src))); err != nil || !pinned {
		return err
	}
	return settle(s)
}

// CopyTo copies x to dst in the order of s and returns when dst is filled: it
// waits for everything that is on s before, so Sync(ctx) on s first where that
// may not end. dst has len x.Len().
func (x Slice[T]) CopyTo(s *stream.Stream, dst []T) error {
	const op = "memory: copy to host"
	if err := x.checkHost(op, s, len(dst)); err != nil || x.n == 0 {
		return err
	}
	if err := s.RefuseCapture(op, notPinned); err != nil {
		return err
	}
	if err := s.RefuseWait(op); err != nil {
		return err
	}
	if err := s.Device().Blocking(op); err != nil {
		return err
	}
	if err := x.download(s, unsafe.Pointer(unsafe.SliceData(dst))); err != nil {
		return err
	}
	return settle(s)
}

// settle waits for a stream that is not captured, in a call that has told Blocking.
func settle(s *stream.Stream) error {
	do := s.Device().Do
	if stream.AnyCapture() {
		do = s.Device().DoRelaxed
	}
	return do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s.Raw()) })
}

// CopyFromPinned enqueues the copy of src to x on s. The host does not wait;
// src must stay as it is until s is past the copy, but may be closed.
func (x Slice[T]) CopyFromPinned(s *stream.Stream, src *Pinned[T]) error {
	const op = "memory: copy from pinned memory"
	if err := src.check(op); err != nil {
		return err
	}
	if err := x.checkHost(op, s, src.Len()); err != nil || x.n == 0 {
		return err
	}
	if err := src.lease.use(op, s); err != nil {
		return err
	}
	defer src.lease.done()
	return x.upload(s, src.p)
}

// CopyToPinned enqueues the copy of x to dst on s. The host does not wait; dst
// is filled when s is past the copy.
func (x Slice[T]) CopyToPinned(s *stream.Stream, dst *Pinned[T]) error {
	const op = "memory: copy to pinned memory"
	if err := dst.check(op); err != nil {
		return err
	}
	if err := x.checkHost(op, s, dst.Len()); err != nil || x.n == 0 {
		return err
	}
	if err := dst.lease.use(op, s); err != nil {
		return err
	}
	defer dst.lease.done()
	return x.download(s, dst.p)
}

// Copy enqueues the copy of src to dst on s, a stream of either's device. The
// two have the same length, and may be on two devices: the copy then goes from
// one to the other directly where the hardware can, and otherwise by way of the
// host, which a graph cannot capture (cuMemcpyPeerAsync). The first copy between
// two devices tests the way, for which the host waits some milliseconds; see
// device.Device.PeerWorks. Work on the other
// device must be ordered with s by an event.
func Copy[T Element](s *stream.Stream, dst, src Slice[T]) error {
	const op = "memory: copy"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	if err := src.Check(op, nil); err != nil {
		return err
	}
	if err := dst.Check(op, nil); err != nil {
		return err
	}
	if dst.n != src.n {
		return fmt.Errorf("%s: the destination has %d elements, the source %d", op, dst.n, src.n)
	}
	if src.n == 0 {
		return nil
	}
	if s.Device() != src.Device() && s.Device() != dst.Device() {
		return fmt.Errorf("%s from %s to %s: %s is of neither device", op, src.Device(), dst.Device(), s)
	}
	by, err := wayBetween(dst.Device(), src.Device())
	if err != nil {
		return err
	}
	switch by {
	case direct:
		// One address space: the driver knows whose memory it is.
		return s.Device().Do("cuMemcpyDtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemcpyDtoDAsync(dst.Raw(), src.Raw(), uintptr(src.Bytes()), s.Raw())
		})
	case staged:
		return copyStaged(s, dst, src)
	}
	return copyPeer(s, dst, src)
}

// A way is how a copy goes.
type way int

const (
	direct way = iota // in one address space
	driver            // by the driver, which finds a way over the host
	staged            // over the host by Chorus: what goes directly arrives wrong
)

// wayBetween finds the way between two devices and opens it. The first time that
// is a test, which a capture that is going on forbids: then the driver is
// believed.
func wayBetween(a, b *device.Device) (way, error) {
	if a == b {
		return direct, nil
	}
	open := a.Local(&openKey, func() any { return new(sync.Map) }).(*sync.Map)
	if _, known := open.Load(b); known {
		return direct, nil
	}
	by, final, err := findWay(a, b)
	if err == nil && by == direct && final {
		open.Store(b, true)
	}
	return by, err
}

// openKey is of the devices to which a device has a direct way that is open and was
// tested.
var openKey kept.Key

// findWay also reports whether the way stays the one.
func findWay(a, b *device.Device) (by way, final bool, err error) {
	can, err := a.CanAccessPeer(b)
	if err != nil || !can {
		return driver, false, err
	}
	works, tested := a.PeerTested(b)
	if !tested && !stream.AnyCapture() {
		works, err = a.PeerWorks(b)
		tested = true
	}
	if err != nil || tested && !works {
		return staged, false, err
	}
	if err := a.EnablePeer(b); err != nil {
		return direct, false, err
	}
	return direct, tested, b.EnablePeer(a)
}

// Reach lets kernels and copies on a device and on others use the memory of it and of each
// of them, and reports whether they can. Where they cannot, Copy finds another way. The
// first call for two devices tests the way; see device.Device.PeerWorks. For
// Chorus's own packages.
func Reach(on *device.Device, others ...*device.Device) (bool, error) {
	for _, d := range others {
		if d == on {
			continue
		}
		if by, err := wayBetween(on, d); by != direct || err != nil {
			return false, err
		}
	}
	return true, nil
}

// copyPeer copies between devices that do not reach each other.
func copyPeer[T Element](s *stream.Stream, dst, src Slice[T]) error {
	from, err := src.Device().Context()
	if err != nil {
		return err
	}
	to, err := dst.Device().Context()
	if err != nil {
		return err
	}
	return s.Device().Do("cuMemcpyPeerAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyPeerAsync(dst.Raw(), to, src.Raw(), from, uintptr(src.Bytes()), s.Raw())
	})
}

// Zero enqueues the filling of x with zero bytes on s.
func (x Slice[T]) Zero(s *stream.Stream) error {
	if err := x.checkHost("memory: zero", s, x.n); err != nil || x.n == 0 {
		return err
	}
	return s.Device().Do("cuMemsetD8Async", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(x.Raw(), 0, uintptr(x.Bytes()), s.Raw())
	})
}

func (x Slice[T]) upload(s *stream.Stream, src unsafe.Pointer) error {
	return s.Device().Do("cuMemcpyHtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(x.Raw(), src, uintptr(x.Bytes()), s.Raw())
	})
}

func (x Slice[T]) download(s *stream.Stream, dst unsafe.Pointer) error {
	return s.Device().Do("cuMemcpyDtoHAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoHAsync(dst, x.Raw(), uintptr(x.Bytes()), s.Raw())
	})
}

// checkHost checks a copy between x and n elements of host memory on s.
func (x Slice[T]) checkHost(op string, s *stream.Stream, n int) error {
	if err := x.Check(op, nil); err != nil {
		return err
	}
	if err := s.Check(op, x.Device()); err != nil {
		return err
	}
	if n != x.n {
		return fmt.Errorf("%s: the host has %d elements, the device %d", op, n, x.n)
	}
	return nil
}
