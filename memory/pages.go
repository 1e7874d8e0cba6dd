package memory

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/alloc"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// pages takes physical memory from the driver and maps it, for expandable
// segments. Its methods are called one at a time, but for reopen.
type pages struct {
	h    *heap
	size uint64
	// reach is how many bytes of addresses a segment has: more than the device has
	// memory, so that there is always room behind the last block.
	reach uint64
	prop  cudadrv.MemAllocationProp
	known *mappedPages
}

// leastPage is the size of pages where the driver would take smaller ones: that of
// a small segment.
const leastPage = 2 << 20

// newPages returns nil where the device cannot map memory.
func newPages(h *heap, total uint64) (alloc.PageSource, error) {
	d := h.dev
	attr := func(a cudadrv.Attribute) (bool, error) {
		v, r := d.Driver().DeviceGetAttribute(a, d.Handle())
		return v != 0, d.Check("cuDeviceGetAttribute", r)
	}
	can, err := attr(cudadrv.AttrVMMSupported)
	if err != nil || !can {
		return nil, err
	}
	p := &pages{h: h, prop: cudadrv.MemAllocationProp{Device: d.Handle()}, known: pagesOf(d)}
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
	err = d.Do("cuMemGetAllocationGranularity", func(drv cudadrv.Driver) (r cudadrv.Result) {
		least, r = drv.MemGetAllocationGranularity(p.prop, cudadrv.MemGranularityMinimum)
		return r
	})
	if err != nil {
		return nil, err
	}
	p.size = (leastPage + uint64(least) - 1) / uint64(least) * uint64(least)
	p.reach = (total + total/8 + p.size - 1) / p.size * p.size
	d.OnPeer(p.reopen)
	return p, nil
}

func (p *pages) PageSize() uint64 { return p.size }
func (p *pages) Reach() uint64    { return p.reach }

func (p *pages) Reserve(bytes uint64) (addr uint64, err error) {
	err = p.h.do("cuMemAddressReserve", func(drv cudadrv.Driver) cudadrv.Result {
		a, r := drv.MemAddressReserve(uintptr(bytes), uintptr(p.size), 0)
		addr = uint64(a)
		return r
	})
	return addr, err
}

func (p *pages) Unreserve(addr, bytes uint64) error {
	return p.h.do("cuMemAddressFree", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemAddressFree(cudadrv.DevicePtr(addr), uintptr(bytes))
	})
}

func (p *pages) Create() (page uint64, err error) {
	err = p.h.do("cuMemCreate", func(drv cudadrv.Driver) cudadrv.Result {
		m, r := drv.MemCreate(uintptr(p.size), p.prop)
		page = uint64(m)
		return r
	})
	return page, noMemory(err)
}

func (p *pages) Release(page uint64) error {
	return p.h.do("cuMemRelease", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemRelease(cudadrv.MemHandle(page)) })
}

func (p *pages) Map(addr, page uint64) error {
	err := p.h.do("cuMemMap", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemMap(cudadrv.DevicePtr(addr), uintptr(p.size), 0, cudadrv.MemHandle(page))
	})
	if err == nil {
		p.known.mapped(addr, p.size, cudadrv.MemHandle(page))
	}
	return noMemory(err)
}

func (p *pages) Unmap(addr, bytes uint64) error {
	err := p.h.do("cuMemUnmap", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemUnmap(cudadrv.DevicePtr(addr), uintptr(bytes))
	})
	if err == nil {
		p.known.unmapped(addr, bytes)
	}
	return err
}

// Open lets the device use the range, and those that may use its other memory.
func (p *pages) Open(addr, bytes uint64) error {
	devices := []cudadrv.Device{p.h.dev.Handle()}
	for _, peer := range p.h.dev.Guests() {
		devices = append(devices, peer.Handle())
	}
	return noMemory(p.access(addr, bytes, devices...))
}

// reopen lets a device that has become a peer use what is mapped.
func (p *pages) reopen(peer *device.Device) error {
	for _, at := range p.known.addresses() {
		if err := p.access(at, p.size, peer.Handle()); err != nil {
			return err
		}
	}
	return nil
}

func (p *pages) access(addr, bytes uint64, devices ...cudadrv.Device) error {
	return p.h.do("cuMemSetAccess", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemSetAccess(cudadrv.DevicePtr(addr), uintptr(bytes), cudadrv.MemAccessReadWrite, devices...)
	})
}
