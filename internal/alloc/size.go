package alloc

import "math/bits"

// The sizes are those of torch's allocator.
const (
	unit         = 512      // every block is a multiple
	smallMost    = 1 << 20  // blocks up to this come from small segments
	smallSegment = 2 << 20  //
	largeSegment = 20 << 20 // for blocks that are not huge, if the settings say nothing else
	hugeLeast    = 10 << 20 // blocks from this on have a segment of their own
	hugeRound    = 2 << 20
	absurd       = 1 << 60           // no request is larger
	segmentMost  = 2<<40 - hugeRound // so that its units can be counted
)

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }

// kind says which of the two sorts of segments a block comes from.
type kind uint8

const (
	small kind = iota
	large
	kinds
)

// kindOf returns the kind of a rounded size.
func kindOf(size uint64) kind {
	if size <= smallMost {
		return small
	}
	return large
}

// round returns the size of the block for a request.
func (s *Settings) round(n uint64) uint64 {
	if n < unit {
		return unit
	}
	// The table begins at 1 MiB.
	d := s.Divisions[min(max(bits.Len64(n)-21, 0), len(s.Divisions)-1)]
	if d > 1 && n > unit*d {
		return nextDivision(n, d)
	}
	return roundUp(n, unit)
}

// nextDivision rounds n up to one of the d parts between two powers of two.
func nextDivision(n, d uint64) uint64 {
	if powerOfTwo(n) {
		return n
	}
	floor := uint64(1) << (bits.Len64(n) - 1)
	step := floor / d
	if step == 0 {
		return floor * 2
	}
	return roundUp(n, step)
}

// segment returns the size of the segment that is made for a rounded size.
func (s *Settings) segment(size uint64) uint64 {
	switch {
	case size <= smallMost:
		return smallSegment
	case size < hugeLeast:
		return s.LargeSegment
	}
	return roundUp(size, hugeRound)
}
