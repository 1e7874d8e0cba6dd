package alloc

import "math"

// A pocket has the block that came back last, as it is: programs often want the
// same size again at once, and then neither joining nor splitting was needed. What
// is in the pocket counts as free, and every look at the books empties it; it is
// handed out only where the best fit would have given the same addresses.

// pocketed puts a block that came back into the pocket, if it may wait there.
func (a *Arena) pocketed(b block) bool {
	b.slot().place |= isPending // and so nobody joins it
	a.emptyPocket()
	if a.pool.base != nil || a.device.settings.Load().MaxSplit != math.MaxUint64 || shelved(b.prev()) || a.wouldPeak(b) {
		return false
	}
	a.pocket = b
	return true
}

// shelved says whether a block, or nothing, is on a shelf.
func shelved(b block) bool { return !b.nothing() && b.slot().free() && !b.slot().has(isHole) }

// wouldPeak says whether the segments had more free parts than ever before if the
// block were joined with the one behind: that must not be missed.
func (a *Arena) wouldPeak(b block) bool {
	size, parts := b.size(), int64(1)
	if n := b.next(); shelved(n) {
		size += n.size()
		parts = 0
	}
	if b.s.span != nil || size == b.s.size() {
		return false
	}
	m := &a.domain.meter
	return m.near(b.s.kind, InactiveSplit, parts) || m.near(b.s.kind, InactiveSplitBytes, int64(b.size()))
}

// emptyPocket shelves what the pocket has.
func (a *Arena) emptyPocket() {
	if b := a.pocket; !b.nothing() {
		a.pocket = block{}
		b.slot().place &^= isPending
		a.shelve(b)
	}
}

// fromPocket returns the block in the pocket if a request for size bytes gets
// it, and otherwise empties the pocket.
func (a *Arena) fromPocket(size uint64) block {
	b := a.pocket
	if b.nothing() {
		return b
	}
	if b.size() == size && a.fitsAsBefore(b, size) {
		a.pocket = block{}
		return b
	}
	a.emptyPocket()
	return block{}
}

// fitsAsBefore says whether the block in the pocket, joined with its neighbours, is
// the best for a request of its size, and its beginning the same.
func (a *Arena) fitsAsBefore(b block, size uint64) bool {
	if shelved(b.prev()) {
		return false
	}
	shelf := &a.shelves[b.s.kind]
	best, ok := shelf.best(size)
	joined := entry{size, b.key()}
	if n := b.next(); shelved(n) {
		joined.size += n.size()
		if ok && best.key == n.key() {
			best, ok = shelf.after(best)
		}
	}
	return !ok || joined.before(best)
}
