package alloc

import "math"

// A pocket holds the last freed block, unmerged: programs often request the same size
// again at once, and then neither a merge nor a split is necessary. The block in the
// pocket counts as free, and every other access to the state empties the pocket. The
// block is allocated only if the best fit would have returned the same address.

// fitted caches the properties of the block in the pocket. They are valid while the
// shelf does not change, so they stay valid while one size is freed and allocated
// again.
type fitted struct {
	b       block
	size    uint32 // units
	changes uint64 // of the shelf
	alone   bool   // the block before it is not free
	parts   int64  // how much InactiveSplit would grow if the block were shelved; -1 means not at all
	asked   bool   // fits is valid
	fits    bool   // a request of its size would get it
}

// pocketed puts a freed block into the pocket, which is empty, if the block may wait
// there.
func (a *Arena) pocketed(b block, x *slot, s *Settings) bool {
	if a.pool.base != nil || a.stream == nil || a.pool.closed.Load() || s.MaxSplit != math.MaxUint64 || !a.pocketPays() {
		return false
	}
	f := &a.pocketOK
	if f.b != b || f.size != x.size || f.changes != a.shelves[b.s.kind].changes {
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
	a.pocket = b
	return true
}

// pocketPays reports whether to try the pocket: always while it is useful, and
// sometimes while it is not.
func (a *Arena) pocketPays() bool {
	a.missed++
	return a.missed < 8 || a.missed%16 == 0
}

// fit examines the neighbors of a freed block.
func (a *Arena) fit(b block, x *slot) fitted {
	f := fitted{b: b, size: x.size, changes: a.shelves[b.s.kind].changes, alone: !shelved(b.ahead(x)), parts: 1}
	units := x.size
	if n := b.behind(x); shelved(n) {
		units += n.slot().size
		f.parts = 0
	}
	if b.s.span != nil || units == b.s.units {
		f.parts = -1
	}
	return f
}

// fits reports whether a request of the block's size would get it: after a merge with
// the next block it must be a better fit than any block on the shelf.
func (a *Arena) fits(b block) bool {
	shelf, x := &a.shelves[b.s.kind], b.slot()
	size := uint64(x.size) * unit
	joined := entry{size, b.key()}
	best, ok := shelf.best(size)
	if n := b.behind(x); shelved(n) {
		joined.size += n.size()
		if ok && best.key == n.key() {
			best, ok = shelf.after(best)
		}
	}
	return !ok || joined.before(&best)
}

// shelved reports whether a block, which may be nothing, is on a shelf.
func shelved(b block) bool {
	if b.nothing() {
		return false
	}
	x := b.slot()
	return x.isFree() && !x.has(isHole)
}

// emptyPocket moves the block in the pocket to its shelf.
func (a *Arena) emptyPocket() {
	if b := a.pocket; !b.nothing() {
		a.pocket = block{}
		b.slot().place &^= isPending
		a.shelve(b)
	}
}

// fromPocket reports whether a request for size bytes gets the block in the pocket.
func (a *Arena) fromPocket(size uint64) bool {
	f := &a.pocketOK
	if uint64(f.size)*unit != size {
		return false
	}
	if !f.asked {
		f.asked, f.fits = true, a.fits(f.b)
	}
	return f.fits
}

// handPocket allocates the block in the pocket. The domain is locked.
func (a *Arena) handPocket(b block, size, requested uint64, stack *Stack) uint64 {
	a.pocket, a.missed = block{}, 0
	x := b.slot()
	x.place &^= isPending
	return a.lend(b, x, size, requested, stack)
}
