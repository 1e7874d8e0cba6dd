package alloc

import "math/bits"

// A shelf has the free blocks of one arena and kind, and finds the best for a
// request: the smallest that is large enough, and among equal ones the first by
// segment and address.
//
// Blocks of the same number of units share a list, up to a number; the last list
// has all larger ones too. A bit for each list says whether it has any, and a bit
// for each word of those whether it has any.
type shelf struct {
	lists    []list // nil before the first block
	words    []uint64
	top      uint64
	searches uint64 // how often a block was looked for
}

// shelfLists is the number of lists of a shelf of each kind: small segments have
// blocks of few different sizes, so that most lists are a single block. It is at
// most 64 words of bits.
var shelfLists = [kinds]int{small: smallSegment / unit, large: 1}

func (s *shelf) init(k kind) {
	s.lists = make([]list, shelfLists[k])
	s.words = make([]uint64, (len(s.lists)+63)/64)
}

func (s *shelf) class(size uint64) int { return int(min(size/unit, uint64(len(s.lists)))) - 1 }

func (s *shelf) add(b block) {
	if s.lists == nil {
		s.init(b.s.kind)
	}
	size := b.size()
	c := s.class(size)
	s.lists[c].insert(entry{size, b.key()})
	s.words[c/64] |= 1 << (c % 64)
	s.top |= 1 << (c / 64)
	if b.s.kind == large {
		b.slot().setOver(s.searches)
	}
}

func (s *shelf) remove(b block) {
	size := b.size()
	c := s.class(size)
	s.lists[c].remove(entry{size, b.key()})
	if !s.lists[c].empty() {
		return
	}
	if s.words[c/64] &^= 1 << (c % 64); s.words[c/64] == 0 {
		s.top &^= 1 << (c / 64)
	}
}

// age returns how often the shelf was searched since a large block became free.
func (s *shelf) age(b block) uint64 { return s.searches - b.slot().over48() }

// best returns the best entry of at least size bytes.
func (s *shelf) best(size uint64) (e entry, ok bool) {
	s.searches++
	if s.top == 0 {
		return entry{}, false
	}
	c := s.class(size)
	if s.words[c/64]&(1<<(c%64)) != 0 {
		if e, ok := s.lists[c].least(size); ok {
			return e, true
		}
	}
	if c = s.following(c); c < 0 {
		return entry{}, false
	}
	return s.lists[c].first(), true
}

// after returns the entry behind e.
func (s *shelf) after(e entry) (next entry, ok bool) {
	c := s.class(e.size)
	if next, ok := s.lists[c].after(e); ok {
		return next, true
	}
	if c = s.following(c); c < 0 {
		return entry{}, false
	}
	return s.lists[c].first(), true
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

// all returns the entries in order of size.
func (s *shelf) all() (list []entry) {
	for _, l := range s.lists {
		for _, c := range l.chunks {
			list = append(list, c...)
		}
	}
	return list
}

// blocks returns the free blocks of a kind in order of size.
func (a *Arena) blocks(k kind) (list []block) {
	for _, e := range a.shelves[k].all() {
		list = append(list, a.domain.block(k, e.key))
	}
	return list
}
