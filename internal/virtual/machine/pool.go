package machine

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A pool is a memory pool: the default pool of a device, or a created one. It
// keeps freed memory up to its threshold, which then cannot be used otherwise.
// m.mu guards it.
type pool struct {
	dev                    *Device
	handle                 cudadrv.MemPool
	guests                 [maxDevices]bool // devices that may use its memory
	threshold              uint64
	used, usedHigh         uint64
	reserved, reservedHigh uint64 // includes used
}

// newPool creates a pool. m.mu is held.
func (d *Device) newPool() *pool {
	p := &pool{dev: d, handle: cudadrv.MemPool(d.m.Handle())}
	d.m.pools[p.handle] = p
	return p
}

func (p *pool) take(n uint64) {
	p.used += n
	p.reserved = max(p.reserved, p.used)
	p.usedHigh, p.reservedHigh = max(p.usedHigh, p.used), max(p.reservedHigh, p.reserved)
}

func (p *pool) give(n uint64) {
	p.used -= n
	p.trim(p.threshold)
}

// trim releases reserved memory beyond keep.
func (p *pool) trim(keep uint64) { p.reserved = max(p.used, min(p.reserved, keep)) }

// heldByPools returns the memory that the device's pools reserve but do not use.
func (d *Device) heldByPools() uintptr {
	held := uint64(0)
	for _, p := range d.m.pools {
		if p.dev == d {
			held += p.reserved - p.used
		}
	}
	return uintptr(held)
}

// squeezePools frees pooled memory that the device needs for another allocation.
func (d *Device) squeezePools() {
	if d.heldByPools() <= d.m.cfg.Memory-d.arena.used {
		return
	}
	for _, p := range d.m.pools {
		if p.dev == d {
			p.trim(0)
		}
	}
}

// resetPools removes the pools that the program created, and empties the
// device's default pool. m.mu is held.
func (d *Device) resetPools() {
	for h, p := range d.m.pools {
		if p.dev == d && p != d.pool {
			delete(d.m.pools, h)
		}
	}
	*d.pool = pool{dev: d, handle: d.pool.handle}
}

func (d driver) DeviceGetDefaultMemPool(ord cudadrv.Device) (cudadrv.MemPool, cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDeviceGetDefaultMemPool", ord)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return dev.pool.handle, cudadrv.Success
}

// beginPool is beginFree for calls on a pool.
func (d driver) beginPool(name string, h cudadrv.MemPool) (call, *pool, cudadrv.Result) {
	c, r := d.beginFree(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	p := d.m.pools[h]
	if p == nil {
		c.end()
		return c, nil, cudadrv.ErrorInvalidValue
	}
	return c, p, cudadrv.Success
}

func (d driver) MemPoolGetAttribute(h cudadrv.MemPool, attr int32) (uint64, cudadrv.Result) {
	c, p, r := d.beginPool("cuMemPoolGetAttribute", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	switch attr {
	case cudadrv.MemPoolAttrReleaseThreshold:
		return p.threshold, cudadrv.Success
	case cudadrv.MemPoolAttrReservedCurrent:
		return p.reserved, cudadrv.Success
	case cudadrv.MemPoolAttrReservedHigh:
		return p.reservedHigh, cudadrv.Success
	case cudadrv.MemPoolAttrUsedCurrent:
		return p.used, cudadrv.Success
	case cudadrv.MemPoolAttrUsedHigh:
		return p.usedHigh, cudadrv.Success
	}
	return 0, cudadrv.ErrorInvalidValue
}

// MemPoolSetAttribute accepts the release threshold, and 0 for the high-water
// marks.
func (d driver) MemPoolSetAttribute(h cudadrv.MemPool, attr int32, value uint64) cudadrv.Result {
	c, p, r := d.beginPool("cuMemPoolSetAttribute", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	switch {
	case attr == cudadrv.MemPoolAttrReleaseThreshold:
		p.threshold = value
	case attr == cudadrv.MemPoolAttrReservedHigh && value == 0:
		p.reservedHigh = p.reserved
	case attr == cudadrv.MemPoolAttrUsedHigh && value == 0:
		p.usedHigh = p.used
	default:
		return cudadrv.ErrorInvalidValue
	}
	return cudadrv.Success
}

func (d driver) MemPoolSetAccess(h cudadrv.MemPool, peer cudadrv.Device) cudadrv.Result {
	c, p, r := d.beginPool("cuMemPoolSetAccess", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if d.m.Device(peer) == nil {
		return cudadrv.ErrorInvalidDevice
	}
	p.guests[peer] = true
	return cudadrv.Success
}

func (d driver) MemPoolTrimTo(h cudadrv.MemPool, keep uintptr) cudadrv.Result {
	c, p, r := d.beginPool("cuMemPoolTrimTo", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	p.trim(uint64(keep))
	return cudadrv.Success
}

func (d driver) MemAllocAsync(bytes uintptr, h cudadrv.Stream) (cudadrv.DevicePtr, cudadrv.Result) {
	c, s, r := d.beginStream("cuMemAllocAsync", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return c.allocFrom(s.dev.pool, s, bytes)
}

func (c *call) allocFrom(p *pool, s *Stream, bytes uintptr) (cudadrv.DevicePtr, cudadrv.Result) {
	if s.capture != nil {
		return 0, s.Refused() // CUDA creates an allocation node; virtual devices do not support those
	}
	return p.dev.allocPtr(bytes, func() *Block {
		b := newBlock(p.dev, uint64(bytes), blockAlign)
		b.pool = p
		p.take(b.size)
		// The memory exists from this point of the stream on. Other streams must
		// be ordered after it before they use the memory.
		c.enqueue(s, func(o *Op) { o.useAll(b, nil) })
		return b
	})
}

func (d driver) MemFreeAsync(p cudadrv.DevicePtr, h cudadrv.Stream) cudadrv.Result {
	c, r := d.beginEnding("cuMemFreeAsync")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	s, r := d.m.Stream(c.dev, h)
	if r != cudadrv.Success {
		return r
	}
	if s.capture != nil {
		return s.Refused() // only memory allocated in a capture can be freed in one
	}
	b := d.m.owned(p)
	if b == nil || b.public {
		return cudadrv.ErrorInvalidValue
	}
	b.giveUp()
	if s.dev.status != cudadrv.Success {
		b.retire(c.name)
		return s.dev.status
	}
	c.enqueue(s, func(o *Op) { o.useAll(b, func() { b.retire(fmt.Sprintf("%s on %v", o.Name, s)) }) })
	return cudadrv.Success
}
