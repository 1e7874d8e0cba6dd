package virtual

import (
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// pieces says which bytes of a block an allocator has given out: runs in order, in
// lists for each chunkBytes, neighbours of one state merged. Bytes of no run were
// never given out. m.mu guards it.
type pieces struct {
	audited bool // a piece was named outside of a capture
	chunks  [][]run
}

type state uint8

const (
	never    state = iota // given out
	lent                  // to a user
	returned              // by one
	captured              // used by a graph, which nobody follows
)

func (s state) usable() bool { return s == lent || s == captured }

// A run is [lo, hi) of a block.
type run struct {
	lo, hi uint64
	state  state
	by     cudadrv.Stream // whose MemReturn it was last
}

func newPieces(bytes uint64) *pieces {
	return &pieces{chunks: make([][]run, (bytes+chunkBytes-1)/chunkBytes)}
}

// set gives [lo, hi) a state, but for what graphs use, unless all is meant.
func (p *pieces) set(lo, hi uint64, to run, all bool) {
	if p == nil {
		return
	}
	for lo < hi {
		c := lo / chunkBytes
		to.lo, to.hi = lo, min(hi, (c+1)*chunkBytes)
		p.chunks[c] = replaced(p.chunks[c], to, all)
		lo = to.hi
	}
}

// replaced puts a run into a list, in the place of what is there.
func replaced(list []run, to run, all bool) []run {
	// Neighbours that only touch it are taken along, to be merged.
	first := sort.Search(len(list), func(i int) bool { return list[i].hi >= to.lo })
	last := first
	var room [8]run
	fresh, end := room[:0], to.hi
	for ; last < len(list) && list[last].lo <= end; last++ {
		old := list[last]
		if old.lo < to.lo {
			fresh = merged(fresh, run{old.lo, min(old.hi, to.lo), old.state, old.by})
		}
		if old.state == captured && !all && old.hi > to.lo && old.lo < end {
			part := run{max(old.lo, to.lo), min(old.hi, end), captured, old.by}
			fresh = merged(merged(fresh, run{to.lo, part.lo, to.state, to.by}), part)
			to.lo = part.hi
		}
		if old.hi > end {
			fresh = merged(merged(fresh, to), run{max(old.lo, end), old.hi, old.state, old.by})
			to.lo = end
		}
	}
	fresh = merged(fresh, to)
	return slices.Replace(list, first, last, fresh...)
}

// merged appends a run. Of merged returns one is remembered, for explanations.
func merged(list []run, r run) []run {
	if r.lo >= r.hi || r.state == never {
		return list
	}
	if n := len(list); n > 0 && list[n-1].hi == r.lo && list[n-1].state == r.state {
		list[n-1].hi = r.hi
		return list
	}
	return append(list, r)
}

// seek returns the first part of [lo, hi) whose state fits. Parts end where a chunk
// does.
func (p *pieces) seek(lo, hi uint64, fits func(state) bool) (part run, found bool) {
	for lo < hi {
		c := lo / chunkBytes
		end := min(hi, (c+1)*chunkBytes)
		list := p.chunks[c]
		for i := sort.Search(len(list), func(i int) bool { return list[i].hi > lo }); lo < end; i++ {
			if i == len(list) || list[i].lo >= end {
				if fits(never) {
					return run{lo: lo, hi: end}, true
				}
				break
			}
			if list[i].lo > lo && fits(never) {
				return run{lo: lo, hi: list[i].lo}, true
			}
			if fits(list[i].state) {
				return list[i], true
			}
			lo = list[i].hi
		}
		lo = end
	}
	return run{}, false
}

// whole returns all of a run that chunks divide.
func (p *pieces) whole(part run) run {
	for part.lo%chunkBytes == 0 && part.lo > 0 {
		list := p.chunks[part.lo/chunkBytes-1]
		if n := len(list); n == 0 || list[n-1].hi != part.lo || list[n-1].state != part.state {
			break
		}
		part.lo = list[len(list)-1].lo
	}
	for part.hi%chunkBytes == 0 && part.hi/chunkBytes < uint64(len(p.chunks)) {
		list := p.chunks[part.hi/chunkBytes]
		if len(list) == 0 || list[0].lo != part.hi || list[0].state != part.state {
			break
		}
		part.hi = list[0].hi
	}
	return part
}
