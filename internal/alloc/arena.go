package alloc

import "slices"

// An Arena gives out memory in the order of one stream: what was freed is used
// again at once, because what the stream does with it then comes after all that it
// did with it before. Its methods may be called by several goroutines.
type Arena struct {
	device *Device
	pool   *Pool
	domain *domain
	stream Stream // nil if it has ended, and of the base of a pool
	ended  Event  // behind all that it did
	audits bool

	shelves  [kinds]shelf
	segments []*segment // of a Source, made for this arena
	spans    [kinds]*segment
	waiting  waiting
}

// Alloc returns the address of at least n bytes, n > 0, for use in the order of the
// arena's stream.
func (a *Arena) Alloc(n uint64) (addr uint64, err error) {
	stack := a.device.stackOf()
	if n >= absurd {
		return 0, &NoMemoryError{Requested: n}
	}
	s := a.device.settings.Load()
	size := s.round(n)
	k := kindOf(size)
	a.domain.mu.Lock()
	if a.waiting.due() {
		a.collect(false)
	}
	b := a.find(s, k, size)
	if b == nil {
		a.domain.mu.Unlock()
		if b, err = a.grow(s, k, size); err != nil {
			return 0, err
		}
		if b.arena.domain != a.domain {
			a = b.arena // of a pool that is spare
		}
	}
	addr = a.hand(s, b, size, n, stack)
	a.device.leave(a.domain)
	return addr, nil
}

// find takes the best free block off its shelf, or returns nil.
func (a *Arena) find(s *Settings, k kind, size uint64) *block {
	b := a.shelves[k].best(size)
	if b == nil && a.pool.base != nil {
		b = a.pool.base.shelves[k].best(size)
	}
	if b == nil || !s.suits(b, size) {
		return nil
	}
	b.arena.shelves[k].remove(b)
	return b
}

// suits keeps small requests from huge blocks, which are not split then.
func (s *Settings) suits(b *block, size uint64) bool {
	if size < s.MaxSplit {
		return b.size < s.MaxSplit || b.segment.span != nil
	}
	return b.size < size+s.MaxNonSplitRounding || b.segment.span != nil
}

// worthSplitting says whether what a request leaves of a block is a block.
func (a *Arena) worthSplitting(s *Settings, b *block, size uint64) bool {
	rest := b.size - size
	switch {
	case a.pool.noSplit:
		return false
	case b.segment.kind == small || b.segment.span != nil:
		return rest >= unit
	}
	return size < s.MaxSplit && rest > smallMost
}

// hand gives the first size bytes of a block that is on no shelf to a caller. The
// domain is locked.
func (a *Arena) hand(s *Settings, b *block, size, requested uint64, stack *Stack) uint64 {
	k := b.segment.kind
	m := &a.domain.meter
	counts := b.segment.span == nil // torch leaves expandable segments out of this
	wasSplit := b.split()
	if a.worthSplitting(s, b, size) {
		rest := b.cut(size)
		rest.arena.shelves[k].add(rest)
		switch {
		case counts && wasSplit:
			m.down(k, InactiveSplitBytes, int64(size))
		case counts:
			m.up(k, InactiveSplit, 1)
			m.up(k, InactiveSplitBytes, int64(rest.size))
		}
	} else if counts && wasSplit {
		m.down(k, InactiveSplit, 1)
		m.down(k, InactiveSplitBytes, int64(b.size))
	}
	b.arena, b.state, b.requested, b.stack = a, used, requested, stack
	p := a.device.table.page(b.addr)
	p.begins[(b.addr-p.base)>>p.shift] = b
	m.up(k, Allocation, 1)
	m.up(k, AllocatedBytes, int64(b.size))
	m.up(k, Active, 1)
	m.up(k, ActiveBytes, int64(b.size))
	m.up(k, RequestedBytes, int64(requested))
	if b.size >= s.MaxSplit {
		a.device.oversize.up(&a.device.oversize.blocks)
	}
	if a.audits {
		a.device.cfg.Auditor.Lend(a.stream, b.addr, b.size)
	}
	a.device.note(ActionAlloc, b.addr, requested, a, stack)
	return b.addr
}

// give takes a used block back that no page knows any more. The domain is locked.
func (a *Arena) give(b *block) {
	d, k, m := a.device, b.segment.kind, &a.domain.meter
	m.down(k, Allocation, 1)
	m.down(k, AllocatedBytes, int64(b.size))
	if b.size >= d.settings.Load().MaxSplit {
		d.oversize.down(&d.oversize.blocks)
	}
	d.note(ActionFreeRequested, b.addr, b.requested, a, d.stackOf())
	if len(b.users) > 0 {
		b.state = pending
		a.waiting.add(b)
		return
	}
	a.put(b)
}

// put makes a block free, joins it with its neighbours, and shelves it.
func (a *Arena) put(b *block) {
	if p := a.pool; p.base != nil && !p.capturing {
		a, b.arena = p.base, p.base
	}
	k, m := b.segment.kind, &a.domain.meter
	m.down(k, Active, 1)
	m.down(k, ActiveBytes, int64(b.size))
	m.down(k, RequestedBytes, int64(b.requested))
	a.device.note(ActionFreeCompleted, b.addr, b.requested, a, nil)
	if a.audits {
		a.device.cfg.Auditor.Return(a.stream, b.addr, b.size)
	}
	b.state, b.requested, b.stack = free, 0, nil
	b, joined, bytes := a.join(b)
	a.shelves[k].add(b)
	if b.segment.span != nil {
		return
	}
	blocks := -int64(joined)
	change := -int64(bytes)
	if b.split() {
		blocks++
		change += int64(b.size)
	}
	m.change(k, InactiveSplit, blocks)
	m.change(k, InactiveSplitBytes, change)
}

// join makes one block of b, which is on no shelf, and the free ones beside it. It
// returns how many it took and their bytes.
func (a *Arena) join(b *block) (whole *block, joined int, bytes uint64) {
	shelf := &a.shelves[b.segment.kind]
	if p := b.prev; p != nil && p.joins(b) {
		if !p.unmapped {
			shelf.remove(p)
		}
		bytes += p.size
		joined++
		p.swallow()
		b = p
	}
	if n := b.next; n != nil && b.joins(n) {
		if !n.unmapped {
			shelf.remove(n)
		}
		bytes += b.swallow()
		joined++
	}
	return b, joined, bytes
}

// use adds a stream to those that use the block.
func (b *block) use(s Stream) {
	if s == b.arena.stream || slices.Contains(b.users, s) {
		return
	}
	s.Retain()
	b.users = append(b.users, s)
}
