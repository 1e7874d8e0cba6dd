package perf

import (
	"math"

	"github.com/gochorus/chorus/memory"
)

// A pattern is the test data of one element type and reduction: codes, the value
// of each code in the type, and the values of reduced codes.
type pattern struct {
	codes     int      // number of codes: elements have codes 0 to codes-1
	limit     int      // ranks from here on contribute zeros
	op        uint32   // reduction of codes; see pattern.cu
	weights   uint32   // 1 if odd ranks count twice
	values    []uint64 // the bits of each code
	results   []uint64 // the bits of each reduced code
	tolerance uint64   // allowed difference of the bits of a result
}

// Reductions of codes.
const (
	codeSum uint32 = iota
	codeMin
	codeMax
)

// mostCodes limits the size of the tables.
const mostCodes = 2048

// newPattern builds the data for a reduction over n ranks; Moves means no reduction.
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
			p.tolerance = 2 // 1/n is rounded, and the products are rounded again
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

// divide assigns codes to n ranks such that their sum is at most most.
func (p *pattern) divide(most, n int) {
	each := max(most/n, 1)
	p.codes, p.limit = each+1, min(n, max(most/each, 1))
}

// exact returns the largest n such that a type represents all integers up to n.
func exact(t memory.DType) int {
	switch t {
	case memory.Int8:
		return 127
	case memory.Uint8:
		return 255
	case memory.BFloat16:
		return 256
	case memory.Float8E4M3:
		return 16
	case memory.Float8E5M2:
		return 8
	}
	return mostCodes
}

// exponents returns the largest exponent of a power of two that a type represents.
func exponents(t memory.DType) int {
	switch t {
	case memory.Int8:
		return 6
	case memory.Uint8:
		return 7
	case memory.Float8E4M3:
		return 8
	case memory.Float16, memory.Float8E5M2:
		return 15
	}
	return 30
}

func isFloat(t memory.DType) bool {
	switch t {
	case memory.Float8E4M3, memory.Float8E5M2, memory.Float16, memory.BFloat16, memory.Float32, memory.Float64:
		return true
	}
	return false
}
