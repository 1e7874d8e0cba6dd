package alloc

import (
	"cmp"
	"errors"
	"slices"
)

// grow is Alloc when no free block fits. It returns a block that is in its free list, with
// the domain locked.
func (a *Arena) grow(s *Settings, k kind, size uint64) (block, error) {
	d := a.device
	if err := d.barred(); err != nil {
		return block{}, err
	}
	if d.cfg.Low != nil {
		d.cfg.Low()
	}
	d.growth.Lock()
	defer d.growth.Unlock()
	if a.pool.closed.Load() {
		return block{}, ErrClosed
	}
	if a.stream == nil {
		return block{}, ErrEnded
	}
	steps := fallbacks
	if s.ThrowOnMallocOOM {
		steps = fallbacks[:2] // including the driver
	}
	for _, step := range steps {
		b, err := step(a, s, k, size)
		if !b.nothing() || err != nil {
			return b, err
		}
	}
	d.ooms.Add(1)
	left := uint64(0)
	if d.cfg.Free != nil {
		left = d.cfg.Free()
	}
	d.note(ActionOOM, left, size, a, nil)
	return block{}, a.noMemory(s, k, size)
}

// A step tries to find a block. If it finds one it locks the domain. growth is held.
type step func(a *Arena, s *Settings, k kind, size uint64) (block, error)

// fallbacks is the order of the attempts: first the steps that cost the stream nothing,
// then the driver, then those that give up cached memory or make a stream wait.
var fallbacks []step

func init() {
	fallbacks = []step{
		(*Arena).afterCollecting,
		(*Arena).fromDriverAfterGarbage,
		(*Arena).fromPoolsOnOOM,
		(*Arena).afterReleasingLarger,
		(*Arena).afterClaiming,
		(*Arena).afterReleasingAll,
	}
}

// lookAgain searches with the domain locked, and unlocks the domain if it finds
// nothing.
func (a *Arena) lookAgain(s *Settings, k kind, size uint64) block {
	b := a.bestFree(s, k, size)
	if b.nothing() {
		a.device.unlockDomain(a.domain)
	}
	return b
}

// afterCollecting reuses blocks whose other streams have passed, or memory that
// another goroutine has allocated meanwhile.
func (a *Arena) afterCollecting(s *Settings, k kind, size uint64) (block, error) {
	a.domain.lock()
	a.collect()
	a.flushLastFreed() // the search covers only the freeLists
	return a.lookAgain(s, k, size), nil
}

func (a *Arena) fromDriverAfterGarbage(s *Settings, k kind, size uint64) (block, error) {
	d := a.device
	if limit, limited := d.limit(); limited && s.GarbageThreshold > 0 {
		if over := int64(d.reserved) - int64(s.GarbageThreshold*float64(limit)); over > 0 {
			if err := d.collectGarbage(uint64(over)); err != nil {
				return block{}, err
			}
		}
	}
	return a.fromDriver(s, k, size)
}

// fromDriver allocates a new segment, or new pages.
func (a *Arena) fromDriver(s *Settings, k kind, size uint64) (block, error) {
	if s.Expandable && a.expands() {
		b, err := a.expand(s, k, size)
		if !b.nothing() || err != nil && !errors.Is(err, errNoAddresses) {
			return b, orNothing(err)
		}
	}
	return a.fromSource(s, k, size)
}

// orNothing returns nil for ErrNoMemory, so that the next step is tried.
func orNothing(err error) error {
	if errors.Is(err, ErrNoMemory) {
		return nil
	}
	return err
}

