package virtual

import (
	"fmt"
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// An access is the use of some bytes by one operation.
type access struct {
	slot   int
	epoch  uint64
	op     string
	stream cudadrv.Stream
}

func (a access) String() string { return fmt.Sprintf("%s on %s", a.op, nameOf(a.stream)) }

func nameOf(s cudadrv.Stream) string {
	if s == theHost {
		return "the host"
	}
	return fmt.Sprintf("stream %#x", uintptr(s))
}

// A span is a range of a block's bytes with the same accesses: the last write,
// and the reads since, at most one for each stream.
type span struct {
	lo, hi uint64
	write  access // op is "" when there was none
	reads  []access
}

// A history has the spans of a block, in lists for each chunkBytes of it: what is
// used in thousands of small pieces has a short list at each of them.
type history struct{ chunks []spans }

// spans are in order; bytes in none were not used.
type spans []span

const (
	chunkBytes = 2 << 20
	// The most spans of a chunk, two for each piece of the smallest size that
	// allocators give out. Beyond it the ones are forgotten that the host has
	// waited for, and then the first: a race may be missed, none is made up.
	maxSpans = 2 * chunkBytes / 512
)

// add records an access to [lo, hi) and returns an earlier one that conflicts
// with it and that now does not come after.
func (h *history) add(now *stamp, host clock, by access, lo, hi uint64, write bool) (conflict access, found bool) {
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

func (h *spans) add(now *stamp, by access, lo, hi uint64, write bool) (conflict access, found bool) {
	h.split(lo)
	h.split(hi)
	first := sort.Search(len(*h), func(i int) bool { return (*h)[i].lo >= lo })
	fresh := make([]span, 0, 4)
	last, at := first, lo
	// Neighbours that were used alike become one: the columns of a matrix, one after the
	// other, are a span for each row.
	if first > 0 {
		first--
		fresh = append(fresh, (*h)[first])
	}
	for ; last < len(*h) && (*h)[last].lo < hi; last++ {
		s := (*h)[last]
		if c, bad := s.conflict(now, write); bad {
			conflict, found = c, true
		}
		if s.lo > at {
			fresh = appendSpan(fresh, span{lo: at, hi: s.lo}.with(now, by, write))
		}
		fresh = appendSpan(fresh, s.with(now, by, write))
		at = s.hi
	}
	if at < hi {
		fresh = appendSpan(fresh, span{lo: at, hi: hi}.with(now, by, write))
	}
	if last < len(*h) {
		fresh = appendSpan(fresh, (*h)[last])
		last++
	}
	*h = slices.Replace(*h, first, last, fresh...)
	return conflict, found
}

// split makes a border at p.
func (h *spans) split(p uint64) {
	i := sort.Search(len(*h), func(i int) bool { return (*h)[i].hi > p })
	if i == len(*h) || (*h)[i].lo >= p {
		return
	}
	right := (*h)[i]
	right.lo, right.reads = p, slices.Clone(right.reads)
	(*h)[i].hi = p
	*h = slices.Insert(*h, i+1, right)
}

func appendSpan(list []span, s span) []span {
	if n := len(list); n > 0 && list[n-1].hi == s.lo && list[n-1].write == s.write && slices.Equal(list[n-1].reads, s.reads) {
		list[n-1].hi = s.hi
		return list
	}
	return append(list, s)
}

func (s span) conflict(now *stamp, write bool) (access, bool) {
	if s.write.op != "" && !now.after(s.write.slot, s.write.epoch) {
		return s.write, true
	}
	if write {
		for _, r := range s.reads {
			if !now.after(r.slot, r.epoch) {
				return r, true
			}
		}
	}
	return access{}, false
}

func (s span) with(now *stamp, by access, write bool) span {
	if write {
		return span{lo: s.lo, hi: s.hi, write: by}
	}
	// Reads that this one comes after need not be remembered: what comes after
	// this one comes after them.
	reads := make([]access, 0, len(s.reads)+1)
	for _, r := range s.reads {
		if !now.after(r.slot, r.epoch) {
			reads = append(reads, r)
		}
	}
	s.reads = append(reads, by)
	return s
}

// bound keeps the list small. What goes is a quarter at least, so that a long list
// is not searched at each use.
func (h *spans) bound(host clock) {
	if len(*h) <= maxSpans {
		return
	}
	*h = slices.DeleteFunc(*h, func(s span) bool { return s.before(host) })
	if n := len(*h) - maxSpans/2; n > maxSpans/4 {
		*h = slices.Delete(*h, 0, n)
	}
}

func (s span) before(host clock) bool {
	if s.write.op != "" && host.at(s.write.slot) < s.write.epoch {
		return false
	}
	return !slices.ContainsFunc(s.reads, func(r access) bool { return host.at(r.slot) < r.epoch })
}

// unfinished returns an access that the host has not waited for.
func (h *history) unfinished(host clock) (access, bool) {
	for _, c := range h.chunks {
		for _, s := range c {
			if s.write.op != "" && host.at(s.write.slot) < s.write.epoch {
				return s.write, true
			}
			for _, r := range s.reads {
				if host.at(r.slot) < r.epoch {
					return r, true
				}
			}
		}
	}
	return access{}, false
}
