package memory

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// pages allocates physical memory from the driver and maps it, for expandable segments.
// Its methods are called one at a time, except reopen.
type pages struct {
	h    *heap
	size uint64
	// reach is the size of a segment's address range in bytes. It exceeds the device's
	// memory, so that there is always room after the last block.
	reach uint64
	prop  cudadrv.MemAllocationProp
	known *mappedPages
}

// leastPage is the minimum page size, even if the driver supports smaller pages: the
// size of a small segment.
const leastPage = 2 << 20

// newPages returns nil if the device does not support virtual memory management.
func newPages(h *heap, total uint64) (alloc.PageSource, error) {
	d := h.dev
	attr := func(a cudadrv.Attribute) (bool, error) {
		v, err := gpu.DeviceOf(d).Attribute(a)
		return v != 0, err
	}
	can, err := attr(cudadrv.AttrVMMSupported)
	if err != nil || !can {
		return nil, err
	}
	p := &pages{h: h, prop: cudadrv.MemAllocationProp{Device: gpu.DeviceOf(d).Handle()}, known: pagesOf(d)}
	fd, err := attr(cudadrv.AttrPosixFDHandleSupported)
	if err != nil {
		return nil, err
	}
	if fd {
		p.prop.HandleTypes = cudadrv.MemHandlePosixFD
	}
	if p.prop.GPUDirectRDMACapable, err = attr(cudadrv.AttrGPUDirectRDMAWithVMM); err != nil {
		return nil, err
	}
	var least uintptr
	err = gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		least, r = drv.MemGetAllocationGranularity(p.prop, cudadrv.MemGranularityMinimum)
		return r
	})
	if err != nil {
		return nil, err
	}
	p.size = (leastPage + uint64(least) - 1) / uint64(least) * uint64(least)
	p.reach = (total + total/8 + p.size - 1) / p.size * p.size
	gpu.DeviceOf(d).OnPeer(p.reopen)
	return p, nil
}

func (p *pages) PageSize() uint64 { return p.size }
func (p *pages) Reach() uint64    { return p.reach }

func (p *pages) Reserve(bytes uint64) (addr uint64, err error) {
	err = gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		a, r := drv.MemAddressReserve(uintptr(bytes), uintptr(p.size), 0)
		addr = uint64(a)
		return r
	})
	return addr, err
}

func (p *pages) Unreserve(addr, bytes uint64) error {
	return gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemAddressFree(cudadrv.DevicePtr(addr), uintptr(bytes))
	})
}

func (p *pages) Create() (page uint64, err error) {
	err = gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		m, r := drv.MemCreate(uintptr(p.size), p.prop)
		page = uint64(m)
		return r
	})
	return page, noMemory(err)
}

func (p *pages) Release(page uint64) error {
	return gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemRelease(cudadrv.MemHandle(page)) })
}

func (p *pages) Map(addr, page uint64) error {
	err := gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemMap(cudadrv.DevicePtr(addr), uintptr(p.size), 0, cudadrv.MemHandle(page))
	})
	if err == nil {
		p.known.mapped(addr, p.size, cudadrv.MemHandle(page))
	}
	return noMemory(err)
}

func (p *pages) Unmap(addr, bytes uint64) error {
	err := gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemUnmap(cudadrv.DevicePtr(addr), uintptr(bytes))
	})
	if err == nil {
		p.known.unmapped(addr, bytes)
	}
	return err
}

// Open gives the device, and the peers that can access its memory, access to the range.
func (p *pages) Open(addr, bytes uint64) error {
	devices := []cudadrv.Device{gpu.DeviceOf(p.h.dev).Handle()}
	for _, peer := range gpu.DeviceOf(p.h.dev).Guests() {
		devices = append(devices, peer.Handle())
	}
	return noMemory(p.access(addr, bytes, devices...))
}

// reopen gives a new peer access to all mapped pages.
func (p *pages) reopen(peer *gpu.Device) error {
	for _, at := range p.known.addresses() {
		if err := p.access(at, p.size, peer.Handle()); err != nil {
			return err
		}
	}
	return nil
}

func (p *pages) access(addr, bytes uint64, devices ...cudadrv.Device) error {
	return gpu.DeviceOf(p.h.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemSetAccess(cudadrv.DevicePtr(addr), uintptr(bytes), cudadrv.MemAccessReadWrite, devices...)
	})
}
