package memory

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/stream"
)

// An Allocator gives device memory out and takes it back. Driver is the plain
// one, OpenPlugin has one of a shared library, nccl.Allocator has one of memory
// that NCCL knows; Limit, Count, Log and Fail wrap another.
//
// Both methods may be called by several goroutines at the same time, and while
// streams are captured into graphs.
type Allocator interface {
	// Alloc returns the address of bytes of memory of s's device, more than
	// none, that what is enqueued on s from now on may use. An error that
	// matches device.ErrorOutOfMemory means that the device has no more.
	Alloc(s *stream.Stream, bytes int) (ptr uint64, err error)
	// Free takes back what Alloc has returned for as many bytes. What is on s by
	// now may still use it; work on other streams has come before that. A pool that
	// outlives the stream of a segment names the default stream instead, when all
	// work on the segment is over.
	Free(s *stream.Stream, ptr uint64, bytes int) error
}

// Driver is the Allocator of the driver itself (cuMemAlloc, cuMemFree). Its Free
// waits until all work of the device has completed.
var Driver Allocator = driverAllocator{}

type driverAllocator struct{}

func (driverAllocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := checkAlloc(s, bytes); err != nil {
		return 0, err
	}
	var ptr cudadrv.DevicePtr
	err := s.Device().DoRelaxed("cuMemAlloc", func(drv cudadrv.Driver) (r cudadrv.Result) {
		ptr, r = drv.MemAlloc(uintptr(bytes))
		return r
	})
	if errors.Is(err, device.ErrorOutOfMemory) {
		return 0, outOfMemory(s.Device(), uintptr(bytes), err)
	}
	if err != nil {
		return 0, fmt.Errorf("memory: allocate %d bytes: %w", bytes, err)
	}
	return uint64(ptr), nil
}

func (driverAllocator) Free(s *stream.Stream, ptr uint64, bytes int) error {
	if err := checkFree(s); err != nil {
		return err
	}
	err := s.Device().DoRelaxed("cuMemFree", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(cudadrv.DevicePtr(ptr)) })
	if err != nil {
		return fmt.Errorf("memory: free %d bytes at %#x: %w", bytes, ptr, err)
	}
	return nil
}

// checkAlloc checks what every Allocator is given.
func checkAlloc(s *stream.Stream, bytes int) error {
	if err := s.Check("memory: allocate", nil); err != nil {
		return err
	}
	if bytes <= 0 {
		return fmt.Errorf("memory: allocate %d bytes on %s: want more than none", bytes, s.Device())
	}
	return nil
}

// checkFree takes a stream that was closed too, since memory outlives it.
func checkFree(s *stream.Stream) error {
	if s == nil {
		return fmt.Errorf("memory: free: no stream given")
	}
	return nil
}
