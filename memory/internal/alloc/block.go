package alloc

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// A block is a piece of a segment that begins at unit u. A slot of the segment
// describes it, so that the previous and next blocks are found by arithmetic and are
// close in the processor's cache. The lock of the segment's domain guards it.
type block struct {
	s *segment
	u uint32
}

// A slot describes the block that begins there, if size is not 0. It has no pointers,
// so the garbage collector does not scan it.
type slot struct {
	size  uint32 // units
	back  uint32 // units of the previous block, or 0 for the first block
	place uint16 // the low bits of the block's start, and flags
	over  uint16 // size minus requested bytes, for a used block: the high bits, and isOversize
	under uint32 // the low bits of the same number
}

// The flags of slot.place, above the bits of the largest shift.
const (
	isUsed     uint16 = 1 << (11 + iota) // in use by a caller
	isPending                            // freed, but streams other than the arena's may still use it
	isHole                               // of an expandable segment: not mapped
	isRecorded                           // domain.records has an entry for the block
	isMoved                              // domain.moved has the block's arena; it is not the segment's home

	placeMask = isUsed - 1
)

// isOversize, a flag of slot.over, marks a block that was counted as oversize.
const isOversize uint16 = 1 << 15

func (b block) slot() *slot { return b.s.slot(b.u) }

func (b block) addr() uint64 { return b.s.addr + uint64(b.u)*unit }
func (b block) size() uint64 { return uint64(b.slot().size) * unit }
func (b block) end() uint64  { return b.addr() + b.size() }

// isFree reports whether the block is free: it is in a free list or is a hole.
func (x *slot) isFree() bool { return x.size != 0 && x.place&(isUsed|isPending) == 0 }

func (x *slot) has(flag uint16) bool { return x.place&flag != 0 }

func (x *slot) over47() uint64 { return uint64(x.over&^isOversize)<<32 | uint64(x.under) }

func (x *slot) setOver(n uint64) { x.over, x.under = uint16(n>>32), uint32(n) }

// requested returns the requested size of a used block.
func (x *slot) requested() uint64 { return uint64(x.size)*unit - x.over47() }

func (b block) nothing() bool { return b.s == nil }

// next returns the next block, or nothing.
func (b block) next() block { return b.behind(b.slot()) }

// behind is next for a caller that already has the slot.
func (b block) behind(x *slot) block {
	if u := b.u + x.size; u < b.s.units {
		return block{b.s, u}
	}
	return block{}
}

// prev returns the previous block, or nothing.
func (b block) prev() block { return b.ahead(b.slot()) }

// ahead is prev for a caller that already has the slot.
func (b block) ahead(x *slot) block {
	if x.back != 0 {
		return block{b.s, b.u - x.back}
	}
	return block{}
}

// split reports whether the block is only a part of its segment.
func (b block) split() bool { return b.slot().size != b.s.units }

// arena returns the arena that owns the block, also while a caller uses it.
func (b block) arena() *Arena {
	if b.slot().has(isMoved) {
		return b.s.domain.moved[b]
	}
	return b.s.home
}

// setArena sets the arena that owns the block.
func (b block) setArena(a *Arena) {
	x := b.slot()
	switch {
	case a != b.s.home:
		x.place |= isMoved
		b.s.domain.move(b, a)
	case x.has(isMoved):
		x.place &^= isMoved
		delete(b.s.domain.moved, b)
	}
}

// joins reports whether b and o, which are neighbors, must be merged when both are
// free.
func (b block) joins(o block) bool {
	if b.nothing() || o.nothing() {
		return false
	}
	x, y := b.slot(), o.slot()
	const unlike = isUsed | isPending | isHole
	if x.place&(isUsed|isPending) != 0 || (x.place^y.place)&unlike != 0 {
		return false
	}
	return (x.place|y.place)&isMoved == 0 || b.arena() == o.arena()
}

// cut shortens b to its first n bytes and returns the rest, which has the same state.
func (b block) cut(n uint64) block {
	x, units := b.slot(), uint32(n/unit)
	rest := block{b.s, b.u + units}
	y := b.s.make(rest.u)
	y.size, y.back = x.size-units, units
	y.place |= x.place & (isUsed | isPending | isHole)
	x.size = units
	if o := rest.behind(y); !o.nothing() {
		o.slot().back = y.size
	}
	if x.has(isMoved) {
		rest.setArena(b.arena())
	}
	return rest
}

// swallow merges o, the next block, into b.
func (b block) swallow(o block) {
	x, y := b.slot(), o.slot()
	x.size += y.size
	if y.has(isMoved) {
		delete(b.s.domain.moved, o)
	}
	*y = slot{}
	if n := b.behind(x); !n.nothing() {
		n.slot().back = x.size
	}
}

// A program with many small blocks accesses slots all over their memory. In ordinary pages
// each access would also miss the TLB. Therefore pages of slots are allocated from memory
// that asks the kernel for huge pages. A page is reused
// after the garbage collector has found that its segment is unreachable.
var slabs struct {
	mu   sync.Mutex
	free []*[slotPage]slot
	rest []byte // of the last chunk
}

const (
	slabChunk    = 16 << 20
	slotPageSize = slotPage * unsafe.Sizeof(slot{})
)

// newSlotPage returns a page of slots for a segment; a cleanup of the segment frees it.
func newSlotPage(s *segment) []slot {
	p := takeSlotPage()
	if p == nil {
		return make([]slot, slotPage)
	}
	runtime.AddCleanup(s, giveSlotPage, p)
	return p[:]
}

