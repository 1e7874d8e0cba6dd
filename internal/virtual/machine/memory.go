package machine

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
	return d.m.cfg.Memory - c.dev.arena.used - c.dev.heldByPools(), d.m.cfg.Memory, cudadrv.Success
}

func (d driver) MemAlloc(bytes uintptr) (cudadrv.DevicePtr, cudadrv.Result) {
	c, r := d.begin("cuMemAlloc")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return c.dev.allocPtr(bytes, func() *Block { return newShareable(c.dev, uint64(bytes)) })
}

// allocPtr allocates the block that fresh creates, and returns its address.
// m.mu is held.
func (d *Device) allocPtr(bytes uintptr, fresh func() *Block) (cudadrv.DevicePtr, cudadrv.Result) {
	if bytes == 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	b := d.alloc(bytes, fresh)
	if b == nil {
		return 0, cudadrv.ErrorOutOfMemory
	}
	return cudadrv.DevicePtr(b.addr), cudadrv.Success
}

// useAll records a write of the whole block and then calls done, with m.mu held.
func (o *Op) useAll(b *Block, done func()) {
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.freedBy != "" { // freed by a reset of the context
		return
	}
	if t := o.order(b, 0, b.size, true); t != nil {
		o.Lose(t)
		return
	}
	if done != nil {
		done()
	}
}

// owned returns the unfreed block of this machine that starts at p, or nil. m.mu
// is held.
func (m *Machine) owned(p cudadrv.DevicePtr) *Block {
	b, _ := m.Find(p)
	if b == nil || b.dev == nil || b.freeing || b.addr != uint64(p) || b.space != nil || b.opened != nil {
		return nil
	}
	return b
}

// MemFree waits for the whole device, like CUDA for memory outside of pools. For
// memory of a pool CUDA does not guarantee a wait, so an access that the host has
// not waited for is a race.
func (d driver) MemFree(p cudadrv.DevicePtr) cudadrv.Result {
	c, r := d.beginEnding("cuMemFree")
	if r != cudadrv.Success {
		return r
	}
	b := d.m.owned(p)
	if b == nil || b.public {
		defer c.end()
		if c.dev.status != cudadrv.Success {
			return c.dev.status // of a second call too: CUDA frees nothing on a lost device
		}
		return cudadrv.ErrorInvalidValue
	}
	return d.m.freeWaiting(c.name, b)
}

// freeWaiting frees a block for a call that waits, like cuMemFree: unless the
// block belongs to a pool, it first waits for all work of the device. m.mu is
// held at the call and released.
func (m *Machine) freeWaiting(name string, b *Block) cudadrv.Result {
	b.giveUp()
	if b.pool != nil {
		defer m.mu.Unlock()
		return b.freeNow(name)
	}
	marks := b.dev.marks()
	m.mu.Unlock()
	r := m.awaitDevice(name, b.dev, marks...)
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.freedBy == "" {
		b.retire(name)
	}
	return r
}

// freeNow frees a block on the host without waiting.
func (b *Block) freeNow(name string) cudadrv.Result {
	if a, found := b.history.Unfinished(b.dev.m.host); found {
		b.dev.raced("the host freed %v with %s, but has not waited for %v", b, name, a)
	}
	b.retire(name)
	return b.dev.status
}

// raced reports memory that the host released too early, and loses the device.
func (d *Device) raced(format string, args ...any) {
	if d.status != cudadrv.Success {
		return
	}
	text := "race: " + fmt.Sprintf(format, args...)
	d.m.Report(fmt.Sprintf("virtual device %d: %s (seed %#x)", d.ordinal, text, d.m.seed))
	d.lose(cudadrv.ErrorLaunchFailed, text)
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
	b := newHostBlock(uint64(bytes))
	p := unsafe.Pointer(unsafe.SliceData(b.data))
	b.addr = uint64(uintptr(p))
	b.poison()
	b.clean = nil
	d.m.pin(b)
	return p, cudadrv.Success
}

// pin adds a page-locked block.
func (m *Machine) pin(b *Block) {
	i, _ := slices.BinarySearchFunc(m.pinned, b.addr, compareAddr)
	m.pinned = slices.Insert(m.pinned, i, b)
}

func compareAddr(b *Block, addr uint64) int {
	switch {
	case b.addr < addr:
		return -1
	case b.addr > addr:
		return 1
	}
	return 0
}

// MemFreeHost waits for all devices, because each of them can use the memory,
// and a copy that is enqueued meanwhile fails.
func (d driver) MemFreeHost(p unsafe.Pointer) cudadrv.Result {
	c, r := d.beginEnding("cuMemFreeHost")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	return d.m.unpin(c.name, p, false)
}

// unpin removes the page-locked block of this kind that starts at p.
func (m *Machine) unpin(name string, p unsafe.Pointer, registered bool) cudadrv.Result {
	i, found := slices.BinarySearchFunc(m.pinned, uint64(uintptr(p)), compareAddr)
	if !found || m.pinned[i].registered != registered {
		return cudadrv.ErrorInvalidValue
	}
	b := m.pinned[i]
	m.checkUnregistered(b)
	healthy := m.retained()
	healthy = slices.DeleteFunc(healthy, func(d *Device) bool { return d.status != cudadrv.Success })
	r := m.Drain(name, healthy...)
	if i = slices.Index(m.pinned, b); i < 0 {
		return cudadrv.ErrorInvalidValue // another call has freed it
	}
	m.pinned = slices.Delete(m.pinned, i, i+1)
	if !registered {
		b.poison()
	}
	b.retire(name)
	return r
}

// MemHostRegister page-locks memory of the caller.
func (d driver) MemHostRegister(p unsafe.Pointer, bytes uintptr, flags uint32) cudadrv.Result {
	c, r := d.begin("cuMemHostRegister")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	addr, n := uint64(uintptr(p)), uint64(bytes)
	if p == nil || n == 0 || flags&^cudadrv.MemHostRegisterPortable != 0 || addr >= addressBase || n > addressBase-addr {
		return cudadrv.ErrorInvalidValue
	}
	if b := lookup(d.m.pinned, addr+n-1); b != nil && b.addr+b.size > addr {
		if !b.registered {
			return cudadrv.ErrorInvalidValue
		}
		return cudadrv.ErrorHostMemoryAlreadyRegistered
	}
	if !writable(addr, n) {
		return cudadrv.ErrorInvalidValue // CUDA pins pages for writing
	}
	d.m.pin(&Block{addr: addr, size: n, data: unsafe.Slice((*byte)(p), n), registered: true})
	return cudadrv.Success
}

// MemHostUnregister waits like MemFreeHost.
func (d driver) MemHostUnregister(p unsafe.Pointer) cudadrv.Result {
	c, r := d.beginEnding("cuMemHostUnregister")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if b := lookup(d.m.pinned, uint64(uintptr(p))); !b.contains(uint64(uintptr(p))) {
		return cudadrv.ErrorHostMemoryNotRegistered
	}
	return d.m.unpin(c.name, p, true)
}
