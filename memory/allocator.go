package memory

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// An Allocator allocates and frees device memory. [Driver] calls the driver for each
// block, [OpenPlugin] loads an allocator from a shared library, and nccl.Allocator
// allocates memory with NCCL.
//
// Both methods may be called by several goroutines at the same time, and while
// streams are captured into graphs.
type Allocator interface {
	// Alloc allocates bytes of memory, at least one, on the device of s and returns its
	// address. Operations that are enqueued on s from now on may use it. An error that
	// matches device.ErrorOutOfMemory means that the device has no more memory.
	Alloc(s *stream.Stream, bytes int) (ptr uint64, err error)
	// Free takes memory back that Alloc has returned; bytes is the size given to Alloc.
	// Operations already enqueued on s may still use the memory; operations on other
	// streams have been ordered before them. A pool that outlives the stream of a
	// segment passes the default stream instead, after all work on the segment has
	// completed.
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
	err := gpu.DeviceOf(s.Device()).DoRelaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
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
	err := gpu.DeviceOf(s.Device()).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(cudadrv.DevicePtr(ptr)) })
	if err != nil {
		return fmt.Errorf("memory: free %d bytes at %#x: %w", bytes, ptr, err)
	}
	return nil
}

// checkAlloc validates the arguments of every Alloc.
func checkAlloc(s *stream.Stream, bytes int) error {
	if err := gpu.CheckStream("memory: allocate", s, nil); err != nil {
		return err
	}
	if bytes <= 0 {
		return fmt.Errorf("memory: allocate %d bytes on %s: want more than none", bytes, s.Device())
	}
	return nil
}

// checkFree accepts a closed stream, since memory may outlive its stream.
func checkFree(s *stream.Stream) error {
	if s == nil {
		return fmt.Errorf("memory: free: no stream given")
	}
	return nil
}