// takeSlotPage returns zeroed slots, or nil if the system has no memory.
func takeSlotPage() *[slotPage]slot {
	slabs.mu.Lock()
	defer slabs.mu.Unlock()
	if n := len(slabs.free); n > 0 {
		p := slabs.free[n-1]
		slabs.free = slabs.free[:n-1]
		clear(p[:])
		return p
	}
	if len(slabs.rest) == 0 {
		chunk, err := syscall.Mmap(-1, 0, slabChunk, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		if err != nil {
			return nil
		}
		_ = syscall.Madvise(chunk, syscall.MADV_HUGEPAGE) // without huge pages it is only slower
		slabs.rest = chunk
	}
	p := (*[slotPage]slot)(unsafe.Pointer(&slabs.rest[0]))
	slabs.rest = slabs.rest[slotPageSize:]
	return p
}

func giveSlotPage(p *[slotPage]slot) {
	slabs.mu.Lock()
	defer slabs.mu.Unlock()
	slabs.free = append(slabs.free, p)
}

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

// add registers [addr, addr+n) for the segment. Readers need no lock, but only
// one goroutine at a time may add or remove.
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

// A list has free blocks sorted by size and key. It keeps them in chunks of limited
// length, so that a search touches few cache lines and a change moves few entries. The
// zero value is an empty list.
type list struct {
	only   chunk   // the only chunk, while chunks is nil
	chunks []chunk // all chunks; none is empty
}

type chunk []entry

// An entry identifies a block.
type entry struct{ size, key uint64 }

// chunkLen is the maximum length of a chunk.
const chunkLen = 64

func (e *entry) before(o *entry) bool { return e.size < o.size || e.size == o.size && e.key < o.key }

// chunk returns the chunk that contains e or would contain it, and its index: the first
// chunk whose last entry is not before e, or the last chunk.
func (l *list) chunk(e entry) (c *chunk, i int) {
	if l.chunks == nil {
		return &l.only, 0
	}
	lo, hi := 0, len(l.chunks)-1
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if c := l.chunks[mid]; c[len(c)-1].before(&e) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return &l.chunks[lo], lo
}

// place returns how many entries of the chunk are before e. The common cases are tested
// first: the first entry, the last entry, and an entry before or after all others.
func (c chunk) place(e entry) int {
	hi := len(c)
	if hi == 0 || !c[0].before(&e) {
		return 0
	}
	if last := &c[hi-1]; last.before(&e) {
		return hi
	} else if *last == e {
		return hi - 1
	}
	lo := 1
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if c[mid].before(&e) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (l *list) empty() bool { return len(l.only) == 0 && l.chunks == nil }

func (l *list) insert(e entry) {
	c, i := l.chunk(e)
	if len(*c) == chunkLen {
		l.divide(i)
		c, _ = l.chunk(e)
	}
	at := c.place(e)
	*c = append(*c, e)
	if at+1 < len(*c) {
		copy((*c)[at+1:], (*c)[at:])
		(*c)[at] = e
	}
}

// divide splits a full chunk into two.
func (l *list) divide(i int) {
	if l.chunks == nil {
		l.chunks, l.only = []chunk{l.only}, nil
	}
	c := l.chunks[i]
	rest := append(make(chunk, 0, chunkLen), c[chunkLen/2:]...)
	l.chunks = slices.Insert(l.chunks, i+1, rest)
	l.chunks[i] = c[:chunkLen/2]
}

func (l *list) remove(e entry) {
	c, i := l.chunk(e)
	at := c.place(e)
	if at+1 < len(*c) {
		copy((*c)[at:], (*c)[at+1:])
	}
	*c = (*c)[:len(*c)-1]
	if len(*c) > 0 || l.chunks == nil {
		return
	}
	if l.chunks = slices.Delete(l.chunks, i, i+1); len(l.chunks) == 1 {
		l.only, l.chunks = l.chunks[0], nil
	}
}

// replace replaces an entry by another one if the order permits it.
func (l *list) replace(old, e entry) bool {
	c, _ := l.chunk(old)
	at := c.place(old)
	if at > 0 && !(*c)[at-1].before(&e) || at+1 < len(*c) && !e.before(&(*c)[at+1]) {
		return false
	}
	if l.chunks != nil && (at == 0 || at+1 == len(*c)) {
		return false // the neighboring chunks would have to be checked too
	}
	(*c)[at] = e
	return true
}

// least returns the first entry of at least size bytes.
func (l *list) least(size uint64) (e entry, ok bool) {
	c, _ := l.chunk(entry{size: size})
	at := c.place(entry{size: size})
	if at == len(*c) {
		return entry{}, false
	}
	return (*c)[at], true
}

// after returns the entry after e.
func (l *list) after(e entry) (next entry, ok bool) {
	c, i := l.chunk(e)
	if at := c.place(e) + 1; at < len(*c) {
		return (*c)[at], true
	}
	if i+1 < len(l.chunks) {
		return l.chunks[i+1][0], true
	}
	return entry{}, false
}

func (l *list) first() entry {
	if l.chunks != nil {
		return l.chunks[0][0]
	}
	return l.only[0]
}

func (l *list) last() entry {
	c := l.only
	if l.chunks != nil {
		c = l.chunks[len(l.chunks)-1]
	}
	return c[len(c)-1]
}

// all returns the entries in order.
func (l *list) all() []entry { return slices.Concat(append([]chunk{l.only}, l.chunks...)...) }

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

// holding returns the block that contains addr, which it finds by walking back
// slot by slot to the start of the block.
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

// removeSegment frees a segment's number for another segment.
func (d *domain) removeSegment(s *segment) {
	d.segments[s.number] = nil
	d.lowest = min(d.lowest, s.number)
}
