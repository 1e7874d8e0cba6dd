package alloc

import "math/bits"

// The sizes of torch's allocator.
const (
	unit         = 512      // every block size is a multiple of it
	smallMost    = 1 << 20  // largest block in a small segment
	smallSegment = 2 << 20  //
	largeSegment = 20 << 20 // for blocks that are not huge, unless the settings say otherwise
	hugeLeast    = 10 << 20 // smallest block with its own segment
	hugeRound    = 2 << 20
	absurd       = 1 << 60           // larger requests fail
	segmentMost  = 2<<40 - hugeRound // so that the number of units fits
)

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }

// kind says which kind of segment a block comes from.
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

// round returns the block size for a request.
func (s *Settings) round(n uint64) uint64 {
	if n < unit {
		return unit
	}
	// Index 0 of the table is 1 MiB.
	d := s.Divisions[min(max(bits.Len64(n)-21, 0), len(s.Divisions)-1)]
	if d > 1 && n > unit*d {
		return nextDivision(n, d)
	}
	return roundUp(n, unit)
}

// nextDivision rounds n up to the next of d steps between two powers of two.
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

// segment returns the size of a new segment for a rounded size.
func (s *Settings) segment(size uint64) uint64 {
	switch {
	case size <= smallMost:
		return smallSegment
	case size < hugeLeast:
		return s.LargeSegment
	}
	return roundUp(size, hugeRound)
}
