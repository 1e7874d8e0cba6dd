package alloc

import (
	"math"
	"math/bits"
)

// A freeList has the free blocks of one arena and kind, and finds the best block for a
// request: the smallest block that is large enough, and among equal ones the first by
// segment and address.
//
// Each small size has its own list. Larger sizes have sixteen lists between two powers
// of two, so that most lists have a single block. One bit per list says whether the
// list has blocks, and one bit per word of these bits says whether the word is not
// zero.
type freeList struct {
	lists    []list // nil before the first block
	words    [classWords]uint64
	top      uint64
	searches uint64 // number of searches
	changes  uint64 // number of changes
}

const (
	exactClasses = smallMost / unit // of 1, 2, 3... units
	octaves      = 47 - 20          // above them, up to addressEnd
	classes      = exactClasses + 16*octaves
	classWords   = (classes + 63) / 64 // at most 64, the bits of top
)

// class returns the index of the list for a size.
func class(size uint64) int {
	if size <= smallMost {
		return int(size/unit) - 1
	}
	octave := bits.Len64(size) - 1
	part := int(size >> (octave - 4) & 15)
	return min(exactClasses+16*(octave-20)+part, classes-1)
}

func (s *freeList) add(b block) {
	x := b.slot()
	s.put(entry{uint64(x.size) * unit, b.key()})
	x.setOver(s.searches)
}

func (s *freeList) remove(b block) { s.drop(entry{b.size(), b.key()}) }

// put adds an entry.
func (s *freeList) put(e entry) {
	if s.lists == nil {
		s.lists = make([]list, classes)
	}
	s.changes++
	c := class(e.size)
	s.lists[c].insert(e)
	s.words[c/64] |= 1 << (c % 64)
	s.top |= 1 << (c / 64)
}

// drop removes an entry.
func (s *freeList) drop(e entry) {
	s.changes++
	c := class(e.size)
	s.lists[c].remove(e)
	if !s.lists[c].empty() {
		return
	}
	if s.words[c/64] &^= 1 << (c % 64); s.words[c/64] == 0 {
		s.top &^= 1 << (c / 64)
	}
}

// swap replaces an entry, which may be empty, by another one, which often belongs at the
// same place.
func (s *freeList) swap(old, e entry) {
	if old.size == 0 {
		s.put(e)
		return
	}
	if c := class(old.size); c == class(e.size) && s.lists[c].replace(old, e) {
		s.changes++
		return
	}
	s.drop(old)
	s.put(e)
}

// age returns the number of searches since the block became free.
func (s *freeList) age(b block) uint64 { return s.searches - b.slot().over47() }

// best returns the best entry of at least size bytes.
func (s *freeList) best(size uint64) (e entry, ok bool) {
	s.searches++
	if s.top == 0 {
		return entry{}, false
	}
	c := class(size)
	if s.words[c/64]&(1<<(c%64)) != 0 {
		if e, ok := s.lists[c].least(size); ok {
			return e, true
		}
	}
	if c = s.following(c); c < 0 {
		return entry{}, false
	}
	return s.lists[c].first(), true
}

// after returns the entry after e.
func (s *freeList) after(e entry) (next entry, ok bool) {
	c := class(e.size)
	if next, ok := s.lists[c].after(e); ok {
		return next, true
	}
	if c = s.following(c); c < 0 {
		return entry{}, false
	}
	return s.lists[c].first(), true
}

// following returns the first class after c that has blocks, or -1.
func (s *freeList) following(c int) int {
	w := c / 64
	if later := s.words[w] & (^uint64(1) << (c % 64)); later != 0 {
		return w*64 + bits.TrailingZeros64(later)
	}
	words := s.top & (^uint64(1) << w)
	if words == 0 {
		return -1
	}
	w = bits.TrailingZeros64(words)
	return w*64 + bits.TrailingZeros64(s.words[w])
}

// from returns the entries of at least size bytes, sorted by size.
func (s *freeList) from(size uint64) (list []entry) {
	if s.lists == nil {
		return nil
	}
	for c := class(size); c >= 0; c = s.following(c) {
		for _, e := range s.lists[c].all() {
			if e.size >= size {
				list = append(list, e)
			}
		}
	}
	return list
}

// largest returns the bytes of the largest block, or 0.
func (s *freeList) largest() uint64 {
	if s.top == 0 {
		return 0
	}
	w := bits.Len64(s.top) - 1
	return s.lists[w*64+bits.Len64(s.words[w])-1].last().size
}

// blocks returns the free blocks of a kind of at least size bytes, sorted by size.
func (a *Arena) blocks(k kind, size uint64) (list []block) {
	for _, e := range a.freeLists[k].from(size) {
		list = append(list, a.domain.block(k, e.key))
	}
	return list
}

// The field lastFreed is the last freed block, unmerged, because programs often request the same size
// again at once, and then neither a merge nor a split is necessary. The block in the
// lastFreed counts as free, and every other access to the state empties lastFreed. The
// block is allocated only if the best fit would have returned the same address.

// fitted caches the properties of the block in lastFreed. They are valid while the
// freeList does not change, so they stay valid while one size is freed and allocated
// again.
type fitted struct {
	b       block
	size    uint32 // units
	changes uint64 // of the freeList
	alone   bool   // the block before it is not free
	parts   int64  // how much InactiveSplit would grow if the block were inFreeList; -1 means not at all
	asked   bool   // fits is valid
	fits    bool   // a request of its size would get it
}

