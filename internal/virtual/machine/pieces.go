package machine

import (
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// listBytes is the size of the part of a block that one list of runs covers.
const listBytes = 2 << 20

// pieces records which bytes of a block an allocator has allocated, as sorted
// runs in one list for each listBytes. Adjacent runs with the same state are
// merged. Bytes outside of all runs were never allocated. m.mu guards it.
type pieces struct {
	audited bool // the allocator declared a piece outside of a capture
	chunks  [][]run
}

type state uint8

const (
	never    state = iota // never allocated
	lent                  // allocated
	returned              // freed
	captured              // used by a graph; not tracked
)

func (s state) usable() bool { return s == lent || s == captured }

// A run is the range [lo, hi) of a block.
type run struct {
	lo, hi uint64
	state  state
	by     cudadrv.Stream // stream of the last MemReturn
}

func newPieces(bytes uint64) *pieces {
	return &pieces{chunks: make([][]run, (bytes+listBytes-1)/listBytes)}
}

// set sets the state of [lo, hi). It skips bytes used by graphs, unless all is true.
func (p *pieces) set(lo, hi uint64, to run, all bool) {
	if p == nil {
		return
	}
	for lo < hi {
		c := lo / listBytes
		to.lo, to.hi = lo, min(hi, (c+1)*listBytes)
		p.chunks[c] = replaced(p.chunks[c], to, all)
		lo = to.hi
	}
}

// replaced inserts a run into a list, replacing overlapping runs.
func replaced(list []run, to run, all bool) []run {
	// Include adjacent runs, to merge them.
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

// merged appends a run. If it merges freed runs, it keeps the stream of one, for explanations.
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

// seek returns the first part of [lo, hi) with a matching state. A part does not
// extend beyond its chunk.
func (p *pieces) seek(lo, hi uint64, fits func(state) bool) (part run, found bool) {
	for lo < hi {
		c := lo / listBytes
		end := min(hi, (c+1)*listBytes)
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

// whole returns a complete run that chunks divide.
func (p *pieces) whole(part run) run {
	for part.lo%listBytes == 0 && part.lo > 0 {
		list := p.chunks[part.lo/listBytes-1]
		if n := len(list); n == 0 || list[n-1].hi != part.lo || list[n-1].state != part.state {
			break
		}
		part.lo = list[len(list)-1].lo
	}
	for part.hi%listBytes == 0 && part.hi/listBytes < uint64(len(p.chunks)) {
		list := p.chunks[part.hi/listBytes]
		if len(list) == 0 || list[0].lo != part.hi || list[0].state != part.state {
			break
		}
		part.hi = list[0].hi
	}
	return part
}
