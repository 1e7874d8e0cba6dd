package machine

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
	"gonum.org/v1/gonum/blas/blas64"
)

// This file has the arithmetic of products. Package cublaslt uses it, too.
//
// Elements are widened exactly and multiplied and added in the compute type. The order of the
// additions is unspecified. The result is rounded once, when it is stored.

// SizeOf returns the bytes of an element, or 0 for types that products do not have.
func SizeOf(t cublasapi.DType) int {
	if row := dtype.ByCUDA(t); row != nil {
		return row.Size
	}
	return 0
}

// An Operand is a batch of column-major matrices in device memory.
type Operand struct {
	Ptr        cudadrv.DevicePtr
	Type       cublasapi.DType
	Rows, Cols int
	LD         int
	Stride     int64 // elements between the matrices
}

// A Span is a range of device memory.
type Span struct{ From, To uint64 }

// Spans returns the memory of matrix i: one span if there are no gaps between the columns.
func (x *Operand) Spans(i int) []Span {
	size := uint64(SizeOf(x.Type))
	at := uint64(x.Ptr) + uint64(int64(i)*x.Stride)*size
	switch {
	case x.Rows == 0 || x.Cols == 0:
		return nil
	case x.LD == x.Rows || x.Cols == 1:
		return []Span{{at, at + uint64(x.Rows*x.Cols)*size}}
	}
	spans := make([]Span, x.Cols)
	for j := range spans {
		from := at + uint64(j*x.LD)*size
		spans[j] = Span{from, from + uint64(x.Rows)*size}
	}
	return spans
}

// Disjoint reports whether the matrices of a batch do not share memory: they follow each
// other, or they lie between the columns of each other.
func (x *Operand) Disjoint(batch int) bool {
	rows, cols, ld := int64(x.Rows), int64(x.Cols), int64(x.LD)
	return batch < 2 || x.Stride >= ld*(cols-1)+rows || x.Stride >= rows && (cols < 2 || ld >= x.Stride*int64(batch-1)+rows)
}

