package alloc

import "errors"

// grow is Alloc when no free block fits. It returns a block that is on its shelf, with
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
	steps := ladder
	if s.ThrowOnMallocOOM {
		steps = ladder[:2] // including the driver
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

// ladder is the order of the attempts: first the steps that cost the stream nothing,
// then the driver, then the steps that make other streams wait.
var ladder []step

func init() {
	ladder = []step{
		(*Arena).afterCollecting,
		(*Arena).afterCollectingGarbage,
		(*Arena).fromSpare,
		(*Arena).afterReleasingLarger,
		(*Arena).afterClaiming,
		(*Arena).afterReleasingAll,
	}
}

// lookAgain searches with the domain locked. If it finds nothing it unlocks the domain.
func (a *Arena) lookAgain(s *Settings, k kind, size uint64) block {
	b := a.bestFree(s, k, size)
	if b.nothing() {
		a.device.unlockDomain(a.domain)
	}
	return b
}

// afterCollecting reuses blocks whose other streams have passed. Another goroutine may
// also have allocated memory meanwhile.
func (a *Arena) afterCollecting(s *Settings, k kind, size uint64) (block, error) {
	a.domain.lock()
	a.collect()
	a.emptyPocket() // the search covers only the shelves
	return a.lookAgain(s, k, size), nil
}

func (a *Arena) afterCollectingGarbage(s *Settings, k kind, size uint64) (block, error) {
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
	home.shelves[k].add(b)
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

// fromSpare searches the pools whose memory others may use when they are out of memory.
func (a *Arena) fromSpare(s *Settings, k kind, size uint64) (block, error) {
	if a.pool != a.device.def || a.stream == nil {
		return block{}, nil
	}
	for _, p := range a.device.pools {
		if !p.spare || p.closed.Load() {
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

// afterClaiming makes the stream wait for the other users of its freed blocks.
func (a *Arena) afterClaiming(s *Settings, k kind, size uint64) (block, error) {
	a.domain.lock()
	a.claim()
	return a.lookAgain(s, k, size), nil
}

// afterReleasingAll frees all unused segments of every stream. That may also free
// blocks of this stream.
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
