package rng

import (
	"math"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The package documentation describes the common properties of all fills.

// Float is an element type of the continuous distributions.
type Float interface {
	memory.Float16Bits | memory.BFloat16Bits | float32 | float64
}

// Number is an element type with arithmetic in torch.
type Number interface {
	Float | int8 | uint8 | int16 | int32 | int64
}

// Uniform fills x with values in [from, to) (torch.Tensor.uniform_). It requires
// from <= to, and T must represent both and their difference.
func Uniform[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], from, to float64) error {
	f := formatOf[T]()
	if err := checkUniform(f, from, to); err != nil {
		return err
	}
	from, to = f.round(from), f.round(to)
	return run(g, s, x, uniform, number(from), number(to), number(f.minus(to, from)))
}

// Normal fills x with normally distributed values (torch.Tensor.normal_; with a slice as mean or
// std, torch.normal). It requires std >= 0. The numbers of a slice are not
// checked: a negative std acts like a positive one.
func Normal[T Float, M, S Param[T]](g *Generator, s *stream.Stream, x memory.Slice[T], mean M, std S) error {
	m, d := paramOf[T](mean), paramOf[T](std)
	if !d.isSlice() && !(d.number >= 0) {
		return refuse("normal", "std", d.number, ">= 0")
	}
	if m.isSlice() || d.isSlice() {
		return normalOf(g, s, x, m, d)
	}
	return run(g, s, x, normal, number(m.number), number(d.number), 0)
}

// LogNormal fills x with e to the power of normally distributed values
// (torch.Tensor.log_normal_). It requires std > 0.
func LogNormal[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], mean, std float64) error {
	if !(std > 0) {
		return refuse("log-normal", "std", std, "> 0")
	}
	return run(g, s, x, logNormal, number(mean), number(std), 0)
}

// Cauchy fills x with values of the Cauchy distribution (torch.Tensor.cauchy_). It requires
// sigma > 0.
func Cauchy[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], median, sigma float64) error {
	if !(sigma > 0) {
		return refuse("cauchy", "sigma", sigma, "> 0")
	}
	return run(g, s, x, cauchy, number(median), number(sigma), 0)
}

// Exponential fills x with exponentially distributed values with mean 1/lambda
// (torch.Tensor.exponential_). It requires lambda > 0. Values are positive unless
// they are too small for T.
func Exponential[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], lambda float64) error {
	if !(lambda > 0) {
		return refuse("exponential", "lambda", lambda, "> 0")
	}
	// Round the division like the kernel.
	scale := -1 / lambda
	if !formatOf[T]().wide {
		scale = float64(-1 / float32(lambda))
	}
	return run(g, s, x, exponential, number(scale), 0, 0)
}

// Bernoulli fills x with 1 or true with probability p, and otherwise with 0 or
// false (torch.Tensor.bernoulli_). It requires 0 <= p <= 1. In a slice, which torch checks on the
// device, smaller numbers and NaN give 0, and larger numbers give 1.
func Bernoulli[T Number | bool, P Param[T]](g *Generator, s *stream.Stream, x memory.Slice[T], p P) error {
	q := paramOf[T](p)
	if q.isSlice() {
		return bernoulliOf(g, s, x, q)
	}
	if !(q.number >= 0 && q.number <= 1) {
		return refuse("bernoulli", "p", q.number, "0 <= p <= 1")
	}
	return run(g, s, x, bernoulli, number(q.number), 0, 0)
}

// Geometric fills x with the number of trials up to the first success, if each
// trial succeeds with probability p (torch.Tensor.geometric_). It requires 0 < p
// < 1. If T cannot represent a value, the element is undefined.
func Geometric[T Number](g *Generator, s *stream.Stream, x memory.Slice[T], p float64) error {
	if !(p > 0 && p < 1) {
		return refuse("geometric", "p", p, "0 < p < 1")
	}
	return run(g, s, x, geometric, number(p), 0, 0)
}

// Random fills x with integers from 0 to the largest value of an integer type, or
// to 2^d for a floating-point type with d significand bits (torch.Tensor.random_
// without bounds).
func Random[T Number | bool | uint16 | uint32](g *Generator, s *stream.Stream, x memory.Slice[T]) error {
	return run(g, s, x, random, 0, 0, 0)
}

// RandomFromTo fills x with integers in [from, to) (torch.Tensor.random_ with
// bounds). It requires from < to, and T must represent from and to-1. If a
// floating-point type does not represent a bound exactly, the bound moves inward.
func RandomFromTo[T Number | bool | uint16 | uint32 | uint64](g *Generator, s *stream.Stream, x memory.Slice[T], from, to int64) error {
	from, to, err := checkFromTo(formatOf[T](), from, to)
	if err != nil {
		return err
	}
	width := uint64(to) - uint64(from)
	d := randomNear
	if width >= wideRange {
		d = randomFar
	}
	return run(g, s, x, d, width, uint64(from), 0)
}

// wideRange is the minimum range for 64-bit draws. As in torch, smaller ranges use 32
// bits; for larger ones the remainder of 32 bits would not be nearly uniform.
const wideRange = 1 << 28

// number encodes a floating-point parameter.
func number(v float64) uint64 { return math.Float64bits(v) }
