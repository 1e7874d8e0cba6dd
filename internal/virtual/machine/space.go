package machine

import (
	"fmt"
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

// A space holds the sorted mappings of a reservation. m.mu guards it.
type space struct{ mappings []*mapping }

// A mapping maps physical memory to [lo, hi) of a reservation.
type mapping struct {
	memory *physical
	lo, hi uint64
	access [maxDevices]cudadrv.MemAccess
	last   []sanitizer.Access // last use by each stream
}

// use records the latest use by each stream.
func (x *mapping) use(by sanitizer.Access) {
	for i := range x.last {
		if x.last[i].Slot == by.Slot {
			x.last[i] = by
			return
		}
	}
	x.last = append(x.last, by)
}

// unfinished returns a use that the host has not waited for.
func (x *mapping) unfinished(host sanitizer.Clock) (sanitizer.Access, bool) {
	for _, a := range x.last {
		if host.At(a.Slot) < a.Epoch {
			return a, true
		}
	}
	return sanitizer.Access{}, false
}

func (x *mapping) allows(dev *Device, write bool) bool {
	if write {
		return x.access[dev.ordinal] == cudadrv.MemAccessReadWrite
	}
	return x.access[dev.ordinal] != cudadrv.MemAccessNone
}

// within returns the mappings that overlap [offset, offset+n).
func (s *space) within(offset, n uint64) []*mapping {
	first := sort.Search(len(s.mappings), func(i int) bool { return s.mappings[i].hi > offset })
	last := first
	for last < len(s.mappings) && s.mappings[last].lo < offset+n {
		last++
	}
	return s.mappings[first:last]
}

// whole returns the mappings that exactly cover [offset, offset+n), or nil if the
// range has a hole or cuts a mapping.
func (s *space) whole(offset, n uint64) []*mapping {
	list := s.within(offset, n)
	at := offset
	for _, x := range list {
		if x.lo != at {
			return nil
		}
		at = x.hi
	}
	if at != offset+n {
		return nil
	}
	return list
}

// barred returns the reason why a device may not use a part of the reservation, or "".
func (s *space) barred(offset, n uint64, dev *Device, write bool) string {
	at := offset
	for _, x := range s.within(offset, n) {
		if x.lo > at {
			break
		}
		if !x.allows(dev, write) {
			return fmt.Sprintf("which %v is mapped at: cuMemSetAccess did not permit device %d to %s it",
				x.memory, dev.ordinal, map[bool]string{true: "write", false: "read"}[write])
		}
		at = x.hi
	}
	if at < offset+n {
		return fmt.Sprintf("but nothing is mapped from byte %d on", at-offset)
	}
	return ""
}

// barred is space.barred for an operation, except that access by the memory's
// own device is sufficient for a copy between two contexts.
func (o *Op) barred(b *Block, offset, n uint64, write bool) string {
	why := b.space.barred(offset, n, o.s.dev, write)
	if dev := b.Owner(cudadrv.DevicePtr(b.addr + offset)); why != "" && o.Name == "cuMemcpyPeerAsync" {
		why = b.space.barred(offset, n, dev, write)
	}
	if why == "" {
		return ""
	}
	return fmt.Sprintf("%s, in %v", why, b)
}

// Owner returns the device of the memory at p, an address of the block.
func (b *Block) Owner(p cudadrv.DevicePtr) *Device {
	if b.space != nil {
		if list := b.space.within(uint64(p)-b.addr, 1); len(list) > 0 {
			return list[0].memory.dev
		}
	}
	return b.dev
}

// lay poisons unpoisoned pages that are mapped in a part of the reservation.
func (s *space) lay(b *Block, offset, n uint64) {
	for _, x := range s.within(offset, n) {
		lo, hi := max(offset, x.lo), min(offset+n, x.hi)
		x.memory.clean.lay(b.data[x.lo:x.hi], lo-x.lo, hi-lo)
	}
}

// stain poisons all memory that is mapped in a part of the reservation again.
func (s *space) stain(b *Block, offset, n uint64) {
	for _, x := range s.within(offset, n) {
		lo, hi := max(offset, x.lo), min(offset+n, x.hi)
		x.memory.clean.stain(b.data[x.lo:x.hi], lo-x.lo, hi-lo)
	}
}

// drop removes mappings.
func (s *space) drop(b *Block, which func(*mapping) bool) {
	s.mappings = slices.DeleteFunc(s.mappings, func(x *mapping) bool {
		if !which(x) {
			return false
		}
		b.region.detach(uintptr(x.lo), uintptr(x.hi-x.lo))
		b.pieces.Set(x.lo, x.hi, sanitizer.Run{}, true)
		x.memory.mappings--
		x.memory.settle()
		return true
	})
}

func (s *space) clear(b *Block) { s.drop(b, func(*mapping) bool { return true }) }

// MemAddressReserve returns new addresses for each reservation and ignores the
// hint.
func (d driver) MemAddressReserve(bytes, alignment uintptr, _ cudadrv.DevicePtr) (cudadrv.DevicePtr, cudadrv.Result) {
	c, r := d.begin("cuMemAddressReserve")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if bytes == 0 || bytes%granularity != 0 || alignment&(alignment-1) != 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	addr, ok := c.dev.arena.place(uint64(bytes), uint64(max(alignment, granularity)))
	if !ok {
		return 0, cudadrv.ErrorOutOfMemory
	}
	where, err := newRegion(bytes)
	if err != nil {
		return 0, cudadrv.ErrorOutOfMemory
	}
	c.dev.arena.blocks = append(c.dev.arena.blocks, &Block{dev: c.dev, addr: addr, size: uint64(bytes),
		data: where.bytes(uint64(bytes)), region: where, space: &space{}})
	return cudadrv.DevicePtr(addr), cudadrv.Success
}

// reservation returns the reservation that contains [p, p+n), or nil. m.mu is held.
func (m *Machine) reservation(p cudadrv.DevicePtr, n uintptr) *Block {
	b, _ := m.Find(p)
	if b == nil || b.space == nil || b.freeing || n == 0 || uint64(n) > b.size-(uint64(p)-b.addr) {
		return nil
	}
	return b
}

func (d driver) MemAddressFree(p cudadrv.DevicePtr, bytes uintptr) cudadrv.Result {
	c, r := d.beginEnding("cuMemAddressFree")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	b := d.m.reservation(p, bytes)
	if b == nil || b.addr != uint64(p) || b.size != uint64(bytes) || len(b.space.mappings) > 0 {
		return cudadrv.ErrorInvalidValue
	}
	b.leave()
	b.retire(c.name)
	return cudadrv.Success
}

// MemMap supports only mapping all of the memory.
func (d driver) MemMap(p cudadrv.DevicePtr, bytes, offset uintptr, h cudadrv.MemHandle) cudadrv.Result {
	c, r := d.begin("cuMemMap")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	b, memory := d.m.reservation(p, bytes), d.m.physicals[h]
	switch {
	case b == nil || memory == nil || uint64(p)%granularity != 0:
		return cudadrv.ErrorInvalidValue
	case offset != 0 || uint64(bytes) != memory.size:
		return cudadrv.ErrorNotSupported
	}
	lo := uint64(p) - b.addr
	if len(b.space.within(lo, memory.size)) > 0 {
		return cudadrv.ErrorInvalidValue
	}
	if b.region.attach(memory.file, uintptr(lo), bytes) != nil {
		return cudadrv.ErrorOutOfMemory
	}
	memory.mappings++
	i := sort.Search(len(b.space.mappings), func(i int) bool { return b.space.mappings[i].lo > lo })
	b.space.mappings = slices.Insert(b.space.mappings, i, &mapping{memory: memory, lo: lo, hi: lo + memory.size})
	return cudadrv.Success
}

// MemUnmap does not wait, as in CUDA: a use that the host has not waited for is a
// race.
func (d driver) MemUnmap(p cudadrv.DevicePtr, bytes uintptr) cudadrv.Result {
	c, r := d.beginEnding("cuMemUnmap")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	b := d.m.reservation(p, bytes)
	if b == nil {
		return cudadrv.ErrorInvalidValue
	}
	list := slices.Clone(b.space.whole(uint64(p)-b.addr, uint64(bytes)))
	if list == nil {
		return cudadrv.ErrorInvalidValue
	}
	for _, x := range list {
		if a, found := x.unfinished(d.m.host); found {
			b.dev.raced("the host unmapped %d bytes at %#x with %s, but has not waited for %v", x.hi-x.lo, b.addr+x.lo, c.name, a)
		}
	}
	b.space.drop(b, func(x *mapping) bool { return slices.Contains(list, x) })
	return b.dev.status
}

func (d driver) MemSetAccess(p cudadrv.DevicePtr, bytes uintptr, right cudadrv.MemAccess, devices ...cudadrv.Device) cudadrv.Result {
	c, r := d.begin("cuMemSetAccess")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	b := d.m.reservation(p, bytes)
	if b == nil || len(devices) == 0 ||
		right != cudadrv.MemAccessNone && right != cudadrv.MemAccessRead && right != cudadrv.MemAccessReadWrite {
		return cudadrv.ErrorInvalidValue
	}
	list := b.space.whole(uint64(p)-b.addr, uint64(bytes))
	if list == nil {
		return cudadrv.ErrorInvalidValue
	}
	for _, ord := range devices {
		if d.m.Device(ord) == nil {
			return cudadrv.ErrorInvalidDevice
		}
	}
	for _, x := range list {
		for _, ord := range devices {
			x.access[ord] = right
		}
	}
	return cudadrv.Success
}
