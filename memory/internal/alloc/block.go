package alloc

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

// isFree reports whether the block is free: it is on a shelf or is a hole.
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
