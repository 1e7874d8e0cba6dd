package alloc

import "math"

// An Arena allocates memory in the order of one stream. It reuses freed memory at once,
// because the stream's later operations run after the earlier ones. Its methods may be
// called by several goroutines.
type Arena struct {
	device *Device
	pool   *Pool
	domain *domain
	stream Stream // nil if the stream has ended, and for the base of a pool
	ended  Event  // after the last operation of the stream, or nil if that has completed
	lost   error  // why the end of the operations is unknown
	audits bool
	owed   []piece // freed after the stream ended, and not yet reported to the auditor

	shelves  [kinds]shelf
	pocket   block
	pocketOK fitted
	missed   uint       // frees since the pocket was last useful
	segments []*segment // from a Source, allocated for this arena
	spans    [kinds]*segment
	waiting  waiting
}

// Alloc returns the address of at least n bytes, n > 0, for use in the order of the
// arena's stream.
func (a *Arena) Alloc(n uint64) (addr uint64, err error) {
	d := a.device
	stack := d.stackOf()
	if n >= absurd {
		return 0, &NoMemoryError{Requested: n}
	}
	s := d.settings.Load()
	size := s.round(n)
	k := kindOf(size)
	a.domain.mu.Lock()
	if a.waiting.any() {
		a.collect()
	}
	if p := a.pocket; p.s != nil {
		if a.fromPocket(size) {
			addr = a.handPocket(p, size, n, stack)
			d.unlockDomain(a.domain)
			return addr, nil
		}
		a.emptyPocket()
	}
	b := a.bestFree(s, k, size)
	if b.nothing() {
		a.domain.mu.Unlock()
		if b, err = a.grow(s, k, size); err != nil {
			return 0, err
		}
		if b.s.domain != a.domain {
			a = b.arena() // of a pool with PoolConfig.Spare
		}
	}
	addr = a.hand(s, b, size, n, stack)
	d.unlockDomain(a.domain)
	return addr, nil
}

// bestFree returns the best free block and leaves it on its shelf, or nothing.
func (a *Arena) bestFree(s *Settings, k kind, size uint64) block {
	if a.pool.closed.Load() || a.stream == nil {
		return block{} // grow returns the error
	}
	b := a.pick(s, k, size)
	if b.nothing() && a.pool.base != nil {
		b = a.pool.base.pick(s, k, size)
	}
	return b
}

// pick returns the best block on the arena's own shelves.
func (a *Arena) pick(s *Settings, k kind, size uint64) block {
	e, ok := a.shelves[k].best(size)
	if !ok {
		return block{}
	}
	b := a.domain.block(k, e.key)
	if s.MaxSplit != math.MaxUint64 && !s.suits(b, size) {
		return block{}
	}
	return b
}

// suits prevents small requests from using unsplittable huge blocks.
func (s *Settings) suits(b block, size uint64) bool {
	if size < s.MaxSplit {
		return b.size() < s.MaxSplit || b.s.span != nil
	}
	return b.size() < size+s.MaxNonSplitRounding || b.s.span != nil
}

// worthSplitting reports whether the rest of a block after a request is kept as a
// block.
func (a *Arena) worthSplitting(s *Settings, g *segment, rest, size uint64) bool {
	switch {
	case a.pool.noSplit:
		return false
	case g.kind == small:
		return rest >= unit
	}
	return rest > smallMost && (size < s.MaxSplit || g.span != nil)
}

// hand allocates the first size bytes of a block that is on a shelf. The domain is
// locked.
func (a *Arena) hand(s *Settings, b block, size, requested uint64, stack *Stack) uint64 {
	k, m, x := b.s.kind, &a.domain.meter, b.slot()
	shelf := &a.shelves[k]
	if x.place&isMoved != 0 || b.s.home != a {
		shelf = &b.arena().shelves[k]
	}
	counts := b.s.span == nil // torch does not count expandable segments here
	wasSplit := x.size != b.s.units
	e := entry{uint64(x.size) * unit, b.key()}
	if a.worthSplitting(s, b.s, e.size-size, size) {
		rest := b.cut(size)
		shelf.swap(e, entry{e.size - size, e.key + size/unit})
		rest.slot().setOver(shelf.searches)
		switch {
		case counts && wasSplit:
			m.down(k, InactiveSplitBytes, int64(size))
		case counts:
			m.up(k, InactiveSplit, 1)
			m.up(k, InactiveSplitBytes, int64(e.size-size))
		}
	} else {
		shelf.drop(e)
		size = e.size
		if counts && wasSplit {
			m.down(k, InactiveSplit, 1)
			m.down(k, InactiveSplitBytes, int64(size))
		}
	}
	if a.pool.base != nil {
		b.setArena(a)
	}
	addr := a.lend(b, x, size, requested, stack)
	if size >= s.MaxSplit {
		x.over |= isOversize
		a.device.oversize.up(&a.device.oversize.blocks)
	}
	return addr
}

