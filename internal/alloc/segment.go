package alloc

// A segment is memory of a Source, divided into blocks that lie side by side; or,
// if it is expandable, a range of addresses, parts of which have memory.
type segment struct {
	addr   uint64
	units  uint32
	kind   kind
	number uint32 // among those of the domain
	home   *Arena // for which it was made
	stream Stream // on which it was made
	domain *domain
	span   *span // of an expandable segment
	stack  *Stack

	// slots of blocks by where they begin. Those of small segments are 2 MiB of
	// memory each, made where there are blocks.
	slots     [][]slot
	pageShift uint8 // of units, to the index into slots
	slotShift uint8 // of units, to the index into that
	mask      uint32
}

// How blocks are found in their segments: in small ones each unit may begin one, in
// large ones each MiB, since no block there is smaller.
var layouts = [kinds]struct{ page, slot uint8 }{small: {12, 0}, large: {31, 11}}

func newSegment(a *Arena, k kind, addr, size uint64) *segment {
	s := &segment{addr: addr, units: uint32(size / unit), kind: k, home: a, stream: a.stream, domain: a.domain}
	l := layouts[k]
	s.pageShift, s.slotShift = l.page, l.slot
	s.mask = 1<<(l.page-l.slot) - 1
	s.slots = make([][]slot, (s.units-1)>>l.page+1)
	a.domain.enter(s)
	s.make(0).size = s.units
	return s
}

func (s *segment) size() uint64 { return uint64(s.units) * unit }

func (s *segment) has(addr uint64) bool { return addr-s.addr < s.size() }

func (s *segment) slot(u uint32) *slot { return &s.slots[u>>s.pageShift][u>>s.slotShift&s.mask] }

// make returns the slot for a block that is to begin at u.
func (s *segment) make(u uint32) *slot {
	page := &s.slots[u>>s.pageShift]
	if *page == nil {
		n := min(s.mask, (s.units-1)>>s.slotShift) + 1
		*page = make([]slot, n)
	}
	x := s.slot(u)
	*x = slot{place: uint16(u & (1<<s.slotShift - 1))}
	return x
}

// block returns the block that begins at addr, or nothing.
func (s *segment) block(addr uint64) block {
	u := uint32((addr - s.addr) / unit)
	page := s.slots[u>>s.pageShift]
	if page == nil || (addr-s.addr)%unit != 0 {
		return block{}
	}
	x := &page[u>>s.slotShift&s.mask]
	if x.size == 0 || uint32(x.place&placeMask) != u&(1<<s.slotShift-1) {
		return block{}
	}
	return block{s, u}
}

// holding returns the block that addr lies in. It looks at one block after the
// other: it is for calls that are rare.
func (s *segment) holding(addr uint64) block {
	b := block{s, 0}
	for b.end() <= addr {
		b = b.next()
	}
	return b
}

// each calls fn for all blocks in order.
func (s *segment) each(fn func(block)) {
	for b := (block{s, 0}); !b.nothing(); b = b.next() {
		fn(b)
	}
}

// idle says whether nobody has or may use any of the segment, so that it can go
// back where it came from.
func (s *segment) idle() bool {
	x := s.slot(0)
	return x.size == s.units && x.free()
}

// key orders the blocks of one size: first by segment, then by address. Small
// segments come in the order of their numbers and large ones in the opposite
// order: that is how CUDA lays them out on an empty H200, so that a program places
// its blocks as under PyTorch, and in the same way on every machine.
func (b block) key() uint64 {
	n := b.s.number
	if b.s.kind == large {
		n = ^n
	}
	return uint64(n)<<32 | uint64(b.u)
}

// block undoes key.
func (d *domain) block(k kind, key uint64) block {
	n := uint32(key >> 32)
	if k == large {
		n = ^n
	}
	return block{d.segments[n], uint32(key)}
}

// enter gives a segment the lowest number that is not taken.
func (d *domain) enter(s *segment) {
	for i, o := range d.segments {
		if o == nil {
			s.number, d.segments[i] = uint32(i), s
			return
		}
	}
	s.number = uint32(len(d.segments))
	d.segments = append(d.segments, s)
}
