package alloc

import "sync/atomic"

// A table finds the page of an address without a lock. It has two levels, of
// which the second is made where there is memory.
type table struct {
	leaves [1 << topBits]atomic.Pointer[leaf]
}

type leaf [1 << leafBits]atomic.Pointer[page]

const (
	pageBits = 21
	leafBits = 14
	topBits  = 15
	pageSize = 1 << pageBits

	addressEnd = uint64(1) << (pageBits + leafBits + topBits)
)

// A page is 2 MiB of addresses, at a multiple of that, as far as one segment has
// them. It knows the blocks that begin there and are used. The lock of the
// segment's domain guards it.
type page struct {
	segment *segment
	base    uint64
	shift   uint8    // how close two blocks may begin
	begins  []*block // by (address-base)>>shift
	next    *page    // of another segment that shares the addresses
}

func newPage(s *segment, base uint64) *page {
	p := &page{segment: s, base: base, shift: 9}
	if s.kind == large {
		p.shift = 20 // used blocks of large segments are larger than that
	}
	p.begins = make([]*block, pageSize>>p.shift)
	return p
}

// block returns the used block that begins at addr, or nil.
func (p *page) block(addr uint64) *block {
	if b := p.begins[(addr-p.base)>>p.shift]; b != nil && b.addr == addr {
		return b
	}
	return nil
}

// slot is where the page of addr is kept, or nil.
func (t *table) slot(addr uint64) *atomic.Pointer[page] {
	if addr >= addressEnd {
		return nil
	}
	l := t.leaves[addr>>(pageBits+leafBits)].Load()
	if l == nil {
		return nil
	}
	return &l[addr>>pageBits&(1<<leafBits-1)]
}

// page returns the page of the segment that has addr, or nil.
func (t *table) page(addr uint64) *page {
	s := t.slot(addr)
	if s == nil {
		return nil
	}
	for p := s.Load(); p != nil; p = p.next {
		if p.next == nil || p.segment.has(addr) {
			return p
		}
	}
	return nil
}

// add makes the pages of [addr, addr+n) known. Only one goroutine at a time adds
// or removes.
func (t *table) add(s *segment, addr, n uint64) {
	for base := addr &^ (pageSize - 1); base < addr+n; base += pageSize {
		top := &t.leaves[base>>(pageBits+leafBits)]
		if top.Load() == nil {
			top.Store(new(leaf))
		}
		slot := t.slot(base)
		p := newPage(s, base)
		p.next = slot.Load()
		slot.Store(p)
	}
}

// remove forgets the pages of the segment in [addr, addr+n).
func (t *table) remove(s *segment, addr, n uint64) {
	for base := addr &^ (pageSize - 1); base < addr+n; base += pageSize {
		slot := t.slot(base)
		var rest *page
		for p := slot.Load(); p != nil; p = p.next {
			if p.segment != s {
				q := *p
				q.next = rest
				rest = &q
			}
		}
		slot.Store(rest)
	}
}
