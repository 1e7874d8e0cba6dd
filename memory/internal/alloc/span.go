package alloc

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
)

// A span is the state of an expandable segment in addition to its blocks: pages of
// memory that are mapped to some of its addresses. A block without pages is a hole.
// When no free block fits, the allocator chooses the place among free blocks and holes
// that lacks the fewest pages. It takes these pages from free blocks elsewhere before
// it creates new ones. Because pages move, almost no memory is lost to fragmentation.
type span struct {
	pages map[uint64]uint64 // mapped pages by address
	holes []block
	bytes uint64            // of the pages
	stuck map[uint64]uint64 // pages that could not be unmapped, by their addresses in holes
	loose []uint64          // pages that are not mapped and could not be released
}

// spanMost is the maximum size of a segment: the number of its units must fit.
const spanMost = (1<<32 - 1) * unit / pageSize * pageSize

// errNoAddresses reports that the address space has no room for an expandable segment.
var errNoAddresses = errors.New("no addresses left")

// expands reports whether the arena may have expandable segments.
func (a *Arena) expands() bool {
	return a.device.cfg.Pages != nil && a.pool.base == nil && a.pool.source == a.device.cfg.Source && !a.pool.noSplit && len(a.pool.watchers) == 0
}

// spanOf returns the arena's expandable segment, with the domain locked.
func (a *Arena) spanOf(k kind) (*segment, error) {
	d := a.device
	if s := a.spans[k]; s != nil {
		a.domain.lock()
		return s, nil
	}
	n := min(d.cfg.Pages.Reach(), spanMost)
	addr, err := d.cfg.Pages.Reserve(n)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAddresses, err)
	}
	if !placeable(addr, n) {
		return nil, errors.Join(errNoAddresses, d.cfg.Pages.Unreserve(addr, n))
	}
	a.domain.lock()
	s := newSegment(a, k, addr, n, true)
	all := block{s, 0}
	all.slot().place |= isHole
	s.span = &span{pages: map[uint64]uint64{}, stuck: map[uint64]uint64{}, holes: []block{all}}
	a.spans[k] = s
	return s, nil
}

// expand is fromSource for expandable segments.
func (a *Arena) expand(s *Settings, k kind, size uint64) (block, error) {
	seg, err := a.spanOf(k)
	if err != nil {
		return block{}, err
	}
	page := a.device.cfg.Pages.PageSize()
	p, aside := seg.place(size, page), []vacancy(nil)
	if p != nil {
		list := a.vacancies(p, len(p.missing))
		if aside, err = a.setAside(list); len(list) > 0 {
			p = seg.place(size, page) // another goroutine may have used part of the place
		}
	}
	if p == nil || err != nil {
		a.putBack(aside)
		err = cmp.Or(err, errNoAddresses)
	} else {
		err = a.fill(seg, p, aside)
	}
	if err != nil {
		a.device.unlockDomain(a.domain)
		return block{}, err
	}
	return seg.holding(p.lo), nil
}

// A place is a range of free addresses for a block. Some of its pages are not mapped.
type place struct {
	lo, hi  uint64
	missing []uint64 // in order
}

// place returns the place that lacks the fewest pages, or nil.
func (s *segment) place(size, page uint64) (best *place) {
	for _, h := range s.span.holes {
		lo, hi := h.addr(), h.end()
		for b := h.prev(); !b.nothing() && b.slot().isFree(); b = b.prev() {
			lo = b.addr()
		}
		for b := h.next(); !b.nothing() && b.slot().isFree(); b = b.next() {
			hi = b.end()
		}
		if hi-lo < size {
			continue
		}
		for _, at := range [...]uint64{lo, hi - size} {
			p := s.span.lacks(at, at+size, page)
			if best == nil || len(p.missing) < len(best.missing) || len(p.missing) == len(best.missing) && p.lo < best.lo {
				best = p
			}
		}
	}
	return best
}

func (s *span) lacks(lo, hi, page uint64) *place {
	p := &place{lo: lo, hi: hi}
	for at := lo / page * page; at < hi; at += page {
		if _, ok := s.pages[at]; !ok {
			p.missing = append(p.missing, at)
		}
	}
	return p
}

// fill maps the missing pages of a place. If it fails, the state is as before, except
// that unused pages may have been released.
func (a *Arena) fill(seg *segment, p *place, aside []vacancy) error {
	if err := a.unstick(seg); err != nil {
		a.putBack(aside)
		return err
	}
	pages, err := a.gather(seg, p, aside)
	if err != nil {
		return err
	}
	for i, at := range p.missing {
		if err := a.device.cfg.Pages.Map(at, pages[i]); err != nil {
			return errors.Join(err, a.rollBack(seg, p.missing[:i], pages))
		}
	}
	if err := a.setAccess(p.missing); err != nil {
		return errors.Join(err, a.rollBack(seg, p.missing, pages))
	}
	for i, at := range p.missing {
		a.mapped(seg, at, pages[i])
	}
	return nil
}