// lend completes every allocation.
func (a *Arena) lend(b block, x *slot, size, requested uint64, stack *Stack) uint64 {
	addr := b.addr()
	x.place |= isUsed
	x.setOver(size - requested)
	if stack != nil {
		b.keep().stack = stack
	}
	a.domain.meter.lend(b.s.kind, int64(size), int64(requested))
	if a.audits {
		a.device.cfg.Auditor.Lend(a.stream, addr, size)
	}
	a.device.note(ActionAlloc, addr, requested, a, stack)
	return addr
}

// give frees a used block. The domain is locked. If other streams may still use the
// block, give returns a batch, which the caller passes to postpone.
func (a *Arena) give(b block, x *slot) *batch {
	d, k, size := a.device, b.s.kind, uint64(x.size)*unit
	s := d.settings.Load()
	if x.over&isOversize != 0 {
		x.over &^= isOversize
		d.oversize.down(&d.oversize.blocks)
	}
	d.note(ActionFreeRequested, b.addr(), x.requested(), a, d.stackOf())
	x.place &^= isUsed
	if x.has(isRecorded) {
		if users, captured := b.dropUsers(); len(users)+len(captured) > 0 {
			a.domain.meter.giveBack(k, int64(size))
			x.place |= isPending
			t := newBatch(b, users, captured)
			if len(captured) == 0 {
				return t
			}
			a.waiting.add(t) // until the capture has ended; Rejoin then drops it under this lock
			return nil
		}
	}
	a.domain.meter.giveBack(k, int64(size))
	a.put(b, x, s)
	return nil
}

// put makes a block free. No stream uses it any more.
func (a *Arena) put(b block, x *slot, s *Settings) {
	if p := a.pool; p.base != nil && !p.capturing {
		a = p.base
		b.setArena(a)
	}
	if x.has(isRecorded) {
		b.dropRecord()
	}
	size, requested := uint64(x.size)*unit, x.requested()
	a.domain.meter.retire(b.s.kind, int64(size), int64(requested))
	a.device.note(ActionFreeCompleted, b.addr(), requested, a, nil)
	if a.audits {
		a.giveAuditor(b.addr(), size)
	}
	x.place |= isPending // so that no neighbor merges with it
	if !a.pocket.nothing() {
		a.emptyPocket()
	}
	if a.pocketed(b, x, s) {
		return
	}
	x.place &^= isPending
	a.shelve(b)
}

// shelve merges a free block with its free neighbors and puts it on its shelf.
func (a *Arena) shelve(b block) {
	if b.s.slots != nil && a.pool.base == nil {
		a.shelvePlain(b)
		return
	}
	k, m := b.s.kind, &a.domain.meter
	b, joined, bytes := a.join(b)
	a.shelves[k].add(b)
	if b.s.span != nil {
		return
	}
	blocks, change := -int64(joined), -int64(bytes)
	if x := b.slot(); x.size != b.s.units {
		blocks++
		change += int64(x.size) * unit
	}
	m.change(k, InactiveSplit, blocks)
	m.change(k, InactiveSplitBytes, change)
}

// shelvePlain is shelve for a segment without holes and with blocks of one arena only.
// It does the same in one pass, because every free of a program comes here.
func (a *Arena) shelvePlain(b block) {
	s, shelf, m := b.s, &a.shelves[b.s.kind], &a.domain.meter
	x := s.slot(b.u)
	parts, units := int64(1), int64(x.size) // the increase of InactiveSplit and InactiveSplitBytes
	var old entry                           // the neighbor's entry, which the merged block replaces
	if x.back != 0 {
		p := block{s, b.u - x.back}
		if y := s.slot(p.u); y.place&(isUsed|isPending) == 0 {
			old = entry{uint64(y.size) * unit, p.key()}
			y.size += x.size
			*x = slot{}
			b, x = p, y
			parts--
		}
	}
	if n := b.behind(x); n.s != nil {
		if y := s.slot(n.u); y.place&(isUsed|isPending) == 0 {
			if old.size > 0 {
				shelf.drop(old)
			}
			old = entry{uint64(y.size) * unit, n.key()}
			x.size += y.size
			*y = slot{}
			parts--
			n = b.behind(x)
		}
		if n.s != nil {
			s.slot(n.u).back = x.size
		}
	}
	if x.size == s.units { // the neighbors were free parts, the whole segment is not
		parts, units = parts-1, units-int64(x.size)
	}
	shelf.swap(old, entry{uint64(x.size) * unit, b.key()})
	x.setOver(shelf.searches)
	m.change(s.kind, InactiveSplit, parts)
	m.change(s.kind, InactiveSplitBytes, units*unit)
}

// join merges b, which is on no shelf, with its free neighbors. It returns the number
// of neighbors and their bytes.
func (a *Arena) join(b block) (whole block, joined int, bytes uint64) {
	if p := b.prev(); p.joins(b) {
		bytes, joined = p.size(), 1
		a.pull(p)
		p.swallow(b)
		b = p
	}
	if n := b.next(); b.joins(n) {
		bytes, joined = bytes+n.size(), joined+1
		a.pull(n)
		b.swallow(n)
	}
	return b, joined, bytes
}

// pull removes a free block from its shelf or from the holes.
func (a *Arena) pull(b block) {
	if b.slot().has(isHole) {
		b.s.span.fill(b)
		return
	}
	a.shelves[b.s.kind].remove(b)
}
