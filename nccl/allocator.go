package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Allocator gives out memory of NCCL (ncclMemAlloc, ncclMemFree), which
// collectives may use without a copy of their own once it is registered with
// their communicators. Its Free waits for the stream. It rounds up to whole pages
// of the device, mostly 2 MiB: it is for the segments of a pool.
var Allocator memory.Allocator = allocator{}

type allocator struct{}

func (allocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	const op = "nccl: allocate"
	if err := s.Check(op, nil); err != nil {
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
	// NCCL does not say what failed.
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
	if err := s.RefuseCapture(op, "the graph may use the memory: free it after the graph"); err != nil {
		return err
	}
	dev := s.Device()
	// ncclMemFree unmaps the memory at once, whatever uses it.
	err := dev.DoRelaxed("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s.Raw()) })
	if err == nil || dev.Err() != nil { // a lost device uses nothing
		err = call(dev, "ncclMemFree", func(api ncclapi.API) ncclapi.Result { return api.MemFree(cudadrv.DevicePtr(ptr)) })
	}
	if err != nil {
		return fmt.Errorf("%s %d bytes at %#x: %w", op, bytes, ptr, err)
	}
	return nil
}

// call calls NCCL without a communicator.
func call(dev *device.Device, name string, fn func(ncclapi.API) ncclapi.Result) error {
	api, err := dev.System().NCCL()
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
