package memory

import (
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// asyncAllocator takes each block from the driver's own pool, in the order of the
// stream (cudaMallocAsync). The pool keeps what was freed.
type asyncAllocator struct{}

var asyncKey kept.Key

func (asyncAllocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := keepFreed(s.Device()); err != nil {
		return 0, err
	}
	var p cudadrv.DevicePtr
	err := s.Device().Do("cuMemAllocAsync", func(drv cudadrv.Driver) (r cudadrv.Result) {
		p, r = drv.MemAllocAsync(uintptr(bytes), s.Raw())
		return r
	})
	return uint64(p), err
}

func (asyncAllocator) Free(s *stream.Stream, ptr uint64, _ int) error {
	return s.Device().Do("cuMemFreeAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemFreeAsync(cudadrv.DevicePtr(ptr), s.Raw())
	})
}

// keepFreed tells the driver's pool once to keep freed memory instead of
// returning it to the system at every synchronisation.
func keepFreed(d *device.Device) error {
	once := d.Local(&asyncKey, func() any {
		return sync.OnceValue(func() error {
			pool, r := d.Driver().DeviceGetDefaultMemPool(d.Handle())
			if err := d.Check("cuDeviceGetDefaultMemPool", r); err != nil {
				return err
			}
			return d.Check("cuMemPoolSetAttribute",
				d.Driver().MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReleaseThreshold, ^uint64(0)))
		})
	}).(func() error)
	return once()
}

// trim gives back what the driver's pool keeps, after the work on the device.
func (asyncAllocator) trim(d *device.Device) error {
	pool, r := d.Driver().DeviceGetDefaultMemPool(d.Handle())
	if err := d.Check("cuDeviceGetDefaultMemPool", r); err != nil {
		return err
	}
	err := d.Do("cuCtxSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
	if err != nil {
		return err
	}
	return d.Check("cuMemPoolTrimTo", d.Driver().MemPoolTrimTo(pool, 0))
}

// reserved returns what the driver's pool has, now and at most.
func (asyncAllocator) reserved(d *device.Device) (now, peak int64, err error) {
	pool, r := d.Driver().DeviceGetDefaultMemPool(d.Handle())
	if err := d.Check("cuDeviceGetDefaultMemPool", r); err != nil {
		return 0, 0, err
	}
	var values [2]int64
	for i, attr := range []int32{cudadrv.MemPoolAttrReservedCurrent, cudadrv.MemPoolAttrReservedHigh} {
		v, r := d.Driver().MemPoolGetAttribute(pool, attr)
		if err := d.Check("cuMemPoolGetAttribute", r); err != nil {
			return 0, 0, err
		}
		values[i] = int64(v)
	}
	return values[0], values[1], nil
}

// resetPeak makes what the driver's pool has the most that it had.
func (asyncAllocator) resetPeak(d *device.Device) error {
	pool, r := d.Driver().DeviceGetDefaultMemPool(d.Handle())
	if err := d.Check("cuDeviceGetDefaultMemPool", r); err != nil {
		return err
	}
	return d.Check("cuMemPoolSetAttribute", d.Driver().MemPoolSetAttribute(pool, cudadrv.MemPoolAttrReservedHigh, 0))
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