func (a *Arena) fromSource(s *Settings, k kind, size uint64) (block, error) {
	d := a.device
	n := s.segment(size)
	if n > segmentMost || !d.allows(n) {
		return block{}, nil
	}
	stack := d.stackOf()
	addr, err := a.pool.source.Alloc(a.stream, n)
	if err != nil {
		return block{}, orNothing(err)
	}
	if !placeable(addr, n) {
		return block{}, errors.Join(&SourceError{addr, n}, a.pool.source.Free(a.stream, addr, n))
	}
	if d.table.overlaps(addr, n) {
		return block{}, &SourceError{addr, n} // freeing it would free the memory of its other user
	}
	if err := a.pool.tell(addr, n, true); err != nil {
		return block{}, errors.Join(err, a.pool.source.Free(a.stream, addr, n))
	}
	a.domain.lock()
	home := a
	if a.pool.base != nil {
		home = a.pool.base // the rest of the segment is available to all streams of the pool
	}
	seg := newSegment(home, k, addr, n, false)
	seg.stream, seg.stack = a.stream, stack
	home.segments = append(home.segments, seg)
	d.table.add(seg, addr, n)
	a.took(k, n, 1)
	if n >= s.MaxSplit {
		seg.oversize = true
		d.oversize.up(&d.oversize.segments)
	}
	d.note(ActionSegmentAlloc, addr, n, a, stack)
	b := block{seg, 0}
	home.freeLists[k].add(b)
	return b, nil
}

// took counts n bytes from the driver, in the given number of segments. The domain is
// locked.
func (a *Arena) took(k kind, n uint64, segments int64) {
	d := a.device
	d.reserved += n
	d.taken.Add(1)
	a.domain.meter.up(k, ReservedBytes, int64(n))
	a.domain.meter.up(k, Segments, segments)
}

// gave counts n bytes returned to the driver.
func (a *Arena) gave(k kind, n uint64, segments int64) {
	d := a.device
	d.reserved -= n
	d.given.Add(1)
	a.domain.meter.down(k, ReservedBytes, int64(n))
	a.domain.meter.down(k, Segments, segments)
}

// fromPoolsOnOOM searches the pools whose memory others may use when they are out of memory.
func (a *Arena) fromPoolsOnOOM(s *Settings, k kind, size uint64) (block, error) {
	if a.pool != a.device.def || a.stream == nil {
		return block{}, nil
	}
	for _, p := range a.device.pools {
		if !p.useOnOOM || p.closed.Load() {
			continue
		}
		o, err := p.arenaOf(a.stream)
		if err != nil {
			return block{}, err
		}
		o.domain.lock()
		if b := o.lookAgain(s, k, size); !b.nothing() {
			return b, nil
		}
		if b, err := o.fromDriver(s, k, size); !b.nothing() || err != nil {
			return b, err
		}
	}
	return block{}, nil
}

// afterReleasingLarger frees blocks of this stream that are too large to split.
func (a *Arena) afterReleasingLarger(s *Settings, k kind, size uint64) (block, error) {
	if k != large || s.MaxSplit == ^uint64(0) {
		return block{}, nil
	}
	if err := a.releaseLarger(max(size, s.MaxSplit)); err != nil {
		return block{}, err
	}
	return a.fromDriver(s, k, size)
}

// afterClaiming orders the stream after the other users of its freed blocks.
func (a *Arena) afterClaiming(s *Settings, k kind, size uint64) (block, error) {
	a.domain.lock()
	a.claim()
	return a.lookAgain(s, k, size), nil
}

// afterReleasingAll frees all unused segments of every stream, which may also
// free blocks of this stream, and allocates again.
func (a *Arena) afterReleasingAll(s *Settings, k kind, size uint64) (block, error) {
	if err := a.device.releaseAll(); err != nil {
		return block{}, err
	}
	if p := a.pool; p != a.device.def && p.base == nil && len(p.watchers) == 0 {
		if err := p.release(); err != nil { // memory of other block sizes in this pool
			return block{}, err
		}
	}
	a.device.retries.Add(1)
	a.domain.lock()
	if b := a.lookAgain(s, k, size); !b.nothing() {
		return b, nil
	}
	return a.fromDriver(s, k, size)
}

