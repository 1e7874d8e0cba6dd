package machine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

// granularity is the unit of physical memory and of mappings, as on an H200.
const granularity = 2 << 20

// A physical is memory of cuMemCreate. It exists while a handle or a mapping
// refers to it. m.mu guards all fields, but not the bytes.
type physical struct {
	dev      *Device
	size     uint64
	file     *os.File
	serial   uint64
	types    cudadrv.MemHandleType
	imported bool // memory of another machine, which accounts for it
	handles  int
	mappings int
	clean    pages
	history  sanitizer.History
}

func (p *physical) String() string {
	return fmt.Sprintf("the physical memory of %d bytes of device %d", p.size, p.dev.ordinal)
}

// checkProp validates the properties of an allocation.
func (m *Machine) checkProp(prop cudadrv.MemAllocationProp) cudadrv.Result {
	switch {
	case m.Device(prop.Device) == nil:
		return cudadrv.ErrorInvalidDevice
	case prop.HandleTypes != cudadrv.MemHandleNone && prop.HandleTypes != cudadrv.MemHandlePosixFD:
		return cudadrv.ErrorNotSupported
	}
	return cudadrv.Success
}

func (d driver) MemGetAllocationGranularity(prop cudadrv.MemAllocationProp, option cudadrv.MemGranularity) (uintptr, cudadrv.Result) {
	c, r := d.begin("cuMemGetAllocationGranularity")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if option != cudadrv.MemGranularityMinimum && option != cudadrv.MemGranularityRecommended {
		return 0, cudadrv.ErrorInvalidValue
	}
	return granularity, d.m.checkProp(prop)
}

func (d driver) MemCreate(bytes uintptr, prop cudadrv.MemAllocationProp) (cudadrv.MemHandle, cudadrv.Result) {
	c, r := d.begin("cuMemCreate")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if r := d.m.checkProp(prop); r != cudadrv.Success {
		return 0, r
	}
	if bytes == 0 || bytes%granularity != 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	dev := d.m.Device(prop.Device)
	if bytes > d.m.cfg.Memory-dev.arena.used {
		return 0, cudadrv.ErrorOutOfMemory
	}
	f, serial, err := newMemFile(dev, uint64(bytes))
	if err != nil {
		return 0, cudadrv.ErrorOutOfMemory
	}
	dev.take(bytes)
	return d.m.handOut(&physical{dev: dev, size: uint64(bytes), file: f, serial: serial,
		types: prop.HandleTypes, clean: newPages(uint64(bytes))}), cudadrv.Success
}

// handOut creates a handle of physical memory.
func (m *Machine) handOut(p *physical) cudadrv.MemHandle {
	h := cudadrv.MemHandle(m.Handle())
	m.physicals[h] = p
	p.handles++
	return h
}

func (d driver) MemRelease(h cudadrv.MemHandle) cudadrv.Result {
	c, r := d.beginEnding("cuMemRelease")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if d.m.physicals[h] == nil {
		return cudadrv.ErrorInvalidValue
	}
	d.m.release(h)
	return cudadrv.Success
}

func (m *Machine) release(h cudadrv.MemHandle) {
	p := m.physicals[h]
	delete(m.physicals, h)
	p.handles--
	p.settle()
}

// settle frees the memory if no handle and no mapping refers to it.
func (p *physical) settle() {
	if p.handles+p.mappings > 0 {
		return
	}
	p.file.Close()
	if !p.imported {
		p.dev.arena.used -= uintptr(p.size)
	}
}

// resetPhysicals removes the device's physical memory. m.mu is held.
func (d *Device) resetPhysicals() {
	for h, p := range d.m.physicals {
		if p.dev == d {
			d.m.release(h)
		}
	}
	for _, other := range d.m.devices {
		for _, b := range other.arena.blocks {
			if b.space != nil {
				b.space.drop(b, func(x *mapping) bool { return x.memory.dev == d })
			}
		}
	}
}

// MemExportToShareableHandle poisons all remaining pages, because another process
// cannot poison them at their first touch.
func (d driver) MemExportToShareableHandle(h cudadrv.MemHandle, t cudadrv.MemHandleType) (int32, cudadrv.Result) {
	c, r := d.begin("cuMemExportToShareableHandle")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	p := d.m.physicals[h]
	if p == nil || t != cudadrv.MemHandlePosixFD || p.types != t {
		return 0, cudadrv.ErrorInvalidValue
	}
	if p.clean != nil {
		r, err := mapFile(p.file, p.size)
		if err != nil {
			return 0, cudadrv.ErrorOutOfMemory
		}
		p.clean.lay(r.bytes(p.size), 0, p.size)
		p.clean = nil
	}
	fd, err := unix.FcntlInt(p.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, cudadrv.ErrorOperatingSystem
	}
	return int32(fd), cudadrv.Success
}

func (d driver) MemImportFromShareableHandle(fd int32, t cudadrv.MemHandleType) (cudadrv.MemHandle, cudadrv.Result) {
	c, r := d.begin("cuMemImportFromShareableHandle")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if t != cudadrv.MemHandlePosixFD {
		return 0, cudadrv.ErrorInvalidValue
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, cudadrv.ErrorInvalidValue
	}
	f := os.NewFile(uintptr(own), "virtual memory")
	l, ok := readLabel(f)
	if !ok {
		f.Close()
		return 0, cudadrv.ErrorInvalidValue
	}
	if p := d.m.physicalOf(l.Serial); p != nil {
		f.Close()
		return d.m.handOut(p), cudadrv.Success
	}
	dev := d.m.deviceWith(l.UUID)
	if dev == nil {
		f.Close()
		return 0, cudadrv.ErrorInvalidDevice
	}
	return d.m.handOut(&physical{dev: dev, size: l.Bytes, file: f, serial: l.Serial, types: t, imported: true}), cudadrv.Success
}

// physicalOf returns physical memory of this machine by its serial number,
// whether it has a handle or is only mapped.
func (m *Machine) physicalOf(serial uint64) *physical {
	for _, p := range m.physicals {
		if p.serial == serial {
			return p
		}
	}
	for _, dev := range m.devices {
		for _, b := range dev.arena.blocks {
			if b.space == nil {
				continue
			}
			for _, x := range b.space.mappings {
				if x.memory.serial == serial {
					return x.memory
				}
			}
		}
	}
	return nil
}

// deviceWith returns the device with a UUID, or nil.
func (m *Machine) deviceWith(uuid cudadrv.UUID) *Device {
	for _, dev := range m.devices {
		if dev.uuid == uuid {
			return dev
		}
	}
	return nil
}
