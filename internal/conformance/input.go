package conformance

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// A draw is what inputs are made of.
type draw uint8

const (
	drawBytes   draw = iota // any bits
	drawTerms               // floats to add and to compare
	drawFactors             // floats to multiply
	drawSmall               // integers of which even the sum of 8 fits into any type
)

// drawOf returns what a reduction wants. Integers wrap around, but a sum that
// has done so has no average.
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

// mostExact is the number of ranks up to which every second element is exact.
const mostExact = 8

// inputBlock is how many bytes are drawn at a time: any block of any rank's
// input can be had without those before it.
const inputBlock = 64 << 10

// A source draws the inputs of all ranks from a seed. A rank can so have what
// the others sent, without having received it.
type source struct {
	seed  uint64
	t     ncclapi.DType
	draw  draw
	block []byte // for part
}

// part is bytes lo to hi of a rank's input, at most inputBlock of them. It is
// good until the next call.
func (s *source) part(rank, lo, hi int) []byte {
	if s.block == nil {
		s.block = make([]byte, 2*inputBlock)
	}
	first := lo / inputBlock
	for b := first; b*inputBlock < hi; b++ {
		s.fill(s.block[(b-first)*inputBlock:][:inputBlock], rank, b)
	}
	return s.block[lo-first*inputBlock : hi-first*inputBlock]
}

// fill draws one block or its beginning.
func (s *source) fill(p []byte, rank, block int) {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[0:], s.seed)
	binary.LittleEndian.PutUint64(key[8:], uint64(rank)<<32|uint64(block))
	_, _ = rand.NewChaCha8(key).Read(p)
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

// shape makes terms or factors of random bits. Elements at even places use the
// whole mantissa: terms from 1/4 to 4 and factors from 1 to 2, of both signs.
// Those at odd places are such that up to mostExact of them are combined
// without rounding in whatever order: short integers and powers of two. With
// them a small type, for which rounding excuses much, has to be right as well.
func shape[T unsigned](p []T, t ncclapi.DType, d draw) {
	l, float := layouts[t]
	if !float {
		for i := range p {
			p[i] &= 15
		}
		return
	}
	m, bias := uint64(l.mantissa), uint64(l.bias())
	signBit, fraction := uint64(1)<<(l.exponent+l.mantissa), uint64(1)<<m-1
	steps := uint64(max(1, l.mantissa-5)) // leaves room for factors of tests, too
	for i, x := range p {
		bits := uint64(x)
		pick, f, e := bits&^signBit>>m, bits&fraction, bias
		switch even := i%2 == 0; {
		case even && d == drawTerms:
			e = bias - 2 + pick%4
		case even:
		case d == drawTerms:
			drop := m - pick%steps
			e, f = bias+pick%steps, f>>drop<<drop
		default:
			e, f = bias-1+pick%3, 0
		}
		p[i] = T(bits&signBit | e<<m | f)
	}
}

// whole is count elements of a rank's input.
func (s *source) whole(rank, count int) []byte {
	p := make([]byte, count*int(s.t.Size()))
	for lo := 0; lo < len(p); lo += inputBlock {
		s.fill(p[lo:min(lo+inputBlock, len(p))], rank, lo/inputBlock)
	}
	return p
}

// input is count elements to reduce.
func input(t ncclapi.DType, op ncclapi.RedOp, count int, seed uint64) []byte {
	s := source{seed: seed, t: t, draw: drawOf(t, op)}
	return s.whole(0, count)
}

// pattern is n random bytes.
func pattern(n int, seed uint64) []byte {
	s := source{seed: seed, t: ncclapi.Uint8}
	return s.whole(0, n)
}
