package perf

import (
	"math"

	"github.com/gochorus/chorus/memory"
)

// A pattern is the data of one element type and reduction: codes, what they are in
// the type, and what the codes of all ranks together are.
type pattern struct {
	codes     int      // of an element: 0 to codes-1
	limit     int      // ranks from here on have only zeros
	op        uint32   // how codes are reduced; see pattern.cu
	weights   uint32   // 1 where odd ranks count twice
	values    []uint64 // the bits of a code
	results   []uint64 // the bits of reduced codes
	tolerance uint64   // by how much the bits of a result may differ
}

// How codes are reduced.
const (
	codeSum uint32 = iota
	codeMin
	codeMax
)

// mostCodes bounds the tables.
const mostCodes = 2048

// newPattern makes the data for a reduction over n ranks; Moves is none.
func newPattern(t memory.DType, op Reduction, n int) *pattern {
	p := &pattern{limit: n, codes: exact(t) + 1}
	value := func(code int) float64 { return float64(code) }
	result := value
	switch op {
	case Min:
		p.op = codeMin
	case Max:
		p.op = codeMax
	case Prod:
		p.divide(exponents(t), n)
		value = func(code int) float64 { return math.Ldexp(1, code) }
		result = value
	case Sum:
		p.divide(exact(t), n)
	case MulSum:
		p.weights = 1
		p.divide(exact(t)/2, n)
	case Avg:
		p.divide(exact(t), n)
		result = func(sum int) float64 { return float64(sum) / float64(n) }
		if n&(n-1) != 0 && isFloat(t) {
			p.tolerance = 2 // the inverse of n is rounded, and then the products
		}
	}
	for c := range p.codes {
		p.values = append(p.values, bits(t, value(c)))
	}
	last := p.codes - 1
	if p.op == codeSum {
		last = last * p.limit << p.weights
	}
	for c := range last + 1 {
		p.results = append(p.results, bits(t, result(c)))
	}
	return p
}

// divide gives each of n ranks codes that together are at most most.
func (p *pattern) divide(most, n int) {
	each := max(most/n, 1)
	p.codes, p.limit = each+1, min(n, max(most/each, 1))
}

// exact is up to where a type has every integer.
func exact(t memory.DType) int {
	switch t {
	case memory.Int8:
		return 127
	case memory.Uint8:
		return 255
	case memory.BFloat16T:
		return 256
	case memory.Float8E4M3T:
		return 16
	case memory.Float8E5M2T:
		return 8
	}
	return mostCodes
}

// exponents is up to where a type has every power of two.
func exponents(t memory.DType) int {
	switch t {
	case memory.Int8:
		return 6
	case memory.Uint8:
		return 7
	case memory.Float8E4M3T:
		return 8
	case memory.Float16T, memory.Float8E5M2T:
		return 15
	}
	return 30
}

func isFloat(t memory.DType) bool {
	switch t {
	case memory.Float8E4M3T, memory.Float8E5M2T, memory.Float16T, memory.BFloat16T, memory.Float32, memory.Float64:
		return true
	}
	return false
}
