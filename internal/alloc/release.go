package alloc

import (
	"cmp"
	"errors"
	"slices"
)

// Empty waits for the streams that use what was given back, and returns to the
// driver all segments that nobody has (torch.cuda.empty_cache).
func (d *Device) Empty() error {
	d.growth.Lock()
	defer d.growth.Unlock()
	return d.releaseAll()
}

// releaseAll is Empty with growth held.
func (d *Device) releaseAll() error {
	d.syncs.Add(1)
	var errs []error
	for _, p := range slices.Clone(d.pools) {
		if p.base != nil && !p.closed.Load() {
			continue // launches of graphs use what is free in it
		}
		errs = append(errs, p.release())
	}
	return errors.Join(errs...)
}

// reclaim releases what a closed pool has, and forgets the pool when that is all.
func (d *Device) reclaim(p *Pool) error {
	d.growth.Lock()
	defer d.growth.Unlock()
	err := p.release()
	if p.bytes() == 0 {
		d.forget(p)
	}
	return err
}

// forget takes a pool without memory out of the books. Its domains are used again.
func (d *Device) forget(p *Pool) {
	i := slices.Index(d.pools, p)
	if i < 0 {
		return
	}
	d.pools = slices.Delete(d.pools, i, i+1)
	for _, a := range p.orphans {
		a.ended.Close()
	}
	for _, a := range p.arenas {
		a.unreserve()
		a.domain.arenas = nil
		if !slices.Contains(d.unused, a.domain) {
			d.unused = append(d.unused, a.domain)
		}
	}
	p.arenas, p.orphans = nil, nil
}

// bytes returns what the pool has of the driver.
func (p *Pool) bytes() (n int64) {
	for _, a := range p.arenas {
		a.domain.lock()
		for _, s := range a.segments {
			n += int64(s.size())
		}
		for _, s := range a.spans {
			if s != nil {
				n += int64(s.span.bytes)
			}
		}
		a.domain.mu.Unlock()
	}
	return n
}

// release returns to the source what nobody has.
func (p *Pool) release() error {
	var errs []error
	for _, a := range p.arenas {
		if a.mustWait() && errors.Is(a.sync(), ErrBusy) {
			continue // what it has done before its capture cannot be waited for
		}
		a.domain.lock()
		a.await()
		gone := a.unlinkIdle()
		a.device.leave(a.domain)
		errs = append(errs, a.free(gone))
		errs = append(errs, a.shrink())
	}
	return errors.Join(errs...)
}

// unlinkIdle takes the segments that nobody has out of the books. The domain is
// locked.
func (a *Arena) unlinkIdle() (gone []*segment) {
	a.segments = slices.DeleteFunc(a.segments, func(s *segment) bool {
		if !s.idle() {
			return false
		}
		gone = append(gone, s)
		return true
	})
	for _, s := range gone {
		a.unlink(s)
	}
	return gone
}

// unlink takes an idle segment off its shelf and out of the statistics.
func (a *Arena) unlink(s *segment) {
	d, n := a.device, s.size()
	b := block{s, 0}
	b.arena().shelves[s.kind].remove(b)
	b.setArena(s.home)
	a.domain.segments[s.number] = nil
	d.table.remove(s, s.addr, n)
	a.gave(s.kind, n, 1)
	if n >= d.settings.Load().MaxSplit {
		d.oversize.down(&d.oversize.segments)
	}
	d.note(ActionSegmentFree, s.addr, n, a, nil)
}

// free returns segments that are in no book any more.
func (a *Arena) free(gone []*segment) error {
	if len(gone) == 0 {
		return nil
	}
	var errs []error
	if a.mustWait() {
		errs = append(errs, a.sync())
	}
	for _, s := range gone {
		errs = append(errs, a.pool.tell(s.addr, s.size(), false), a.pool.source.Free(s.stream, s.addr, s.size()))
	}
	return errors.Join(errs...)
}

// mustWait says whether the stream must be past the arena's memory before any of it
// goes back.
func (a *Arena) mustWait() bool {
	return a.pool.source.Async() || len(a.pool.watchers) > 0 || a.spans != [kinds]*segment{}
}

// releaseLarger frees the smallest segment that has least bytes and that nobody
// has, or else those that are not split for their size, from the largest on, until
// they have been least bytes.
func (a *Arena) releaseLarger(least uint64) error {
	most := a.device.settings.Load().MaxSplit
	a.domain.lock()
	var idle []*segment
	a.idleLarge(func(s *segment, _ uint64) { idle = append(idle, s) })
	slices.SortFunc(idle, func(x, y *segment) int { return cmp.Compare(x.units, y.units) })
	var gone []*segment
	if i := slices.IndexFunc(idle, func(s *segment) bool { return s.size() >= least }); i >= 0 {
		gone = idle[i : i+1]
	} else {
		slices.Reverse(idle)
		for sum := uint64(0); len(idle) > 0 && sum < least && idle[0].size() >= most; idle = idle[1:] {
			gone = append(gone, idle[0])
			sum += idle[0].size()
		}
	}
	a.drop(gone)
	a.device.leave(a.domain)
	return a.free(gone)
}

// drop is unlink for some of the arena's segments.
func (a *Arena) drop(gone []*segment) {
	a.segments = slices.DeleteFunc(a.segments, func(s *segment) bool { return slices.Contains(gone, s) })
	for _, s := range gone {
		a.unlink(s)
	}
}

// collectGarbage frees large segments of the default pool that have not been used
// for long, until n bytes are free. The age of a segment is how often a block was
// looked for since it was last used; those go that are older than the average.
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
		var gone []*segment
		a.idleLarge(func(s *segment, age uint64) {
			if freed < n && age*count >= ages {
				gone = append(gone, s)
				freed += s.size()
			}
		})
		a.drop(gone)
		d.leave(a.domain)
		errs = append(errs, a.free(gone))
	}
	return freed, errors.Join(errs...)
}

func (a *Arena) idleLarge(fn func(s *segment, age uint64)) {
	for _, s := range a.segments {
		if s.kind == large && s.idle() {
			fn(s, a.shelves[large].age(block{s, 0}))
		}
	}
}
