package alloc

import "math"

// A pocket has the block that came back last, as it is: programs often want the
// same size again at once, and then neither joining nor splitting was needed. What
// is in the pocket counts as free, and every look at the books empties it; it is
// handed out only where the best fit would have given the same addresses.

// fitted remembers what was found about the block in the pocket: it holds while the
// shelf does not change, and so all the time when the same size comes and goes.
type fitted struct {
	b       block
	size    uint32 // units
	changes uint64 // of the shelf
	alone   bool   // the block before it is not free
	parts   int64  // how many more free parts of segments there were if it were shelved; -1 is none and no bytes
	asked   bool   // whether fits is known
	fits    bool   // a request of its size gets it
}

// pocketed puts a block that came back into the pocket, which is empty, if it may
// wait there.
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
	// If there were more free parts of segments than ever before, that must not be
	// missed.
	m, k := &a.domain.meter, b.s.kind
	if f.parts >= 0 && (m.near(k, InactiveSplit, f.parts) || m.near(k, InactiveSplitBytes, int64(x.size)*unit)) {
		return false
	}
	a.pocket = b
	return true
}

// pocketPays says whether to try the pocket: always while it is of use, and now and
// then while it is not.
func (a *Arena) pocketPays() bool {
	a.missed++
	return a.missed < 8 || a.missed%16 == 0
}

// fit looks at the blocks beside one that came back.
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

// fits says whether a request of the size of the block in the pocket gets it: none
// that is on the shelf is better than it joined with the one behind.
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

// shelved says whether a block, or nothing, is on a shelf.
func shelved(b block) bool {
	if b.nothing() {
		return false
	}
	x := b.slot()
	return x.free() && !x.has(isHole)
}

// emptyPocket shelves what the pocket has.
func (a *Arena) emptyPocket() {
	if b := a.pocket; !b.nothing() {
		a.pocket = block{}
		b.slot().place &^= isPending
		a.shelve(b)
	}
}

// fromPocket says whether a request for size bytes gets the block in the pocket.
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

// handPocket gives the block in the pocket to a caller. The domain is locked.
func (a *Arena) handPocket(b block, size, requested uint64, stack *Stack) uint64 {
	a.pocket, a.missed = block{}, 0
	x := b.slot()
	x.place &^= isPending
	return a.lend(b, x, size, requested, stack)
}
