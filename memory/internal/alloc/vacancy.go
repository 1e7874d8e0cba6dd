package alloc

import (
	"cmp"
	"slices"
)

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

// setAside takes pages out of free blocks, so that they are not allocated, and waits
// until the stream has passed them. It unlocks the domain while it waits, because the
// stream may be about to call a function that frees memory. It returns none if it
// cannot wait now.
func (a *Arena) setAside(list []vacancy) ([]vacancy, error) {
	if len(list) == 0 {
		return nil, nil
	}
	for i, v := range list {
		a.shelves[v.segment.kind].remove(v.block)
		before, b, behind := v.block.carve(v.addr, v.bytes)
		for _, r := range [...]block{before, behind} {
			if !r.nothing() {
				a.shelves[v.segment.kind].add(r)
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
		a.shelves[v.segment.kind].add(b)
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

// unmap unmaps pages that were set aside. If that fails it puts them back.
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
