package element

import "math"

// FMA returns a*b+c rounded once, as the instruction of GPUs does. The product is exact in
// float64. Rounding the sum to odd, instead of to nearest, makes the second rounding correct.
//
//go:norace
func FMA(a, b, c float32) float32 {
	p, q := float64(a)*float64(b), float64(c)
	s := p + q
	v := s - p
	lost := (p - (s - v)) + (q - v)
	if lost != 0 && math.Float64bits(s)&1 == 0 {
		s = math.Nextafter(s, math.Copysign(math.Inf(1), lost))
	}
	return float32(s)
}
