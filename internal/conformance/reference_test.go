package conformance

import (
	"fmt"
	"math"
	"testing"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

// A reference computes the expected result of a reduction of inputs of drawOf, in
// float64 or exactly in integers, for one run of elements.
//
// Floats may differ by one rounding in each step, in any order. If u is half the
// distance from 1 to the next number, the bound for n ranks is
//
//	sum      ((1+u)ⁿ-1) · Σ|x|
//	product  ((1+u)ⁿ-1) · |Πx|
//	average  ((1+u)ⁿ⁺²-1) · Σ|x|/n, because 1/n and its products are rounded
//
// and 0 for a maximum, a minimum, and elements at odd indices, whose reduction
// does not round.
type reference struct {
	t     ncclapi.DType
	op    ncclapi.RedOp
	n     int       // number of inputs
	want  []float64 // floats
	size  []float64 // Σ|x|
	whole []uint64  // integers
	x     []float64
	k     []uint64
}

// begin starts a run of count elements.
func (r *reference) begin(t ncclapi.DType, op ncclapi.RedOp, count int) {
	r.t, r.op, r.n = t, op, 0
	if cap(r.want) < count {
		*r = reference{t: t, op: op, want: make([]float64, count), size: make([]float64, count),
			whole: make([]uint64, count), x: make([]float64, count), k: make([]uint64, count)}
	}
	r.want, r.size, r.whole, r.x, r.k = r.want[:count], r.size[:count], r.whole[:count], r.x[:count], r.k[:count]
}

// add adds the input of one more rank.
func (r *reference) add(in []byte) {
	r.n++
	if _, float := layouts[r.t]; float {
		decode(r.x, r.t, in)
		r.addFloats()
		return
	}
	widen(r.k, r.t, in)
	r.addIntegers()
}

func (r *reference) addFloats() {
	want, size, x := r.want, r.size[:len(r.want)], r.x[:len(r.want)]
	if r.n == 1 {
		copy(want, x)
		for i, v := range x {
			size[i] = math.Abs(v)
		}
		return
	}
	switch r.op {
	case ncclapi.Sum, ncclapi.Avg:
		for i, v := range x {
			want[i] += v
			size[i] += math.Abs(v)
		}
	case ncclapi.Prod:
		for i, v := range x {
			want[i] *= v
		}
	case ncclapi.Max:
		for i, v := range x {
			want[i] = max(want[i], v)
		}
	case ncclapi.Min:
		for i, v := range x {
			want[i] = min(want[i], v)
		}
	}
}

func (r *reference) addIntegers() {
	want, k := r.whole, r.k[:len(r.whole)]
	if r.n == 1 {
		copy(want, k)
		return
	}
	// With the sign bit flipped, signed numbers compare like unsigned numbers.
	flip := uint64(0)
	if signed(r.t) {
		flip = 1 << 63
	}
	switch r.op {
	case ncclapi.Sum, ncclapi.Avg:
		for i, v := range k {
			want[i] += v
		}
	case ncclapi.Prod:
		for i, v := range k {
			want[i] *= v
		}
	case ncclapi.Max:
		for i, v := range k {
			want[i] = max(want[i]^flip, v^flip) ^ flip
		}
	case ncclapi.Min:
		for i, v := range k {
			want[i] = min(want[i]^flip, v^flip) ^ flip
		}
	}
}

// check compares the result. place is the index of its first element. It returns
// a description of the first error and its index, or "".
func (r *reference) check(got []byte, place int) (text string, at int) {
	if _, float := layouts[r.t]; float {
		return r.checkFloats(got, place)
	}
	widen(r.k, r.t, got)
	for i, x := range r.k {
		want := r.whole[i]
		if r.op == ncclapi.Avg {
			want /= uint64(r.n)
		}
		if want = wrap(r.t, want); x != want {
			return fmt.Sprintf("got %d, want %d", int64(x), int64(want)), i
		}
	}
	return "", 0
}

func (r *reference) checkFloats(got []byte, place int) (text string, at int) {
	n, l := float64(r.n), layouts[r.t]
	decode(r.x, r.t, got)
	// growth is (1+u)ᵏ-1, plus the same bound for roundings of the reference.
	growth := func(k float64) float64 {
		return math.Expm1(k*math.Log1p(l.eps()/2)) + math.Expm1(k*math.Log1p(0x1p-53))
	}
	exact := r.n <= mostExact && (r.op != ncclapi.Avg || r.n&(r.n-1) == 0)
	scale, mark := 1.0, growth(n)
	if r.op == ncclapi.Avg {
		scale, mark = 1/n, growth(n+2)
	}
	for i, x := range r.x {
		want, bound := r.want[i]*scale, 0.0
		switch {
		case exact && (place+i)%2 == 1, r.op == ncclapi.Max, r.op == ncclapi.Min:
		case r.op == ncclapi.Prod:
			bound = mark * math.Abs(want)
		default:
			bound = mark * r.size[i] * scale
		}
		if !(math.Abs(x-want) <= bound) { // a NaN is wrong
			return fmt.Sprintf("got %g, want %g within %g", x, want, bound), i
		}
	}
	return "", 0
}

func signed(t ncclapi.DType) bool {
	return t == ncclapi.Int8 || t == ncclapi.Int32 || t == ncclapi.Int64
}

// wrap truncates an integer to its type and extends the sign.
func wrap(t ncclapi.DType, x uint64) uint64 {
	shift := 64 - 8*uint(t.Size())
	if signed(t) {
		return uint64(int64(x<<shift) >> shift)
	}
	return x << shift >> shift
}

func widen(dst []uint64, t ncclapi.DType, p []byte) {
	switch t {
	case ncclapi.Int8:
		widenTo(dst, as[int8](p))
	case ncclapi.Uint8:
		widenTo(dst, as[uint8](p))
	case ncclapi.Int32:
		widenTo(dst, as[int32](p))
	case ncclapi.Uint32:
		widenTo(dst, as[uint32](p))
	case ncclapi.Int64, ncclapi.Uint64:
		widenTo(dst, as[uint64](p))
	}
}

func widenTo[T int8 | uint8 | int32 | uint32 | uint64](dst []uint64, p []T) {
	for i, x := range p[:len(dst)] {
		dst[i] = uint64(x)
	}
}

func decode(dst []float64, t ncclapi.DType, p []byte) {
	switch t {
	case ncclapi.Float64:
		copy(dst, as[float64](p))
	case ncclapi.Float32:
		for i, x := range as[float32](p)[:len(dst)] {
			dst[i] = float64(x)
		}
	case ncclapi.Float16, ncclapi.BFloat16:
		values := valuesOf[t]()
		for i, x := range as[uint16](p)[:len(dst)] {
			dst[i] = values[x]
		}
	default:
		values := valuesOf[t]()
		for i, x := range p[:len(dst)] {
			dst[i] = values[x]
		}
	}
}

// checkReduced compares a result with the reduction of the inputs, starting at
// element from.
func checkReduced(t *testing.T, dt ncclapi.DType, op ncclapi.RedOp, got []byte, inputs [][]byte, from int) {
	t.Helper()
	size := int(dt.Size())
	count := len(got) / size
	r := new(reference)
	r.begin(dt, op, count)
	for _, in := range inputs {
		r.add(in[from*size : (from+count)*size])
	}
	if bad, at := r.check(got, from); bad != "" {
		var column []uint64
		for _, in := range inputs {
			column = append(column, bitsAt(dt, in, from+at))
		}
		require.Fail(t, "wrong result", "%s %s, element %d of %d, inputs %x: %s",
			redopNames[op], dtypeNames[dt], at, count, column, bad)
	}
}