// Empty waits for the streams that use freed blocks, and returns all unused
// segments to the driver (torch.cuda.empty_cache), except those of open pools.
func (d *Device) Empty() error {
	if err := d.barred(); err != nil {
		return err
	}
	d.growth.Lock()
	defer d.growth.Unlock()
	return d.releaseAll()
}

// releaseAll is Empty with growth held.
func (d *Device) releaseAll() error {
	d.syncs.Add(1)
	var errs []error
	for _, p := range slices.Clone(d.pools) {
		switch {
		case p == d.def || p.closed.Load():
			errs = append(errs, d.releasePool(p))
		case p.base == nil: // launches of graphs use the free memory of their pools
			p.await()
		}
	}
	return errors.Join(errs...)
}

// reclaim frees the unused segments of a closed pool.
func (d *Device) reclaim(p *Pool) error {
	d.growth.Lock()
	defer d.growth.Unlock()
	return d.releasePool(p)
}

// releasePool frees the unused segments of a pool, and removes the pool if it is closed
// and empty. growth is held.
func (d *Device) releasePool(p *Pool) error {
	err := p.release()
	if p.closed.Load() && p.bytes() == 0 {
		d.forget(p)
	}
	return err
}

// forget removes a pool without memory, so that its domains can be reused.
func (d *Device) forget(p *Pool) {
	i := slices.Index(d.pools, p)
	if i < 0 {
		return
	}
	d.pools = slices.Delete(d.pools, i, i+1)
	for _, a := range p.orphans {
		a.forgetEnd()
	}
	for _, a := range p.arenas {
		a.domain.lock()
		a.unreserve()
		a.domain.arenas = nil
		a.domain.mu.Unlock()
		if !slices.Contains(d.unused, a.domain) {
			d.unused = append(d.unused, a.domain)
		}
	}
	p.arenas, p.orphans = nil, nil
}

// bytes returns how much memory the pool has reserved from the driver.
func (p *Pool) bytes() (n int64) {
	for _, a := range p.arenas {
		a.domain.lock()
		for _, s := range a.segments {
			n += int64(s.size())
		}
		for _, s := range a.spans {
			if s != nil {
				n += int64(s.span.bytes) + int64(len(s.span.stuck)+len(s.span.loose))
			}
		}
		a.domain.mu.Unlock()
	}
	return n
}

// release returns the unused segments to the source.
func (p *Pool) release() error {
	var errs []error
	p.await() // for all arenas first: a block of one may be part of another's segment
	for _, a := range p.arenas {
		a.domain.lock()
		gone := a.withdraw(func(s *segment) bool { return true })
		a.device.unlockDomain(a.domain)
		errs = append(errs, a.freeSegments(gone))
		errs = append(errs, a.shrink())
	}
	return errors.Join(errs...)
}

// await waits until no stream uses the freed blocks. growth is held.
func (p *Pool) await() {
	for _, a := range p.arenas {
		a.await()
	}
}

// withdraw removes the unused segments that goes selects from their free lists, so that
// no block is allocated from them. The domain is locked.
func (a *Arena) withdraw(goes func(*segment) bool) (gone []*segment) {
	capturing := a.device.capturing()
	a.segments = slices.DeleteFunc(a.segments, func(s *segment) bool {
		if !s.idle() || capturing && s.captured || !goes(s) {
			return false
		}
		gone = append(gone, s)
		return true
	})
	for _, s := range gone {
		b := block{s, 0}
		b.arena().freeLists[s.kind].remove(b)
	}
	return gone
}

// freeSegments returns withdrawn segments to the source, and restores each
// segment for which the source returns an error.
func (a *Arena) freeSegments(gone []*segment) error {
	if len(gone) == 0 {
		return nil
	}
	var errs []error
	if a.mustWait() {
		if err := a.sync(); err != nil {
			a.restore(gone)
			return unlessBusy(err)
		}
	}
	for _, s := range gone {
		errs = append(errs, a.pool.tell(s.addr, s.size(), false))
		err := a.pool.source.Free(s.stream, s.addr, s.size())
		if err == nil {
			a.unlink(s)
			continue
		}
		errs = append(errs, err, a.pool.tell(s.addr, s.size(), true))
		a.restore([]*segment{s})
	}
	return errors.Join(errs...)
}

