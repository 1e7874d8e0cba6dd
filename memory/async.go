package memory

import (
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// asyncAllocator allocates each block from the driver's own memory pool, in stream
// order (cudaMallocAsync). The driver's pool caches freed memory.
type asyncAllocator struct{}

var asyncKey kept.Key

func (asyncAllocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := keepFreed(s.Device()); err != nil {
		return 0, err
	}
	var p cudadrv.DevicePtr
	err := gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		p, r = drv.MemAllocAsync(uintptr(bytes), gpu.StreamOf(s).Raw())
		return r
	})
	return uint64(p), err
}

func (asyncAllocator) Free(s *stream.Stream, ptr uint64, _ int) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemFreeAsync(cudadrv.DevicePtr(ptr), gpu.StreamOf(s).Raw())
	})
}

// keepFreed sets the release threshold of the driver's pool once, so that the pool
// keeps freed memory instead of returning it to the system at every synchronization.
func keepFreed(d *device.Device) error {
	once := gpu.DeviceOf(d).Local(&asyncKey, func() any {
		return sync.OnceValue(func() error {
			pool, err := gpu.DeviceOf(d).DefaultPool()
			if err != nil {
				return err
			}
			return gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result {
				return drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, ^uint64(0))
			})
		})
	}).(func() error)
	return once()
}

// trim waits for the device and then releases the memory that the driver's pool caches.
func (asyncAllocator) trim(d *device.Device) error {
	pool, err := gpu.DeviceOf(d).DefaultPool()
	if err != nil {
		return err
	}
	err = gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
	if err != nil {
		return err
	}
	return gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemPoolTrimTo(pool, 0) })
}

// reserved returns how much memory the driver's pool has reserved, now and at its peak.
func (asyncAllocator) reserved(d *device.Device) (now, peak int64, err error) {
	pool, err := gpu.DeviceOf(d).DefaultPool()
	if err != nil {
		return 0, 0, err
	}
	var values [2]int64
	for i, attr := range []int32{cudadrv.MemPoolAttrReservedCurrent, cudadrv.MemPoolAttrReservedHigh} {
		err := gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result {
			v, r := drv.MemPoolGetAttribute(pool, attr)
			values[i] = int64(v)
			return r
		})
		if err != nil {
			return 0, 0, err
		}
	}
	return values[0], values[1], nil
}

// resetPeak resets the peak of the driver's pool to its current size.
func (asyncAllocator) resetPeak(d *device.Device) error {
	pool, err := gpu.DeviceOf(d).DefaultPool()
	if err != nil {
		return err
	}
	return gpu.DeviceOf(d).Ask(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReservedHigh, 0)
	})
}

// async returns the driver's own allocator if it is in use.
func (h *heap) async() (a asyncAllocator, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cached != nil {
		a, ok = h.cached.a.(asyncAllocator)
	}
	return a, ok
}
