package conformance

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

var dtypes = []ncclapi.DType{
	ncclapi.Int8, ncclapi.Uint8, ncclapi.Int32, ncclapi.Uint32, ncclapi.Int64, ncclapi.Uint64,
	ncclapi.Float16, ncclapi.Float32, ncclapi.Float64, ncclapi.BFloat16, ncclapi.Float8E4M3, ncclapi.Float8E5M2,
}

var dtypeNames = []string{"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"}

var redops = []ncclapi.RedOp{ncclapi.Sum, ncclapi.Prod, ncclapi.Max, ncclapi.Min, ncclapi.Avg}

var redopNames = []string{"sum", "prod", "max", "min", "avg"}

// A layout is that of a floating-point type.
type layout struct{ exponent, mantissa int }

var layouts = map[ncclapi.DType]layout{
	ncclapi.Float16: {5, 10}, ncclapi.Float32: {8, 23}, ncclapi.Float64: {11, 52},
	ncclapi.BFloat16: {8, 7}, ncclapi.Float8E4M3: {4, 3}, ncclapi.Float8E5M2: {5, 2},
}

func (l layout) bias() int { return 1<<(l.exponent-1) - 1 }

// value is the number that the bits stand for; they are neither infinite nor
// NaN.
func (l layout) value(bits uint64) float64 {
	m := float64(bits & (1<<l.mantissa - 1))
	e := int(bits >> l.mantissa & (1<<l.exponent - 1))
	var v float64
	if e == 0 {
		v = m * l.tiny()
	} else {
		v = (1 + m*l.eps()) * power(e-l.bias())
	}
	if bits>>(l.exponent+l.mantissa)&1 == 1 {
		return -v
	}
	return v
}

// eps is the distance of 1 to the next number, and tiny the smallest positive
// number.
func (l layout) eps() float64  { return power(-l.mantissa) }
func (l layout) tiny() float64 { return math.Ldexp(1, 1-l.bias()-l.mantissa) }

// power is 2ⁿ for a normal result.
func power(n int) float64 { return math.Float64frombits(uint64(n+1023) << 52) }

func (l layout) finite(bits uint64) bool {
	e := bits >> l.mantissa & (1<<l.exponent - 1)
	if l == layouts[ncclapi.Float8E4M3] {
		return bits&0x7f != 0x7f
	}
	return e != 1<<l.exponent-1
}

func bitsAt(t ncclapi.DType, p []byte, i int) uint64 {
	switch t.Size() {
	case 1:
		return uint64(p[i])
	case 2:
		return uint64(binary.LittleEndian.Uint16(p[2*i:]))
	case 4:
		return uint64(binary.LittleEndian.Uint32(p[4*i:]))
	}
	return binary.LittleEndian.Uint64(p[8*i:])
}

func putBits(t ncclapi.DType, p []byte, i int, bits uint64) {
	switch t.Size() {
	case 1:
		p[i] = byte(bits)
	case 2:
		binary.LittleEndian.PutUint16(p[2*i:], uint16(bits))
	case 4:
		binary.LittleEndian.PutUint32(p[4*i:], uint32(bits))
	default:
		binary.LittleEndian.PutUint64(p[8*i:], bits)
	}
}

// input is count elements of one rank: floats from 1/4 to 4 of both signs, any
// integers. Integers that are averaged are small, for a sum beyond the type has
// no average.
func input(t ncclapi.DType, op ncclapi.RedOp, count int, seed uint64) []byte {
	p := pattern(count*int(t.Size()), seed)
	l, float := layouts[t]
	for i := range count {
		bits := bitsAt(t, p, i)
		switch {
		case float:
			e := uint64(l.bias()-2) + bits>>l.mantissa&3
			sign := bits & (1 << (l.exponent + l.mantissa))
			putBits(t, p, i, sign|e<<l.mantissa|bits&(1<<l.mantissa-1))
		case op == ncclapi.Avg:
			putBits(t, p, i, bits&15)
		}
	}
	return p
}

// checkReduced compares got with the reduction of the ranks' inputs, of which
// it is the part that begins at element from.
func checkReduced(t *testing.T, dt ncclapi.DType, op ncclapi.RedOp, got []byte, inputs [][]byte, from int) {
	t.Helper()
	count := len(got) / int(dt.Size())
	l, float := layouts[dt]
	column := make([]uint64, len(inputs))
	for i := range count {
		for r, in := range inputs {
			column[r] = bitsAt(dt, in, from+i)
		}
		bad := ""
		if float {
			bad = checkFloat(l, op, bitsAt(dt, got, i), column)
		} else {
			bad = checkInteger(dt, op, bitsAt(dt, got, i), column)
		}
		if bad != "" {
			require.Fail(t, "wrong result", "%s %s, element %d of %d, inputs %x: %s",
				redopNames[op], dtypeNames[dt], i, count, column, bad)
		}
	}
}

// checkFloat allows an error of n·eps·Σ|x| for sums and n·eps of the value for
// products: that of one rounding a step, in any order.
func checkFloat(l layout, op ncclapi.RedOp, bits uint64, column []uint64) string {
	n := float64(len(column))
	sum, size, prod := 0.0, 0.0, 1.0
	high, low := math.Inf(-1), math.Inf(1)
	for _, b := range column {
		x := l.value(b)
		sum, size, prod = sum+x, size+math.Abs(x), prod*x
		high, low = max(high, x), min(low, x)
	}
	var want, bound float64
	switch op {
	case ncclapi.Sum:
		want, bound = sum, n*l.eps()*size
	case ncclapi.Prod:
		want, bound = prod, n*l.eps()*math.Abs(prod)+n*l.tiny()*64
	case ncclapi.Max:
		want = high
	case ncclapi.Min:
		want = low
	case ncclapi.Avg:
		want, bound = sum/n, (n+1)*l.eps()*size/n+n*l.tiny()
	}
	if !l.finite(bits) {
		return fmt.Sprintf("got the bits %#x, which are no finite number; want %g", bits, want)
	}
	if got := l.value(bits); math.Abs(got-want) > bound {
		return fmt.Sprintf("got %g, want %g within %g", got, want, bound)
	}
	return ""
}

func checkInteger(dt ncclapi.DType, op ncclapi.RedOp, got uint64, column []uint64) string {
	width := 8 * uint(dt.Size())
	signed := dt == ncclapi.Int8 || dt == ncclapi.Int32 || dt == ncclapi.Int64
	// less orders two elements, which for signed ones takes their sign to the
	// top.
	less := func(a, b uint64) bool {
		a, b = a<<(64-width), b<<(64-width)
		if signed {
			return int64(a) < int64(b)
		}
		return a < b
	}
	want := column[0]
	for _, x := range column[1:] {
		switch op {
		case ncclapi.Sum, ncclapi.Avg:
			want += x
		case ncclapi.Prod:
			want *= x
		case ncclapi.Max:
			if less(want, x) {
				want = x
			}
		case ncclapi.Min:
			if less(x, want) {
				want = x
			}
		}
	}
	if op == ncclapi.Avg {
		want /= uint64(len(column))
	}
	if want = want << (64 - width) >> (64 - width); got != want {
		return fmt.Sprintf("got %#x, want %#x", got, want)
	}
	return ""
}
