package alloc

// A segment is memory of a Source that is divided into contiguous blocks. An expandable
// segment is a range of addresses that is mapped in parts.
type segment struct {
	addr   uint64
	units  uint32
	kind   kind
	number uint32 // index in domain.segments
	home   *Arena // the arena that it was allocated for
	stream Stream // the stream that it was allocated on
	domain *domain
	span   *span // of an expandable segment
	stack  *Stack

	oversize bool // it was counted as oversize
	captured bool // a block in it was freed during a capture

	// The slots by the start of the block: a plain slice, or for expandable segments
	// pages, which are allocated when they are needed.
	slots     []slot
	pages     [][]slot
	slotShift uint8 // shift from a unit to the index of its slot
}

// slotShifts is log2 of the smallest distance between two blocks, in units. In small
// segments a block may begin at each unit, in large ones at each MiB, because every
// block there is larger.
var slotShifts = [kinds]uint8{small: 0, large: 11}

// slotPage is the number of slots in a page, as many as a small segment has.
const slotPage = 4096

func newSegment(a *Arena, k kind, addr, size uint64, expandable bool) *segment {
	s := &segment{addr: addr, units: uint32(size / unit), kind: k, home: a, stream: a.stream, domain: a.domain}
	s.slotShift = slotShifts[k]
	n := (s.units-1)>>s.slotShift + 1
	switch {
	case expandable:
		s.pages = make([][]slot, (n-1)/slotPage+1)
	case n == slotPage:
		s.slots = newSlotPage(s)
	default:
		s.slots = make([]slot, n)
	}
	a.domain.addSegment(s)
	s.make(0).size = s.units
	return s
}

func (s *segment) size() uint64 { return uint64(s.units) * unit }

func (s *segment) has(addr uint64) bool { return addr-s.addr < s.size() }

func (s *segment) slot(u uint32) *slot {
	i := u >> s.slotShift
	if s.slots != nil {
		return &s.slots[i]
	}
	return &s.pages[i/slotPage][i%slotPage]
}

// make returns the slot of a block that will begin at u.
func (s *segment) make(u uint32) *slot {
	if s.slots == nil {
		if page := &s.pages[u>>s.slotShift/slotPage]; *page == nil {
			*page = newSlotPage(s)
		}
	}
	x := s.slot(u)
	*x = slot{place: uint16(u & (1<<s.slotShift - 1))}
	return x
}

// block returns the block that begins at addr, and its slot, or nothing.
func (s *segment) block(addr uint64) (block, *slot) {
	at := addr - s.addr
	u := uint32(at / unit)
	if at%unit != 0 || s.slots == nil && s.pages[u>>s.slotShift/slotPage] == nil {
		return block{}, nil
	}
	x := s.slot(u)
	if x.size == 0 || uint32(x.place&placeMask) != u&(1<<s.slotShift-1) {
		return block{}, nil
	}
	return block{s, u}, x
}

// holding returns the block that contains addr. It walks back slot by slot to the start
// of the block.
func (s *segment) holding(addr uint64) block {
	u := uint32((addr - s.addr) / unit)
	for i := u >> s.slotShift; ; i-- {
		if s.slots == nil && s.pages[i/slotPage] == nil {
			i -= i % slotPage // the first page always exists
			continue
		}
		begin := i << s.slotShift
		x := s.slot(begin)
		if begin |= uint32(x.place & placeMask); x.size != 0 && begin <= u {
			return block{s, begin}
		}
	}
}

// each calls fn for all blocks in order.
func (s *segment) each(fn func(block)) {
	for b := (block{s, 0}); !b.nothing(); b = b.next() {
		fn(b)
	}
}

// idle reports whether the whole segment is unused, so that it can be returned to its
// source.
func (s *segment) idle() bool {
	x := s.slot(0)
	return x.size == s.units && x.isFree()
}

// key orders the blocks of one size: first by segment, then by address. Small segments
// are ordered by increasing number and large ones by decreasing number. CUDA lays them
// out in this order on an empty H200, so a program gets its blocks in the same order as
// under PyTorch, and in the same order on every machine.
func (b block) key() uint64 {
	n := b.s.number
	if b.s.kind == large {
		n = ^n
	}
	return uint64(n)<<32 | uint64(b.u)
}

// block is the inverse of key.
func (d *domain) block(k kind, key uint64) block {
	n := uint32(key >> 32)
	if k == large {
		n = ^n
	}
	return block{d.segments[n], uint32(key)}
}

// addSegment assigns a segment the lowest free number.
func (d *domain) addSegment(s *segment) {
	n := d.lowest
	for int(n) < len(d.segments) && d.segments[n] != nil {
		n++
	}
	if int(n) == len(d.segments) {
		d.segments = append(d.segments, nil)
	}
	s.number, d.segments[n] = n, s
	d.lowest = n + 1
}

// removeSegment makes a segment's number available again.
func (d *domain) removeSegment(s *segment) {
	d.segments[s.number] = nil
	d.lowest = min(d.lowest, s.number)
}
