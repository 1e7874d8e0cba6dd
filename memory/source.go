package memory

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// driverSource allocates segments from the driver.
type driverSource struct{ h *heap }

func (s driverSource) Alloc(_ alloc.Stream, bytes uint64) (uint64, error) {
	var p cudadrv.DevicePtr
	err := gpu.DeviceOf(s.h.dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		p, r = drv.MemAlloc(uintptr(bytes))
		return r
	})
	return uint64(p), noMemory(err)
}

func (s driverSource) Free(_ alloc.Stream, addr, _ uint64) error {
	return gpu.DeviceOf(s.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemFree(cudadrv.DevicePtr(addr)) })
}

// Async is false: cuMemFree waits for the device.
func (driverSource) Async() bool { return false }

// noMemory marks an out-of-memory error so that the allocator recognizes it.
func noMemory(err error) error {
	if errors.Is(err, device.ErrorOutOfMemory) {
		return fmt.Errorf("%w: %w", alloc.ErrNoMemory, err)
	}
	return err
}

// allocatorSource allocates segments from a user's Allocator.
type allocatorSource struct{ a Allocator }

func (s allocatorSource) Alloc(l alloc.Stream, bytes uint64) (uint64, error) {
	p, err := s.a.Alloc(l.(*lane).s, int(bytes))
	return p, noMemory(err)
}

// Free passes the default stream if the segment's stream was destroyed, because all
// work of that stream has completed.
func (s allocatorSource) Free(on alloc.Stream, addr, bytes uint64) error {
	l := on.(*lane)
	if l.ended.Load() {
		return s.a.Free(stream.Default(l.heap.dev), addr, int(bytes))
	}
	return s.a.Free(l.s, addr, int(bytes))
}

// Async is true: Free of an Allocator need not wait.
func (allocatorSource) Async() bool { return true }