// mustWait reports whether the streams must have passed the arena's memory before any
// segment is freed.
func (a *Arena) mustWait() bool {
	return a.pool.source.Async() || len(a.pool.watchers) > 0
}

// restore undoes withdraw.
func (a *Arena) restore(gone []*segment) {
	a.domain.lock()
	for _, s := range gone {
		a.segments = append(a.segments, s)
		b := block{s, 0}
		b.arena().freeLists[s.kind].add(b)
	}
	a.device.unlockDomain(a.domain)
}

// unlink removes a segment that was returned to the source.
func (a *Arena) unlink(s *segment) {
	d, n := a.device, s.size()
	a.domain.lock()
	block{s, 0}.setArena(s.home)
	a.domain.removeSegment(s)
	d.table.remove(s, s.addr, n)
	a.gave(s.kind, n, 1)
	if s.oversize {
		d.oversize.down(&d.oversize.segments)
	}
	d.note(ActionSegmentFree, s.addr, n, a, nil)
	d.unlockDomain(a.domain)
}

// releaseLarger frees the smallest unused segment of at least least bytes. If there is
// none, it frees unsplittable segments, the largest first, until they add up to least
// bytes.
func (a *Arena) releaseLarger(least uint64) error {
	most := a.device.settings.Load().MaxSplit
	a.domain.lock()
	var idle []*segment
	a.idleLarge(func(s *segment, _ uint64) { idle = append(idle, s) })
	slices.SortFunc(idle, func(x, y *segment) int { return cmp.Compare(x.units, y.units) })
	if i := slices.IndexFunc(idle, func(s *segment) bool { return s.size() >= least }); i >= 0 {
		idle = idle[i : i+1]
	} else {
		slices.Reverse(idle)
		n, sum := 0, uint64(0)
		for ; n < len(idle) && sum < least && idle[n].size() >= most; n++ {
			sum += idle[n].size()
		}
		idle = idle[:n]
	}
	gone := a.withdraw(func(s *segment) bool { return slices.Contains(idle, s) })
	a.device.unlockDomain(a.domain)
	return a.freeSegments(gone)
}

// collectGarbage frees large segments of the default pool that have not been used for
// long, until n bytes are free. The age of a segment is the number of searches for a
// block since its last use; segments older than the average are freed.
func (d *Device) collectGarbage(n uint64) error {
	for n > 0 {
		freed, err := d.collectOld(n)
		if err != nil || freed == 0 {
			return err
		}
		n -= min(n, freed)
	}
	return nil
}

func (d *Device) collectOld(n uint64) (freed uint64, err error) {
	var ages, count uint64
	for _, a := range d.def.arenas {
		a.domain.lock()
		a.idleLarge(func(s *segment, age uint64) { ages, count = ages+age, count+1 })
		a.domain.mu.Unlock()
	}
	if count == 0 {
		return 0, nil
	}
	var errs []error
	for _, a := range d.def.arenas {
		a.domain.lock()
		gone := a.withdraw(func(s *segment) bool {
			if s.kind != large || freed >= n || a.age(s)*count < ages {
				return false
			}
			freed += s.size()
			return true
		})
		d.unlockDomain(a.domain)
		errs = append(errs, a.freeSegments(gone))
	}
	return freed, errors.Join(errs...)
}

func (a *Arena) idleLarge(fn func(s *segment, age uint64)) {
	for _, s := range a.segments {
		if s.kind == large && s.idle() {
			fn(s, a.age(s))
		}
	}
}

// age returns the number of searches for a large block since the idle segment became
// free.
func (a *Arena) age(s *segment) uint64 { return a.freeLists[large].age(block{s, 0}) }
