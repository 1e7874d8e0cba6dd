package nccl

import (
	"encoding/binary"
	"math"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A number is an element type that Go supports natively.
type number interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | float32 | float64
}

// A combiner computes dst[i] from a[i] and b[i]. All three have the same length,
// and dst may be a or b. It is not safe for concurrent use. The race detector does not
// watch device memory, so the loops are without its calls.
type combiner func(dst, a, b []byte)

// An arithmetic has the functions of a type that Go supports natively.
type arithmetic struct {
	combine func(op ncclapi.RedOp) combiner
	scale   func(dst, src, scalar []byte)
	divide  func(p []byte, n int)
}

func arithmeticOf[T number]() arithmetic {
	return arithmetic{
		combine: func(op ncclapi.RedOp) combiner {
			f := loop[T](op)
			return func(dst, a, b []byte) { f(machine.View[T](dst), machine.View[T](a), machine.View[T](b)) }
		},
		scale:  scaleNumbers[T],
		divide: func(p []byte, n int) { divideNumbers(machine.View[T](p), T(n)) },
	}
}

var arithmetics = map[ncclapi.DType]arithmetic{
	ncclapi.Int8: arithmeticOf[int8](), ncclapi.Uint8: arithmeticOf[uint8](), ncclapi.Int32: arithmeticOf[int32](), ncclapi.Uint32: arithmeticOf[uint32](),
	ncclapi.Int64: arithmeticOf[int64](), ncclapi.Uint64: arithmeticOf[uint64](), ncclapi.Float32: arithmeticOf[float32](), ncclapi.Float64: arithmeticOf[float64](),
}

// combinerOf returns the combiner of a type for Sum, Prod, Max or Min.
func combinerOf(t ncclapi.DType, op ncclapi.RedOp) combiner {
	if a, ok := arithmetics[t]; ok {
		return a.combine(op)
	}
	return coded(t, op)
}

func loop[T number](op ncclapi.RedOp) func(dst, a, b []T) {
	switch op {
	case ncclapi.Prod:
		return prodLoop[T]
	case ncclapi.Max:
		return maxLoop[T]
	case ncclapi.Min:
		return minLoop[T]
	}
	return sumLoop[T]
}

//go:norace
func sumLoop[T number](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] + b[i]
	}
}

//go:norace
func prodLoop[T number](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] * b[i]
	}
}

// maxLoop and minLoop prefer a number to a NaN, like fmax and fmin.
//
//go:norace
func maxLoop[T number](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		x, y := a[i], b[i]
		if y > x || x != x {
			x = y
		}
		dst[i] = x
	}
}

//go:norace
func minLoop[T number](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		x, y := a[i], b[i]
		if y < x || x != x {
			x = y
		}
		dst[i] = x
	}
}

// codedRun is the number of elements converted to float32 at a time.
const codedRun = 1024

// coded computes in float32 and rounds each result to the type.
func coded(t ncclapi.DType, op ncclapi.RedOp) combiner {
	c, f, size := codecs[t], loop[float32](op), int(t.Size())
	x, y := make([]float32, codedRun), make([]float32, codedRun)
	return func(dst, a, b []byte) {
		for at := 0; at < len(dst); at += codedRun * size {
			to := min(at+codedRun*size, len(dst))
			n := (to - at) / size
			c.decode(x, a[at:to])
			c.decode(y, b[at:to])
			f(x[:n], x[:n], y[:n])
			c.encode(dst[at:to], x[:n])
		}
	}
}

// scale sets dst to src times the scalar, an element of the type.
func scale(t ncclapi.DType, dst, src, scalar []byte) {
	if a, ok := arithmetics[t]; ok {
		a.scale(dst, src, scalar)
		return
	}
	scaleCoded(t, dst, src, scalar)
}

//go:norace
func scaleNumbers[T number](dst, src, scalar []byte) {
	to, from, s := machine.View[T](dst), machine.View[T](src), machine.View[T](scalar)[0]
	from = from[:len(to)]
	for i := range to {
		to[i] = from[i] * s
	}
}

func scaleCoded(t ncclapi.DType, dst, src, scalar []byte) {
	c, size := codecs[t], int(t.Size())
	s, x := make([]float32, 1), make([]float32, codedRun)
	c.decode(s, scalar)
	for at := 0; at < len(dst); at += codedRun * size {
		to := min(at+codedRun*size, len(dst))
		n := (to - at) / size
		c.decode(x, src[at:to])
		for i := range n {
			x[i] *= s[0]
		}
		c.encode(dst[at:to], x[:n])
	}
}

// reciprocal returns 1/n as an element of a floating-point type; NCCL scales an
// average by it. For integers it returns nil.
func reciprocal(t ncclapi.DType, n int) []byte {
	s := make([]byte, 8)
	switch c, coded := codecs[t]; {
	case coded:
		c.encode(s[:t.Size()], []float32{1 / float32(n)})
	case t == ncclapi.Float32:
		binary.LittleEndian.PutUint32(s, math.Float32bits(1/float32(n)))
	case t == ncclapi.Float64:
		binary.LittleEndian.PutUint64(s, math.Float64bits(1/float64(n)))
	default:
		return nil
	}
	return s[:t.Size()]
}

// divide divides integers in place and rounds toward zero, like NCCL's average.
func divide(t ncclapi.DType, p []byte, n int) { arithmetics[t].divide(p, n) }

//go:norace
func divideNumbers[T number](p []T, n T) {
	for i := range p {
		p[i] /= n
	}
}

// A codec converts elements of types that Go does not have to float32 and back.
type codec struct {
	decode func(dst []float32, src []byte)
	encode func(dst []byte, src []float32)
}

// The 8-bit types saturate, like CUDA's conversions.
var codecs = map[ncclapi.DType]codec{
	ncclapi.Float16:    {dtype.Half.DecodeBytes, dtype.Half.EncodeBytes},
	ncclapi.BFloat16:   {dtype.BFloat.DecodeBytes, dtype.BFloat.EncodeBytes},
	ncclapi.Float8E4M3: {dtype.E4M3.DecodeBytes, dtype.E4M3.EncodeBytesSaturated},
	ncclapi.Float8E5M2: {dtype.E5M2.DecodeBytes, dtype.E5M2.EncodeBytesSaturated},
}

var dtypeNames = []string{"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"}

func dtypeName(t ncclapi.DType) string {
	if t.Size() == 0 {
		return "unknown type"
	}
	return dtypeNames[t]
}
