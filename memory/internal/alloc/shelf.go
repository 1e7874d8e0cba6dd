package alloc

import "math/bits"

// A shelf has the free blocks of one arena and kind, and finds the best block for a
// request: the smallest block that is large enough, and among equal ones the first by
// segment and address.
//
// Each small size has its own list. Larger sizes have sixteen lists between two powers
// of two, so that most lists have a single block. One bit per list says whether the
// list has blocks, and one bit per word of these bits says whether the word is not
// zero.
type shelf struct {
	lists    []list // nil before the first block
	words    [classWords]uint64
	top      uint64
	searches uint64 // number of searches
	changes  uint64 // number of changes
}

const (
	exactClasses = smallMost / unit // of 1, 2, 3... units
	octaves      = 47 - 20          // above them, up to addressEnd
	classes      = exactClasses + 16*octaves
	classWords   = (classes + 63) / 64 // at most 64, the bits of top
)

// class returns the index of the list for a size.
func class(size uint64) int {
	if size <= smallMost {
		return int(size/unit) - 1
	}
	octave := bits.Len64(size) - 1
	part := int(size >> (octave - 4) & 15)
	return min(exactClasses+16*(octave-20)+part, classes-1)
}

func (s *shelf) add(b block) {
	x := b.slot()
	s.put(entry{uint64(x.size) * unit, b.key()})
	x.setOver(s.searches)
}

func (s *shelf) remove(b block) { s.drop(entry{b.size(), b.key()}) }

// put adds an entry.
func (s *shelf) put(e entry) {
	if s.lists == nil {
		s.lists = make([]list, classes)
	}
	s.changes++
	c := class(e.size)
	s.lists[c].insert(e)
	s.words[c/64] |= 1 << (c % 64)
	s.top |= 1 << (c / 64)
}

// drop removes an entry.
func (s *shelf) drop(e entry) {
	s.changes++
	c := class(e.size)
	s.lists[c].remove(e)
	if !s.lists[c].empty() {
		return
	}
	if s.words[c/64] &^= 1 << (c % 64); s.words[c/64] == 0 {
		s.top &^= 1 << (c / 64)
	}
}

// swap replaces an entry, which may be empty, by another one, which often belongs at the
// same place.
func (s *shelf) swap(old, e entry) {
	if old.size == 0 {
		s.put(e)
		return
	}
	if c := class(old.size); c == class(e.size) && s.lists[c].replace(old, e) {
		s.changes++
		return
	}
	s.drop(old)
	s.put(e)
}

// age returns the number of searches since the block became free.
func (s *shelf) age(b block) uint64 { return s.searches - b.slot().over47() }

// best returns the best entry of at least size bytes.
func (s *shelf) best(size uint64) (e entry, ok bool) {
	s.searches++
	if s.top == 0 {
		return entry{}, false
	}
	c := class(size)
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

// after returns the entry after e.
func (s *shelf) after(e entry) (next entry, ok bool) {
	c := class(e.size)
	if next, ok := s.lists[c].after(e); ok {
		return next, true
	}
	if c = s.following(c); c < 0 {
		return entry{}, false
	}
	return s.lists[c].first(), true
}

// following returns the first class after c that has blocks, or -1.
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

// from returns the entries of at least size bytes, sorted by size.
func (s *shelf) from(size uint64) (list []entry) {
	if s.lists == nil {
		return nil
	}
	for c := class(size); c >= 0; c = s.following(c) {
		for _, e := range s.lists[c].all() {
			if e.size >= size {
				list = append(list, e)
			}
		}
	}
	return list
}

// largest returns the bytes of the largest block, or 0.
func (s *shelf) largest() uint64 {
	if s.top == 0 {
		return 0
	}
	w := bits.Len64(s.top) - 1
	return s.lists[w*64+bits.Len64(s.words[w])-1].last().size
}

// blocks returns the free blocks of a kind of at least size bytes, sorted by size.
func (a *Arena) blocks(k kind, size uint64) (list []block) {
	for _, e := range a.shelves[k].from(size) {
		list = append(list, a.domain.block(k, e.key))
	}
	return list
}
