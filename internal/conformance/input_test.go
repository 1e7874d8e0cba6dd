package conformance

import (
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A draw selects the distribution of inputs.
type draw uint8

const (
	drawBytes   draw = iota // any bits
	drawTerms               // floats to add and to compare
	drawFactors             // floats to multiply
	drawSmall               // integers small enough that a sum of 8 fits into any type
)

// drawOf returns the distribution for a reduction. Integers may wrap around,
// except for an average, which would then be undefined.
func drawOf(t ncclapi.DType, op ncclapi.RedOp) draw {
	_, float := layouts[t]
	switch {
	case float && op == ncclapi.Prod:
		return drawFactors
	case float:
		return drawTerms
	case op == ncclapi.Avg:
		return drawSmall
	}
	return drawBytes
}

// mostExact is the maximum number of ranks for which every second element is reduced without rounding.
const mostExact = 8

// A source generates the inputs of all ranks from a seed. It can generate any
// part independently, so that a rank knows the inputs of all other ranks.
type source struct {
	seed  uint64
	t     ncclapi.DType
	draw  draw
	space []byte
}

// word is the number of bytes generated at a time.
const word = 8

// part returns bytes lo to hi of a rank's input. The result is valid until the next call.
func (s *source) part(rank, lo, hi int) []byte {
	first := lo / (2 * word) * (2 * word) // an even element, for shape
	n := (hi - first + word - 1) / word * word
	if cap(s.space) < n || s.space == nil {
		s.space = make([]byte, n)
	}
	s.fill(s.space[:n], rank, first)
	return s.space[lo-first : hi-first]
}

// fill generates whole words, starting at byte from.
func (s *source) fill(p []byte, rank, from int) {
	// This is SplitMix64, which can generate the nth number directly.
	const step = 0x9e3779b97f4a7c15
	state := (s.seed ^ uint64(rank+1)<<48) * 0xd1342543de82ef95
	state += uint64(from/word) * step
	words := as[uint64](p)
	for i := range words {
		state += step
		x := (state ^ state>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		words[i] = x ^ x>>31
	}
	switch {
	case s.draw == drawBytes:
	case s.t.Size() == 1:
		shape(as[uint8](p), s.t, s.draw)
	case s.t.Size() == 2:
		shape(as[uint16](p), s.t, s.draw)
	case s.t.Size() == 4:
		shape(as[uint32](p), s.t, s.draw)
	default:
		shape(as[uint64](p), s.t, s.draw)
	}
}

// shape turns random bits into terms or factors. Elements at even indices use the
// whole mantissa: terms from 1/4 to 4 and factors from 1 to 2, of both signs.
// Elements at odd indices are short integers or powers of two, so that up to
// mostExact elements are combined without rounding in any order. They detect
// errors in small types, whose rounding tolerance is large.
func shape[T unsigned](p []T, t ncclapi.DType, d draw) {
	l, float := layouts[t]
	if !float {
		for i := range p {
			p[i] &= 15
		}
		return
	}
	// The random exponent selects the bits of the fraction to keep and the new
	// exponent.
	var keep, put [2][8]T
	m, fraction := l.mantissa, uint64(1)<<l.mantissa-1
	steps := max(1, m-5) // leaves space for factors of tests
	for pick := range 8 {
		e, kept := [2]int{}, [2]uint64{fraction, 0}
		if d == drawTerms {
			e = [2]int{pick%4 - 2, pick % steps}
			kept[1] = fraction &^ (1<<(m-e[1]) - 1)
		} else {
			e = [2]int{0, pick%3 - 1}
		}
		for odd := range 2 {
			keep[odd][pick] = T(1<<(l.exponent+m) | kept[odd])
			put[odd][pick] = T((l.bias() + e[odd]) << m)
		}
	}
	for i, x := range p {
		pick := x >> m & 7
		p[i] = x&keep[i&1][pick] | put[i&1][pick]
	}
}

// input returns count elements to reduce.
func input(t ncclapi.DType, op ncclapi.RedOp, count int, seed uint64) []byte {
	s := source{seed: seed, t: t, draw: drawOf(t, op)}
	return s.part(0, 0, count*int(t.Size()))
}

// pattern returns n random bytes.
func pattern(n int, seed uint64) []byte {
	s := source{seed: seed, t: ncclapi.Uint8}
	return s.part(0, 0, n)
}