// keepLastFreed puts a freed block into lastFreed, which is empty, if the block may wait
// there.
func (a *Arena) keepLastFreed(b block, x *slot, s *Settings) bool {
	if a.pool.base != nil || a.stream == nil || a.pool.closed.Load() || s.MaxSplit != math.MaxUint64 || !a.lastFreedPays() {
		return false
	}
	f := &a.lastFreedOK
	if f.b != b || f.size != x.size || f.changes != a.freeLists[b.s.kind].changes {
		*f = a.fit(b, x)
	}
	if !f.alone {
		return false
	}
	// Shelve the block if it could make a new peak of InactiveSplit, so that the peak
	// is counted.
	m, k := &a.domain.meter, b.s.kind
	if f.parts >= 0 && (m.near(k, InactiveSplit, f.parts) || m.near(k, InactiveSplitBytes, int64(x.size)*unit)) {
		return false
	}
	a.lastFreed = b
	return true
}

// lastFreedPays reports whether to try lastFreed: always while it is useful, and
// sometimes while it is not.
func (a *Arena) lastFreedPays() bool {
	a.missed++
	return a.missed < 8 || a.missed%16 == 0
}

// fit examines the neighbors of a freed block.
func (a *Arena) fit(b block, x *slot) fitted {
	f := fitted{b: b, size: x.size, changes: a.freeLists[b.s.kind].changes, alone: !inFreeList(b.ahead(x)), parts: 1}
	units := x.size
	if n := b.behind(x); inFreeList(n) {
		units += n.slot().size
		f.parts = 0
	}
	if b.s.span != nil || units == b.s.units {
		f.parts = -1
	}
	return f
}

// fits reports whether a request of the block's size would get it: after a merge with
// the next block it must be a better fit than any block in the free list.
func (a *Arena) fits(b block) bool {
	freeList, x := &a.freeLists[b.s.kind], b.slot()
	size := uint64(x.size) * unit
	joined := entry{size, b.key()}
	best, ok := freeList.best(size)
	if n := b.behind(x); inFreeList(n) {
		joined.size += n.size()
		if ok && best.key == n.key() {
			best, ok = freeList.after(best)
		}
	}
	return !ok || joined.before(&best)
}

// inFreeList reports whether a block, which may be nothing, is in a free list.
func inFreeList(b block) bool {
	if b.nothing() {
		return false
	}
	x := b.slot()
	return x.isFree() && !x.has(isHole)
}

// flushLastFreed moves the block in lastFreed to its freeList.
func (a *Arena) flushLastFreed() {
	if b := a.lastFreed; !b.nothing() {
		a.lastFreed = block{}
		b.slot().place &^= isPending
		a.insertFree(b)
	}
}

// fromLastFreed reports whether a request for size bytes gets the block in lastFreed.
func (a *Arena) fromLastFreed(size uint64) bool {
	f := &a.lastFreedOK
	if uint64(f.size)*unit != size {
		return false
	}
	if !f.asked {
		f.asked, f.fits = true, a.fits(f.b)
	}
	return f.fits
}

// splitLastFreed allocates the block in lastFreed. The domain is locked.
func (a *Arena) splitLastFreed(b block, size, requested uint64, stack *Stack) uint64 {
	a.lastFreed, a.missed = block{}, 0
	x := b.slot()
	x.place &^= isPending
	return a.markAllocated(b, x, size, requested, stack)
}

// The sizes of torch's allocator.
const (
	unit         = 512      // every block size is a multiple of it
	smallMost    = 1 << 20  // largest block in a small segment
	smallSegment = 2 << 20  //
	largeSegment = 20 << 20 // for blocks that are not huge, unless the settings say otherwise
	hugeLeast    = 10 << 20 // smallest block with its own segment
	hugeRound    = 2 << 20
	absurd       = 1 << 60           // larger requests fail
	segmentMost  = 2<<40 - hugeRound // so that the number of units fits
)

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }

// kind says which kind of segment a block comes from.
type kind uint8

const (
	small kind = iota
	large
	kinds
)

// kindOf returns the kind of a rounded size.
func kindOf(size uint64) kind {
	if size <= smallMost {
		return small
	}
	return large
}

// round returns the block size for a request.
func (s *Settings) round(n uint64) uint64 {
	if n < unit {
		return unit
	}
	// Index 0 of the table is 1 MiB.
	d := s.Divisions[min(max(bits.Len64(n)-21, 0), len(s.Divisions)-1)]
	if d > 1 && n > unit*d {
		return nextDivision(n, d)
	}
	return roundUp(n, unit)
}

// nextDivision rounds n up to the next of d steps between two powers of two.
func nextDivision(n, d uint64) uint64 {
	if powerOfTwo(n) {
		return n
	}
	floor := uint64(1) << (bits.Len64(n) - 1)
	step := floor / d
	if step == 0 {
		return floor * 2
	}
	return roundUp(n, step)
}

// segment returns the size of a new segment for a rounded size.
func (s *Settings) segment(size uint64) uint64 {
	switch {
	case size <= smallMost:
		return smallSegment
	case size < hugeLeast:
		return s.LargeSegment
	}
	return roundUp(size, hugeRound)
}
