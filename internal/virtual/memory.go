package virtual

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

func (d driver) MemGetInfo() (free, total uintptr, r cudadrv.Result) {
	c, r := d.begin("cuMemGetInfo")
	if r != cudadrv.Success {
		return 0, 0, r
	}
	defer c.end()
	return d.m.cfg.Memory - c.dev.arena.used, d.m.cfg.Memory, cudadrv.Success
}

func (d driver) MemAlloc(bytes uintptr) (cudadrv.DevicePtr, cudadrv.Result) {
	c, r := d.begin("cuMemAlloc")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return c.dev.allocPtr(bytes, func(*block) {})
}

// allocPtr allocates and lets set finish the block. m.mu is held.
func (d *device) allocPtr(bytes uintptr, set func(*block)) (cudadrv.DevicePtr, cudadrv.Result) {
	if bytes == 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	b := d.alloc(bytes)
	if b == nil {
		return 0, cudadrv.ErrorOutOfMemory
	}
	set(b)
	return cudadrv.DevicePtr(b.addr), cudadrv.Success
}

func (d driver) MemAllocAsync(bytes uintptr, h cudadrv.Stream) (cudadrv.DevicePtr, cudadrv.Result) {
	c, s, r := d.beginStream("cuMemAllocAsync", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if s.capture != nil {
		return 0, s.refused() // CUDA makes it a node; virtual devices have no such nodes
	}
	return s.dev.allocPtr(bytes, func(b *block) {
		b.pooled = true
		// The memory exists from here on in the stream: a stream that does not
		// come after it must not use it.
		c.enqueue(s, func(o *op) { o.useAll(b, nil) })
	})
}

// useAll records a write of the whole block and then calls done with m.mu held.
func (o *op) useAll(b *block, done func()) {
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.freedBy != "" { // by a reset of the context
		return
	}
	if t := o.order(b, 0, b.size, true); t != nil {
		o.s.dev.lose(t.status, t.text)
		return
	}
	if done != nil {
		done()
	}
}

// owned returns the block that begins at p and that no free was called for.
// m.mu is held.
func (m *Machine) owned(p cudadrv.DevicePtr) *block {
	b, _ := m.find(p)
	if b == nil || b.dev == nil || b.freeing || b.addr != uint64(p) {
		return nil
	}
	return b
}

func (d driver) MemFreeAsync(p cudadrv.DevicePtr, h cudadrv.Stream) cudadrv.Result {
	c, r := d.beginEnding("cuMemFreeAsync")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	s, r := d.m.stream(c.dev, h)
	if r != cudadrv.Success {
		return r
	}
	if s.capture != nil {
		return s.refused() // only what was allocated in a capture is freed in one
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
	c.enqueue(s, func(o *op) { o.useAll(b, func() { b.retire(fmt.Sprintf("%s on %v", o.name, s)) }) })
	return cudadrv.Success
}

// MemFree waits for the whole device, as CUDA does for memory that is not of a
// pool. For memory of a pool CUDA promises no wait, so there an access that the
// host has not waited for is a race.
func (d driver) MemFree(p cudadrv.DevicePtr) cudadrv.Result {
	c, r := d.beginEnding("cuMemFree")
	if r != cudadrv.Success {
		return r
	}
	b := d.m.owned(p)
	if b == nil || b.public {
		c.end()
		return cudadrv.ErrorInvalidValue
	}
	return d.m.freeWaiting(c.name, b)
}

// freeWaiting frees a block from the host's side. m.mu is held and let go.
func (m *Machine) freeWaiting(name string, b *block) cudadrv.Result {
	b.giveUp()
	if b.pooled {
		defer m.mu.Unlock()
		return b.freePooled(name)
	}
	marks := b.dev.marks()
	m.mu.Unlock()
	r := m.await(b.dev, marks...)
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.freedBy == "" {
		b.retire(name)
	}
	return r
}

func (b *block) freePooled(name string) cudadrv.Result {
	m := b.dev.m
	if a, found := b.history.unfinished(m.host); found && b.dev.status == cudadrv.Success {
		text := fmt.Sprintf("race: the host freed %v with %s, but has not waited for %v", b, name, a)
		m.report(fmt.Sprintf("virtual device %d: %s (seed %#x)", b.dev.ordinal, text, m.seed))
		b.dev.lose(cudadrv.ErrorLaunchFailed, text)
	}
	b.retire(name)
	return b.dev.status
}

// pool returns the device whose default pool it is. m.mu is held.
func (m *Machine) pool(p cudadrv.MemPool) *device {
	for _, dev := range m.devices {
		if dev.pool == p {
			return dev
		}
	}
	return nil
}

func (d driver) DeviceGetDefaultMemPool(ord cudadrv.Device) (cudadrv.MemPool, cudadrv.Result) {
	c, r := d.beginFree("cuDeviceGetDefaultMemPool")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	dev := d.m.device(ord)
	if dev == nil {
		return 0, cudadrv.ErrorInvalidDevice
	}
	return dev.pool, cudadrv.Success
}

// beginPool is beginFree for calls about a pool.
func (d driver) beginPool(name string, p cudadrv.MemPool) (call, *device, cudadrv.Result) {
	c, r := d.beginFree(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	dev := d.m.pool(p)
	if dev == nil {
		c.end()
		return c, nil, cudadrv.ErrorInvalidValue
	}
	return c, dev, cudadrv.Success
}

// MemPoolSetAttribute takes the release threshold and needs to do nothing
// about it: a virtual pool holds nothing back.
func (d driver) MemPoolSetAttribute(p cudadrv.MemPool, attr int32, _ uint64) cudadrv.Result {
	c, _, r := d.beginPool("cuMemPoolSetAttribute", p)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if attr != cudadrv.MemPoolAttrReleaseThreshold {
		return cudadrv.ErrorInvalidValue
	}
	return cudadrv.Success
}

func (d driver) MemPoolSetAccess(p cudadrv.MemPool, peer cudadrv.Device) cudadrv.Result {
	c, dev, r := d.beginPool("cuMemPoolSetAccess", p)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if d.m.device(peer) == nil {
		return cudadrv.ErrorInvalidDevice
	}
	dev.guests[peer] = true
	return cudadrv.Success
}

func (d driver) MemPoolTrimTo(p cudadrv.MemPool, _ uintptr) cudadrv.Result {
	c, _, r := d.beginPool("cuMemPoolTrimTo", p)
	if r != cudadrv.Success {
		return r
	}
	c.end()
	return cudadrv.Success
}

func (d driver) MemHostAlloc(bytes uintptr, flags uint32) (unsafe.Pointer, cudadrv.Result) {
	c, r := d.begin("cuMemHostAlloc")
	if r != cudadrv.Success {
		return nil, r
	}
	defer c.end()
	if bytes == 0 || flags&^cudadrv.MemHostAllocPortable != 0 {
		return nil, cudadrv.ErrorInvalidValue
	}
	if bytes > d.m.cfg.Memory {
		return nil, cudadrv.ErrorOutOfMemory
	}
	b := newBlock(nil, uint64(bytes), hostAlign)
	p := unsafe.Pointer(unsafe.SliceData(b.data))
	b.addr = uint64(uintptr(p))
	poison(b.data)
	clear(b.clean)
	i, _ := slices.BinarySearchFunc(d.m.pinned, b.addr, compareAddr)
	d.m.pinned = slices.Insert(d.m.pinned, i, b)
	return p, cudadrv.Success
}

func compareAddr(b *block, addr uint64) int {
	switch {
	case b.addr < addr:
		return -1
	case b.addr > addr:
		return 1
	}
	return 0
}

// MemFreeHost does not wait: a copy that still uses the memory finds it gone.
func (d driver) MemFreeHost(p unsafe.Pointer) cudadrv.Result {
	c, r := d.beginEnding("cuMemFreeHost")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	i, found := slices.BinarySearchFunc(d.m.pinned, uint64(uintptr(p)), compareAddr)
	if !found {
		return cudadrv.ErrorInvalidValue
	}
	b := d.m.pinned[i]
	d.m.pinned = slices.Delete(d.m.pinned, i, i+1)
	poison(b.data)
	b.retire(c.name)
	return cudadrv.Success
}