// rollBack releases pages; the first len(at) pages were mapped. Pages that cannot be
// unmapped are kept for a later attempt.
func (a *Arena) rollBack(seg *segment, at, pages []uint64) error {
	var errs []error
	src := a.device.cfg.Pages
	loose := slices.Clone(pages[len(at):])
	for i, at := range at {
		if err := src.Unmap(at, src.PageSize()); err != nil {
			errs = append(errs, err)
			seg.span.stuck[at] = pages[i]
			continue
		}
		loose = append(loose, pages[i])
	}
	return errors.Join(errors.Join(errs...), a.discard(seg.kind, loose))
}

// unstick unmaps the pages that an earlier failure left mapped in holes.
func (a *Arena) unstick(seg *segment) error {
	src := a.device.cfg.Pages
	for at, page := range seg.span.stuck {
		if err := src.Unmap(at, src.PageSize()); err != nil {
			return err
		}
		delete(seg.span.stuck, at)
		seg.span.loose = append(seg.span.loose, page)
	}
	return nil
}

// setAccess enables access to newly mapped pages, with one call per contiguous range.
func (a *Arena) setAccess(at []uint64) error {
	size := a.device.cfg.Pages.PageSize()
	for i := 0; i < len(at); {
		j := i + 1
		for j < len(at) && at[j] == at[j-1]+size {
			j++
		}
		if err := a.device.cfg.Pages.Open(at[i], uint64(j-i)*size); err != nil {
			return err
		}
		i = j
	}
	return nil
}

// gather returns as many pages as the place lacks: those that were set aside,
// and new pages, all counted as reserved. It puts back the pages that it does
// not need.
func (a *Arena) gather(seg *segment, p *place, aside []vacancy) (pages []uint64, err error) {
	d, size := a.device, a.device.cfg.Pages.PageSize()
	defer func() { a.putBack(aside) }()
	fresh := len(p.missing)
	for _, v := range aside {
		fresh -= int(v.bytes / size)
	}
	if n := min(fresh, len(seg.span.loose)); n > 0 {
		pages, seg.span.loose = slices.Clone(seg.span.loose[:n]), slices.Delete(seg.span.loose, 0, n)
		fresh -= n
	}
	if fresh > 0 && !d.allows(uint64(fresh)*size) {
		return nil, errors.Join(ErrNoMemory, a.discard(seg.kind, pages))
	}
	for range fresh {
		page, err := d.cfg.Pages.Create()
		if err != nil {
			return nil, errors.Join(err, a.discard(seg.kind, pages))
		}
		pages = append(pages, page)
		a.took(seg.kind, size, 0)
	}
	for len(pages) < len(p.missing) {
		v := aside[0]
		aside = aside[1:]
		if rest := v.cut(uint64(len(p.missing)-len(pages)) * size); rest.bytes > 0 {
			aside = append(aside, rest)
		}
		more, err := a.unmap(v)
		if err != nil {
			return nil, errors.Join(err, a.discard(seg.kind, pages))
		}
		m := &a.domain.meter // the pages may change their kind
		m.down(v.segment.kind, ReservedBytes, int64(v.bytes))
		m.up(seg.kind, ReservedBytes, int64(v.bytes))
		pages = append(pages, more...)
	}
	return pages, nil
}

// discard releases pages that are not mapped. It keeps pages that the driver
// does not release, to reuse or release them later.
func (a *Arena) discard(k kind, pages []uint64) error {
	var errs []error
	for _, page := range pages {
		if err := a.device.cfg.Pages.Release(page); err != nil {
			errs = append(errs, err)
			a.spans[k].span.loose = append(a.spans[k].span.loose, page)
			continue
		}
		a.gave(k, a.device.cfg.Pages.PageSize(), 0)
	}
	return errors.Join(errs...)
}

// mapped records a newly mapped page.
func (a *Arena) mapped(s *segment, at, page uint64) {
	size := a.device.cfg.Pages.PageSize()
	s.span.pages[at] = page
	s.span.bytes += size
	a.device.table.add(s, at, size)
	i := slices.IndexFunc(s.span.holes, func(h block) bool { return at-h.addr() < h.size() })
	h := s.span.holes[i]
	s.span.fill(h)
	before, b, behind := h.carve(at, size)
	for _, h := range [...]block{before, behind} {
		if !h.nothing() {
			s.span.holes = append(s.span.holes, h)
		}
	}
	b.slot().place &^= isHole
	b, _, _ = a.join(b)
	a.freeLists[s.kind].add(b)
	a.device.note(ActionSegmentMap, at, size, a, nil)
}

// fill removes a hole from the list.
func (s *span) fill(h block) {
	s.holes = slices.DeleteFunc(s.holes, func(o block) bool { return o == h })
}

// carve divides b into the parts before, in and after [at, at+n). The outer parts may
// be nothing.
func (b block) carve(at, n uint64) (before, middle, behind block) {
	middle = b
	if at > b.addr() {
		before, middle = b, b.cut(at-b.addr())
	}
	if middle.size() > n {
		behind = middle.cut(n)
	}
	return before, middle, behind
}

