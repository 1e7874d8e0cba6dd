package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Allocator allocates memory with NCCL (ncclMemAlloc, ncclMemFree). Collectives can use
// the memory without an internal copy once it is registered with their communicators. Free
// waits for the stream. Sizes are rounded up to whole pages of the device, usually 2 MiB,
// so use it for the segments of a pool.
var Allocator memory.Allocator = allocator{}

type allocator struct{}

func (allocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	const op = "nccl: allocate"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return 0, err
	}
	dev := s.Device()
	if bytes <= 0 {
		return 0, fmt.Errorf("%s %d bytes on %s: want more than none", op, bytes, dev)
	}
	var ptr cudadrv.DevicePtr
	err := call(dev, "ncclMemAlloc", func(api ncclapi.API) (r ncclapi.Result) {
		ptr, r = api.MemAlloc(uintptr(bytes))
		return r
	})
	if err == nil {
		return uint64(ptr), nil
	}
	// NCCL does not report the cause.
	if free, total, e := dev.MemoryInfo(); e == nil && free < uint64(bytes) {
		err = &memory.OutOfMemoryError{Device: dev.String(), Requested: uint64(bytes), Free: free, Total: total,
			Err: fmt.Errorf("%w: %w", device.ErrorOutOfMemory, err)}
	}
	return 0, err
}

func (allocator) Free(s *stream.Stream, ptr uint64, bytes int) error {
	const op = "nccl: free"
	if s == nil {
		return fmt.Errorf("%s: no stream given", op)
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "the graph may use the memory: free it after the graph"); err != nil {
		return err
	}
	dev := s.Device()
	// ncclMemFree unmaps the memory at once, even if it is in use.
	err := gpu.DeviceOf(dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(gpu.StreamOf(s).Raw()) })
	if err == nil || dev.Err() != nil { // a lost device no longer uses the memory
		err = call(dev, "ncclMemFree", func(api ncclapi.API) ncclapi.Result { return api.MemFree(cudadrv.DevicePtr(ptr)) })
	}
	if err != nil {
		return fmt.Errorf("%s %d bytes at %#x: %w", op, bytes, ptr, err)
	}
	return nil
}

// call calls NCCL without a communicator.
func call(dev *device.Device, name string, fn func(ncclapi.API) ncclapi.Result) error {
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return err
	}
	return relaxed(dev, func() error {
		if r := fn(api); r != ncclapi.Success {
			return &Error{Op: name, Rank: -1, Device: dev.String(), Err: Result(r), Detail: api.GetLastError(0)}
		}
		return nil
	})
}