// Touch returns the memory of matrix i for the operation. The machine is locked.
func (x *Operand) Touch(o *Op, i int, write bool) (parts [][]byte, t *Trouble) {
	for _, s := range x.Spans(i) {
		p, t := o.Touch(cudadrv.DevicePtr(s.From), s.To-s.From, write)
		if t != nil {
			return nil, t
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// Alias returns the trouble of an operation whose output shares memory with an input, or nil.
func Alias(o *Op, out, in []Span) *Trouble {
	for len(out) > 0 && len(in) > 0 {
		switch x, y := out[0], in[0]; {
		case x.To <= y.From:
			out = out[1:]
		case y.To <= x.From:
			in = in[1:]
		default:
			return &Trouble{Status: cudadrv.ErrorLaunchFailed, Text: fmt.Sprintf(
				"%s: the output shares the bytes from %#x to %#x with an input", o.Name, max(x.From, y.From), min(x.To, y.To))}
		}
	}
	return nil
}

// Load returns the elements of a type as float64.
func Load(t cublasapi.DType, parts [][]byte) (v []float64) {
	if t == cublasapi.R64F {
		for _, p := range parts {
			v = append(v, View[float64](p)...)
		}
		return v
	}
	for _, x := range load32(t, parts) {
		v = append(v, float64(x))
	}
	return v
}

func load32(t cublasapi.DType, parts [][]byte) (v []float32) {
	for _, p := range parts {
		if t == cublasapi.R32F {
			v = append(v, View[float32](p)...)
			continue
		}
		n := len(v)
		v = append(v, make([]float32, len(p)/SizeOf(t))...)
		dtype.ByCUDA(t).Format.DecodeBytes(v[n:], p)
	}
	return v
}

// Store rounds values to a type, saturating 8-bit floats.
func Store(t cublasapi.DType, parts [][]byte, v []float64) {
	for _, p := range parts {
		n := len(p) / SizeOf(t)
		if t == cublasapi.R64F {
			copy(View[float64](p), v[:n])
		} else {
			store32(t, p, v[:n])
		}
		v = v[n:]
	}
}

func store32(t cublasapi.DType, p []byte, v []float64) {
	narrow := make([]float32, len(v))
	for i, x := range v {
		narrow[i] = float32(x)
	}
	switch f := dtype.ByCUDA(t).Format; {
	case f == nil:
		copy(View[float32](p), narrow)
	case f.Bytes() == 1:
		f.EncodeBytesSaturated(p, narrow)
	default:
		f.EncodeBytes(p, narrow)
	}
}

// Round rounds x to a type.
func Round(t cublasapi.DType, x float64) float64 {
	switch f := dtype.ByCUDA(t).Format; {
	case t == cublasapi.R64F:
		return x
	case f == nil:
		return float64(float32(x))
	default:
		return float64(f.Decode(f.Encode(float32(x))))
	}
}

// ScaleTypeOf returns the type of alpha and beta for a compute type.
func ScaleTypeOf(c cublasapi.ComputeType) cublasapi.DType {
	switch c {
	case cublasapi.Compute16F:
		return cublasapi.R16F
	case cublasapi.Compute64F:
		return cublasapi.R64F
	}
	return cublasapi.R32F
}

// HostScalar reads a value of a scale type on the host.
func HostScalar(t cublasapi.DType, p unsafe.Pointer) float64 {
	return Load(t, [][]byte{unsafe.Slice((*byte)(p), SizeOf(t))})[0]
}

// A Product is op(A)·op(B).
type Product struct {
	TransA, TransB bool
	M, N, K        int
	A, B           cublasapi.DType
	Compute        cublasapi.ComputeType
	Parts          int             // the sums over k are made in so many parts; 0 means 1
	Partial        cublasapi.DType // the type that each part is rounded to
}

// Sums returns the product of one pair of matrices, column-major.
func (p *Product) Sums(a, b [][]byte) []float64 {
	sums := make([]float64, p.M*p.N)
	if p.M == 0 || p.N == 0 || p.K == 0 {
		return sums
	}
	parts := max(1, min(p.Parts, p.K))
	var x, y []float32
	if p.Compute != cublasapi.Compute64F {
		x, y = p.prepare(load32(p.A, a)), p.prepare(load32(p.B, b))
	}
	for i := range parts {
		lo, hi := i*p.K/parts, (i+1)*p.K/parts
		var part []float64
		switch p.Compute {
		case cublasapi.Compute64F:
			part = p.sum64(Load(p.A, a), Load(p.B, b), lo, hi)
		case cublasapi.Compute16F:
			part = p.sum16(x, y, lo, hi)
		default:
			part = p.sum32(x, y, lo, hi)
		}
		for j, v := range part {
			if parts > 1 {
				v = Round(p.Partial, v)
			}
			sums[j] = Round(ScaleTypeOf(p.Compute), sums[j]+v)
		}
	}
	return sums
}

// prepare rounds inputs to TF32 if the compute type says so.
func (p *Product) prepare(v []float32) []float32 {
	if p.Compute != cublasapi.Compute32FFastTF32 {
		return v
	}
	out := make([]float32, len(v))
	for i, x := range v {
		out[i] = RoundTF32(x)
	}
	return out
}

// RoundTF32 rounds to 10 bits after the leading one, ties to even.
func RoundTF32(x float32) float32 {
	bits := math.Float32bits(x)
	if bits&0x7f800000 == 0x7f800000 {
		return x
	}
	return math.Float32frombits((bits + 0xfff + bits>>13&1) &^ 0x1fff)
}

// at returns the index of element (i, l) of op(A), and of (l, j) of op(B).
func (p *Product) atA(i, l int) int {
	if p.TransA {
		return i*p.K + l
	}
	return l*p.M + i
}

func (p *Product) atB(l, j int) int {
	if p.TransB {
		return l*p.N + j
	}
	return j*p.K + l
}

// sum16 rounds after each addition, which is at least as coarse as tensor cores.
func (p *Product) sum16(a, b []float32, lo, hi int) []float64 {
	out := make([]float64, p.M*p.N)
	for j := range p.N {
		for i := range p.M {
			sum := float32(0)
			for l := lo; l < hi; l++ {
				sum = dtype.Half.Decode(dtype.Half.Encode(sum + a[p.atA(i, l)]*b[p.atB(l, j)]))
			}
			out[j*p.M+i] = float64(sum)
		}
	}
	return out
}

// gonum's matrices are row-major. A column-major matrix is the transpose of the row-major
// one, so compute Cᵀ = op(B)ᵀ·op(A)ᵀ.

func (p *Product) sum32(a, b []float32, lo, hi int) []float64 {
	k := hi - lo
	x := blas32.General{Rows: k, Cols: p.M, Stride: p.M, Data: a[lo*p.M:]}
	if p.TransA {
		x = blas32.General{Rows: p.M, Cols: k, Stride: p.K, Data: a[lo:]}
	}
	y := blas32.General{Rows: p.N, Cols: k, Stride: p.K, Data: b[lo:]}
	if p.TransB {
		y = blas32.General{Rows: k, Cols: p.N, Stride: p.N, Data: b[lo*p.N:]}
	}
	c := blas32.General{Rows: p.N, Cols: p.M, Stride: p.M, Data: make([]float32, p.M*p.N)}
	blas32.Gemm(transpose(p.TransB), transpose(p.TransA), 1, y, x, 0, c)
	out := make([]float64, len(c.Data))
	for i, v := range c.Data {
		out[i] = float64(v)
	}
	return out
}

func (p *Product) sum64(a, b []float64, lo, hi int) []float64 {
	k := hi - lo
	x := blas64.General{Rows: k, Cols: p.M, Stride: p.M, Data: a[lo*p.M:]}
	if p.TransA {
		x = blas64.General{Rows: p.M, Cols: k, Stride: p.K, Data: a[lo:]}
	}
	y := blas64.General{Rows: p.N, Cols: k, Stride: p.K, Data: b[lo:]}
	if p.TransB {
		y = blas64.General{Rows: k, Cols: p.N, Stride: p.N, Data: b[lo*p.N:]}
	}
	c := blas64.General{Rows: p.N, Cols: p.M, Stride: p.M, Data: make([]float64, p.M*p.N)}
	blas64.Gemm(transpose(p.TransB), transpose(p.TransA), 1, y, x, 0, c)
	return c.Data
}

func transpose(yes bool) blas.Transpose {
	if yes {
		return blas.Trans
	}
	return blas.NoTrans
}