// shrink releases the pages in free blocks. growth is held.
func (a *Arena) shrink() error {
	a.domain.lock()
	defer a.device.unlockDomain(a.domain)
	if a.spans == [kinds]*segment{} {
		return nil
	}
	var errs []error
	for _, s := range a.spans {
		if s != nil {
			errs = append(errs, a.unstick(s))
			loose := s.span.loose
			s.span.loose = nil
			errs = append(errs, a.discard(s.kind, loose))
		}
	}
	aside, err := a.setAside(a.vacancies(nil, math.MaxInt))
	errs = append(errs, err)
	for _, v := range aside {
		pages, err := a.unmap(v)
		errs = append(errs, err, a.discard(v.segment.kind, pages))
	}
	return errors.Join(errs...)
}

// unreserve frees the address ranges of an arena that has no pages. The domain is
// locked.
func (a *Arena) unreserve() {
	for k, s := range a.spans {
		if s != nil {
			_ = a.device.cfg.Pages.Unreserve(s.addr, s.size()) // a failure would lose only addresses
			a.domain.removeSegment(s)
			a.spans[k] = nil
		}
	}
}

// A vacancy is a range of pages in a free block.
type vacancy struct {
	segment *segment
	block   block
	addr    uint64
	bytes   uint64
}

// vacancies finds up to n pages that lie in free blocks outside of the place, in the
// largest blocks first.
func (a *Arena) vacancies(p *place, n int) (list []vacancy) {
	size := a.device.cfg.Pages.PageSize()
	var blocks []block
	for k := range kinds {
		for _, b := range a.blocks(k, size) {
			if b.s.span != nil && (p == nil || b.addr() >= p.hi || b.end() <= p.lo) {
				blocks = append(blocks, b)
			}
		}
	}
	slices.SortStableFunc(blocks, func(x, y block) int { return cmp.Compare(y.size(), x.size()) })
	for _, b := range blocks {
		lo, hi := roundUp(b.addr(), size), b.end()/size*size
		if rest := b.end() - hi; rest > 0 && rest <= smallMost && b.s.kind == large {
			hi -= size // the rest of the block must have a slot
		}
		if hi <= lo || n == 0 {
			continue
		}
		pages := min(int((hi-lo)/size), n)
		list = append(list, vacancy{b.s, b, lo, uint64(pages) * size})
		n -= pages
	}
	return list
}

// setAside takes pages out of free blocks, so that they are not allocated, and
// waits until the stream has passed them. It unlocks the domain while it waits,
// because the stream may be about to call a function that frees memory. If it
// cannot wait now, it returns no pages.
func (a *Arena) setAside(list []vacancy) ([]vacancy, error) {
	if len(list) == 0 {
		return nil, nil
	}
	for i, v := range list {
		a.freeLists[v.segment.kind].remove(v.block)
		before, b, behind := v.block.carve(v.addr, v.bytes)
		for _, r := range [...]block{before, behind} {
			if !r.nothing() {
				a.freeLists[v.segment.kind].add(r)
			}
		}
		b.slot().place |= isPending
		list[i].block = b
	}
	a.device.unlockDomain(a.domain)
	err := a.sync()
	a.domain.lock()
	if err != nil {
		a.putBack(list)
		return nil, unlessBusy(err)
	}
	return list, nil
}

// putBack undoes setAside.
func (a *Arena) putBack(list []vacancy) {
	for _, v := range list {
		v.block.slot().place &^= isPending
		b, _, _ := a.join(v.block)
		a.freeLists[v.segment.kind].add(b)
	}
}

// cut shortens v to its first n bytes and returns the rest.
func (v *vacancy) cut(n uint64) (rest vacancy) {
	if v.bytes <= n {
		return vacancy{}
	}
	rest = vacancy{v.segment, v.block.cut(n), v.addr + n, v.bytes - n}
	v.bytes = n
	return rest
}

// unmap unmaps pages that were set aside, or puts them back if the driver
// fails.
func (a *Arena) unmap(v vacancy) (pages []uint64, err error) {
	b, s, size := v.block, v.segment, a.device.cfg.Pages.PageSize()
	if err := a.device.cfg.Pages.Unmap(v.addr, v.bytes); err != nil {
		a.putBack([]vacancy{v})
		return nil, err
	}
	for at := v.addr; at < v.addr+v.bytes; at += size {
		pages = append(pages, s.span.pages[at])
		delete(s.span.pages, at)
	}
	s.span.bytes -= v.bytes
	a.device.table.remove(s, v.addr, v.bytes)
	b.slot().place ^= isPending | isHole
	b, _, _ = a.join(b)
	s.span.holes = append(s.span.holes, b)
	a.device.note(ActionSegmentUnmap, v.addr, v.bytes, a, nil)
	return pages, nil
}
