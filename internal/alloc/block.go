package alloc

// A block is a piece of a segment: it begins at the unit u. What is known of it
// stands in a slot of the segment's, so that the blocks before and behind it are
// found by arithmetic, and lie close by in the processor's cache. The lock of the
// segment's domain guards it.
type block struct {
	s *segment
	u uint32
}

// A slot describes the block that begins there, if size is not 0. It has no
// pointers, so that the garbage collector passes it over.
type slot struct {
	size  uint32 // units
	back  uint32 // units of the block before, or 0 for the first one
	place uint16 // the low bits of where it begins, and flags
	over  uint16 // bytes that were not asked for, of a used block: the high bits, and isOversize
	under uint32 // and the low bits
}

// The flags of a slot's place, above the bits of the largest shift.
const (
	isUsed     uint16 = 1 << (11 + iota) // a caller has it
	isPending                            // it was given back, but other streams than the arena's may still use it
	isHole                               // of an expandable segment: without memory behind it
	isRecorded                           // the domain knows users or a stack
	isMoved                              // the domain knows whose it is, which is not the segment's home

	placeMask = isUsed - 1
)

// isOversize, of a slot's over, says that the block was counted as oversize.
const isOversize uint16 = 1 << 15

func (b block) slot() *slot { return b.s.slot(b.u) }

func (b block) addr() uint64 { return b.s.addr + uint64(b.u)*unit }
func (b block) size() uint64 { return uint64(b.slot().size) * unit }
func (b block) end() uint64  { return b.addr() + b.size() }

// free says whether the arena has it: on a shelf, unless it is a hole.
func (x *slot) free() bool { return x.size != 0 && x.place&(isUsed|isPending) == 0 }

func (x *slot) has(flag uint16) bool { return x.place&flag != 0 }

func (x *slot) over47() uint64 { return uint64(x.over&^isOversize)<<32 | uint64(x.under) }

func (x *slot) setOver(n uint64) { x.over, x.under = uint16(n>>32), uint32(n) }

// requested returns what was asked for of a used block.
func (x *slot) requested() uint64 { return uint64(x.size)*unit - x.over47() }

func (b block) nothing() bool { return b.s == nil }

// next returns the block behind, or nothing.
func (b block) next() block { return b.behind(b.slot()) }

// behind is next where the slot is at hand.
func (b block) behind(x *slot) block {
	if u := b.u + x.size; u < b.s.units {
		return block{b.s, u}
	}
	return block{}
}

// prev returns the block before, or nothing.
func (b block) prev() block { return b.ahead(b.slot()) }

// ahead is prev where the slot is at hand.
func (b block) ahead(x *slot) block {
	if x.back != 0 {
		return block{b.s, b.u - x.back}
	}
	return block{}
}

// split says whether the block is not a segment of its own.
func (b block) split() bool { return b.slot().size != b.s.units }

// arena returns whose block it is, or was before somebody had it.
func (b block) arena() *Arena {
	if b.slot().has(isMoved) {
		return b.s.domain.moved[b]
	}
	return b.s.home
}

// setArena says whose block it is.
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

// joins says whether b and o, which lie side by side, are one block when both are
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

// cut divides b behind its first n bytes and returns the rest, which is as b is.
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

// swallow makes o, the block behind, part of b.
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
