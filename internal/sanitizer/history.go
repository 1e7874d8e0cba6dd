package sanitizer

import (
	"fmt"
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Host is the stream handle of uses by the host.
const Host = ^cudadrv.Stream(0)

// An Access is a use of some bytes by one operation.
type Access struct {
	Slot   int
	Epoch  uint64
	Op     string
	Stream cudadrv.Stream
	Where  *Place // nil if it is unknown
}

func (a Access) String() string {
	if a.Where == nil {
		return fmt.Sprintf("%s on %s", a.Op, NameOf(a.Stream))
	}
	return fmt.Sprintf("%s on %s (%v)", a.Op, NameOf(a.Stream), a.Where)
}

// NameOf returns the name of a stream, or "the host".
func NameOf(s cudadrv.Stream) string {
	if s == Host {
		return "the host"
	}
	return fmt.Sprintf("stream %#x", uintptr(s))
}

// A span is a range of a block's bytes with the same accesses: the last write,
// and later reads, at most one for each stream.
type span struct {
	lo, hi uint64
	write  Access // Op is "" if there was none
	reads  []Access
}

// A History holds the spans of a block in one list for each chunkBytes, so that
// memory used in thousands of small pieces has short lists.
type History struct{ chunks []spans }

// spans are sorted. Bytes outside of all spans were not used.
type spans []span

const (
	chunkBytes = 256 << 10
	// The maximum number of spans of a chunk: two for each piece of the smallest
	// size of an allocator. Beyond it, spans that the host has waited for are
	// dropped, then the first ones: a race may be missed, but never reported falsely.
	maxSpans = 2 * chunkBytes / 512
)

// Add records an access to [lo, hi) and returns an earlier access that conflicts
// with it because it does not precede it.
func (h *History) Add(now *Stamp, host Clock, by Access, lo, hi uint64, write bool) (conflict Access, found bool) {
	for lo < hi {
		c := int(lo / chunkBytes)
		for len(h.chunks) <= c {
			h.chunks = append(h.chunks, nil)
		}
		end := min(hi, uint64(c+1)*chunkBytes)
		if a, bad := h.chunks[c].add(now, by, lo, end, write); bad {
			conflict, found = a, true
		}
		h.chunks[c].bound(host)
		lo = end
	}
	return conflict, found
}

func (h *spans) add(now *Stamp, by Access, lo, hi uint64, write bool) (conflict Access, found bool) {
	list := *h
	first := sort.Search(len(list), func(i int) bool { return list[i].hi > lo })
	fresh := make([]span, 0, 4)
	last, at := first, lo
	// Merge neighbours with the same accesses. For example, consecutive columns of
	// a matrix form one span for each row.
	if first > 0 {
		first--
		fresh = append(fresh, list[first])
	}
	for ; last < len(list) && list[last].lo < hi; last++ {
		s := list[last]
		if c, bad := s.conflict(now, write); bad {
			conflict, found = c, true
		}
		if s.lo < lo { // the access covers only the rest
			fresh = appendSpan(fresh, s.part(s.lo, lo))
		}
		if s.lo > at {
			fresh = appendSpan(fresh, span{lo: at, hi: s.lo}.with(now, by, write))
		}
		fresh = appendSpan(fresh, s.part(max(s.lo, lo), min(s.hi, hi)).with(now, by, write))
		if s.hi > hi {
			fresh = appendSpan(fresh, s.part(hi, s.hi))
		}
		at = s.hi
	}
	if at < hi {
		fresh = appendSpan(fresh, span{lo: at, hi: hi}.with(now, by, write))
	}
	if last < len(list) {
		fresh = appendSpan(fresh, list[last])
		last++
	}
	h.replace(first, last, fresh)
	return conflict, found
}

// replace replaces the spans from first to before last. Most accesses leave their number
// as it is, and then the rest of a long list stays in place.
func (h *spans) replace(first, last int, fresh []span) {
	if len(fresh) == last-first {
		copy((*h)[first:], fresh)
		return
	}
	*h = slices.Replace(*h, first, last, fresh...)
}

// part returns the accesses of the bytes from lo to hi. Lists of reads do not change, so
// the parts of a span share theirs.
func (s span) part(lo, hi uint64) span {
	s.lo, s.hi = lo, hi
	return s
}

func appendSpan(list []span, s span) []span {
	if n := len(list); n > 0 && list[n-1].hi == s.lo && list[n-1].write == s.write && slices.Equal(list[n-1].reads, s.reads) {
		list[n-1].hi = s.hi
		return list
	}
	return append(list, s)
}

func (s span) conflict(now *Stamp, write bool) (Access, bool) {
	if s.write.Op != "" && !now.after(s.write.Slot, s.write.Epoch) {
		return s.write, true
	}
	if write {
		for _, r := range s.reads {
			if !now.after(r.Slot, r.Epoch) {
				return r, true
			}
		}
	}
	return Access{}, false
}

func (s span) with(now *Stamp, by Access, write bool) span {
	if write {
		return span{lo: s.lo, hi: s.hi, write: by}
	}
	// Drop reads that precede this one: an operation that follows this one
	// follows them, too.
	reads := make([]Access, 0, len(s.reads)+1)
	for _, r := range s.reads {
		if !now.after(r.Slot, r.Epoch) {
			reads = append(reads, r)
		}
	}
	s.reads = append(reads, by)
	return s
}

// bound limits the length of the list. It removes at least a quarter, so that a
// long list is not processed at each use.
func (h *spans) bound(host Clock) {
	if len(*h) <= maxSpans {
		return
	}
	*h = slices.DeleteFunc(*h, func(s span) bool { return s.before(host) })
	if n := len(*h) - maxSpans/2; n > maxSpans/4 {
		*h = slices.Delete(*h, 0, n)
	}
}

func (s span) before(host Clock) bool {
	if s.write.Op != "" && host.At(s.write.Slot) < s.write.Epoch {
		return false
	}
	return !slices.ContainsFunc(s.reads, func(r Access) bool { return host.At(r.Slot) < r.Epoch })
}

// Unfinished returns an access that the host has not waited for.
func (h *History) Unfinished(host Clock) (Access, bool) {
	return h.UnfinishedIn(host, 0, uint64(len(h.chunks))*chunkBytes)
}

// UnfinishedIn is Unfinished for the bytes in [lo, hi).
func (h *History) UnfinishedIn(host Clock, lo, hi uint64) (Access, bool) {
	for c := lo / chunkBytes; c < uint64(len(h.chunks)) && c*chunkBytes < hi; c++ {
		for _, s := range h.chunks[c] {
			if s.hi <= lo || s.lo >= hi {
				continue
			}
			if s.write.Op != "" && host.At(s.write.Slot) < s.write.Epoch {
				return s.write, true
			}
			for _, r := range s.reads {
				if host.At(r.Slot) < r.Epoch {
					return r, true
				}
			}
		}
	}
	return Access{}, false
}
