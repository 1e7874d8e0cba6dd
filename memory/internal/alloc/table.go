package alloc

import "sync/atomic"

// A table finds the segment of an address without a lock. It has two levels; the second
// level is allocated for addresses with memory.
type table struct {
	leaves [1 << topBits]atomic.Pointer[leaf]
}

type leaf [1 << leafBits]atomic.Pointer[tenant]

const (
	pageBits = 21
	leafBits = 14
	topBits  = 15
	pageSize = 1 << pageBits

	addressEnd = uint64(1) << (pageBits + leafBits + topBits)
)

// A tenant is a segment that occupies part of a page: an aligned range of 2 MiB of
// addresses.
type tenant struct {
	segment *segment
	next    *tenant
}

// slot returns the list of tenants for the page of addr, or nil.
func (t *table) slot(addr uint64) *atomic.Pointer[tenant] {
	if addr >= addressEnd {
		return nil
	}
	l := t.leaves[addr>>(pageBits+leafBits)].Load()
	if l == nil {
		return nil
	}
	return &l[addr>>pageBits&(1<<leafBits-1)]
}

// segment returns the segment that contains addr, or nil.
func (t *table) segment(addr uint64) *segment {
	s := t.slot(addr)
	if s == nil {
		return nil
	}
	for x := s.Load(); x != nil; x = x.next {
		if x.segment.has(addr) {
			return x.segment
		}
	}
	return nil
}

// placeable reports whether a segment may have the range [addr, addr+n).
func placeable(addr, n uint64) bool {
	return addr != 0 && addr%unit == 0 && n <= addressEnd && addr <= addressEnd-n
}

// overlaps reports whether a segment overlaps [addr, addr+n).
func (t *table) overlaps(addr, n uint64) bool {
	for base := addr &^ (pageSize - 1); base < addr+n; base += pageSize {
		slot := t.slot(base)
		if slot == nil {
			continue
		}
		for x := slot.Load(); x != nil; x = x.next {
			if o := x.segment; o.addr < addr+n && addr < o.addr+o.size() {
				return true
			}
		}
	}
	return false
}

// add registers [addr, addr+n) for the segment. Only one goroutine at a time may add or
// remove.
func (t *table) add(s *segment, addr, n uint64) {
	for base := addr &^ (pageSize - 1); base < addr+n; base += pageSize {
		top := &t.leaves[base>>(pageBits+leafBits)]
		if top.Load() == nil {
			top.Store(new(leaf))
		}
		slot := t.slot(base)
		slot.Store(&tenant{s, slot.Load()})
	}
}

// remove undoes add.
func (t *table) remove(s *segment, addr, n uint64) {
	for base := addr &^ (pageSize - 1); base < addr+n; base += pageSize {
		slot := t.slot(base)
		var rest *tenant
		for x := slot.Load(); x != nil; x = x.next {
			if x.segment != s {
				rest = &tenant{x.segment, rest}
			}
		}
		slot.Store(rest)
	}
}
