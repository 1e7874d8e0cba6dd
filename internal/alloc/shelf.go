package alloc

import "math/bits"

// A shelf has the free blocks of one arena and kind, and finds the best for a
// request: the smallest that is large enough, and among equal ones the first by
// segment and address. (The address within one segment; segments count in the
// order in which they were made, so that the same program places its blocks in
// the same way on every machine.)
//
// Blocks of the same number of units share a list, up to a number; the last list
// has all larger ones too. A bit for each list says whether it has any, and a bit
// for each word of those whether it has any.
type shelf struct {
	lists    []list // nil before the first block
	words    []uint64
	top      uint64
	searches uint32 // how often a block was looked for
}

// shelfLists is the number of lists of a shelf of each kind: small segments have
// blocks of few different sizes, so that most lists are a single block. It is at
// most 64 words of bits.
var shelfLists = [kinds]int{small: smallSegment / unit, large: 1}

func (s *shelf) init(k kind) {
	if s.lists != nil {
		return
	}
	s.lists = make([]list, shelfLists[k])
	s.words = make([]uint64, (len(s.lists)+63)/64)
}

func (s *shelf) class(size uint64) int { return int(min(size/unit, uint64(len(s.lists)))) - 1 }

func (s *shelf) add(b *block) {
	s.init(b.segment.kind)
	c := s.class(b.size)
	s.lists[c].insert(b)
	s.words[c/64] |= 1 << (c % 64)
	s.top |= 1 << (c / 64)
	b.shelved = s.searches
}

func (s *shelf) remove(b *block) {
	c := s.class(b.size)
	s.lists[c].remove(b)
	if !s.lists[c].empty() {
		return
	}
	if s.words[c/64] &^= 1 << (c % 64); s.words[c/64] == 0 {
		s.top &^= 1 << (c / 64)
	}
}

// best returns the best block of at least size bytes, or nil.
func (s *shelf) best(size uint64) *block {
	s.searches++
	if s.top == 0 {
		return nil
	}
	c := s.class(size)
	if s.words[c/64]&(1<<(c%64)) != 0 {
		if b := s.lists[c].least(size); b != nil {
			return b
		}
	}
	if c = s.following(c); c < 0 {
		return nil
	}
	return s.lists[c].first()
}

// following returns the first class behind c that has blocks, or -1.
func (s *shelf) following(c int) int {
	w := c / 64
	if later := s.words[w] & (^uint64(1) << (c % 64)); later != 0 {
		return w*64 + bits.TrailingZeros64(later)
	}
	words := s.top & (^uint64(1) << w)
	if words == 0 {
		return -1
	}
	w = bits.TrailingZeros64(words)
	return w*64 + bits.TrailingZeros64(s.words[w])
}

// each calls fn for every block; fn may remove the block that it is given.
func (s *shelf) each(fn func(*block)) {
	var all []*block
	for _, l := range s.lists {
		for _, c := range l.chunks {
			for _, e := range c {
				all = append(all, e.b)
			}
		}
	}
	for _, b := range all {
		fn(b)
	}
}
