package sanitizer

import (
	"fmt"
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// listBytes is the size of the part of a block that one list of runs covers.
const listBytes = 2 << 20

// Pieces records which bytes of a block an allocator has allocated, as sorted
// runs in one list for each listBytes. Adjacent runs with the same state are
// merged. Bytes outside of all runs were never allocated.
type Pieces struct {
	Audited bool // the allocator declared a piece outside of a capture
	chunks  [][]Run
}

// A State is the state of a byte of a block.
type State uint8

// The states.
const (
	Never State = iota // never allocated
	Allocated
	Freed
	Captured // used by a graph; not tracked
	Shared   // allocated, and accesses need no order
)

// Usable reports whether operations may use bytes with the state.
func (s State) Usable() bool { return s == Allocated || s == Captured || s == Shared }

// Unordered reports whether accesses of the byte at an offset need no order.
func (p *Pieces) Unordered(at uint64) bool {
	if p == nil {
		return false
	}
	_, found := p.Seek(at, at+1, func(s State) bool { return s == Shared })
	return found
}

// A Run is the range [Lo, Hi) of a block.
type Run struct {
	Lo, Hi uint64
	State  State
	By     cudadrv.Stream // stream of the last MemFreed
	// Since is when bytes that are Allocated were allocated, in the count of the caller. Runs that were allocated at
	// different times are not merged.
	Since uint64
}

// NewPieces returns the pieces of a block that an allocator has not used yet.
func NewPieces(bytes uint64) *Pieces {
	return &Pieces{chunks: make([][]Run, (bytes+listBytes-1)/listBytes)}
}

// Set sets the state of [lo, hi), except of bytes used by graphs, unless all is
// true.
func (p *Pieces) Set(lo, hi uint64, to Run, all bool) {
	if p == nil {
		return
	}
	for lo < hi {
		c := lo / listBytes
		to.Lo, to.Hi = lo, min(hi, (c+1)*listBytes)
		p.chunks[c] = replaced(p.chunks[c], to, all)
		lo = to.Hi
	}
}

// replaced inserts a run into a list, replacing overlapping runs.
func replaced(list []Run, to Run, all bool) []Run {
	// Include adjacent runs, to merge them.
	first := sort.Search(len(list), func(i int) bool { return list[i].Hi >= to.Lo })
	last := first
	var room [8]Run
	fresh, end := room[:0], to.Hi
	for ; last < len(list) && list[last].Lo <= end; last++ {
		old := list[last]
		if old.Lo < to.Lo {
			fresh = merged(fresh, old.part(old.Lo, min(old.Hi, to.Lo)))
		}
		if old.State == Captured && !all && old.Hi > to.Lo && old.Lo < end {
			part := old.part(max(old.Lo, to.Lo), min(old.Hi, end))
			fresh = merged(merged(fresh, to.part(to.Lo, part.Lo)), part)
			to.Lo = part.Hi
		}
		if old.Hi > end {
			fresh = merged(merged(fresh, to), old.part(max(old.Lo, end), old.Hi))
			to.Lo = end
		}
	}
	fresh = merged(fresh, to)
	return slices.Replace(list, first, last, fresh...)
}

// part returns the run of [lo, hi), a part of r.
func (r Run) part(lo, hi uint64) Run {
	r.Lo, r.Hi = lo, hi
	return r
}

// continues reports whether adjacent runs can be one.
func (r Run) continues(o Run) bool { return r.State == o.State && r.Since == o.Since }

// merged appends a run. If it merges freed runs, it keeps the stream of one of
// them, for explanations.
func merged(list []Run, r Run) []Run {
	if r.Lo >= r.Hi || r.State == Never {
		return list
	}
	if n := len(list); n > 0 && list[n-1].Hi == r.Lo && list[n-1].continues(r) {
		list[n-1].Hi = r.Hi
		return list
	}
	return append(list, r)
}

// Seek returns the first part of [lo, hi) with a matching state, which does not
// extend beyond its chunk.
func (p *Pieces) Seek(lo, hi uint64, fits func(State) bool) (part Run, found bool) {
	return p.seek(lo, hi, func(r Run) bool { return fits(r.State) })
}

func (p *Pieces) seek(lo, hi uint64, fits func(Run) bool) (part Run, found bool) {
	for lo < hi {
		c := lo / listBytes
		end := min(hi, (c+1)*listBytes)
		list := p.chunks[c]
		for i := sort.Search(len(list), func(i int) bool { return list[i].Hi > lo }); lo < end; i++ {
			if i == len(list) || list[i].Lo >= end {
				if none := (Run{Lo: lo, Hi: end}); fits(none) {
					return none, true
				}
				break
			}
			if none := (Run{Lo: lo, Hi: list[i].Lo}); list[i].Lo > lo && fits(none) {
				return none, true
			}
			if fits(list[i]) {
				return list[i], true
			}
			lo = list[i].Hi
		}
		lo = end
	}
	return Run{}, false
}

// Whole returns a complete run that chunks divide.
func (p *Pieces) Whole(part Run) Run {
	for part.Lo%listBytes == 0 && part.Lo > 0 {
		list := p.chunks[part.Lo/listBytes-1]
		if n := len(list); n == 0 || list[n-1].Hi != part.Lo || !list[n-1].continues(part) {
			break
		}
		part.Lo = list[len(list)-1].Lo
	}
	for part.Hi%listBytes == 0 && part.Hi/listBytes < uint64(len(p.chunks)) {
		list := p.chunks[part.Hi/listBytes]
		if len(list) == 0 || list[0].Lo != part.Hi || !list[0].continues(part) {
			break
		}
		part.Hi = list[0].Hi
	}
	return part
}

// Barred returns the reason why [lo, hi) of the block, which begins at the
// address base, must not be used, or "".
func (p *Pieces) Barred(block fmt.Stringer, base, lo, hi uint64) string {
	if p == nil || !p.Audited {
		return ""
	}
	part, found := p.Seek(lo, hi, func(s State) bool { return !s.Usable() })
	if !found {
		return ""
	}
	return p.Says(block, base, part)
}

// AllocatedAfter returns the first piece in [lo, hi) that was allocated after a time, in the count of [Run.Since].
func (p *Pieces) AllocatedAfter(at, lo, hi uint64) (piece Run, found bool) {
	if p == nil {
		return Run{}, false
	}
	part, found := p.seek(lo, hi, func(r Run) bool { return r.Since > at })
	if !found {
		return Run{}, false
	}
	return p.Whole(part), true
}

// Replaced describes a piece that a graph uses, but that was allocated after the capture.
func (r Run) Replaced(block fmt.Stringer, base uint64) string {
	return fmt.Sprintf("which lies in %d bytes at %#x of %v that were allocated after the graph captured the operation: "+
		"the memory that it captured was freed, and is another allocation's now: keep memory that a graph uses until the graph is closed",
		r.Hi-r.Lo, base+r.Lo, block)
}

// Says describes a part that is not allocated.
func (p *Pieces) Says(block fmt.Stringer, base uint64, part Run) string {
	if part.State == Never {
		return fmt.Sprintf("which includes bytes from %#x on of %v that the allocator has not allocated", base+part.Lo, block)
	}
	part = p.Whole(part)
	return fmt.Sprintf("which lies in %d bytes at %#x of %v that were freed by MemFreed on stream %#x",
		part.Hi-part.Lo, base+part.Lo, block, uintptr(part.By))
}
