package gemm

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// A Library is a preference between the two libraries.
type Library uint8

// The preferences.
const (
	Any      Library = iota // cuBLASLt, and cuBLAS for products that it lacks
	CUBLAS                  // cuBLAS, and cuBLASLt for products that it lacks
	CUBLASLt                // cuBLASLt only
)

// A Layout describes column-major matrices of a batch.
type Layout struct {
	Type   cublasapi.DType
	LD     int64 // elements; bits for a mask
	Stride int64 // from one matrix to the next, as LD
}

// A Problem is everything about a product except addresses and factors. It is the key of
// descriptors and algorithms.
type Problem struct {
	M, N, K, Batch int64
	A, B, C, D     Layout
	Aux            Layout
	Bias           Layout // LD is 0
	TransA, TransB cublasapi.Op
	Compute        cublasapi.ComputeType
	Epilogue       cublasltapi.Epilogue
	Schemes        cublasltapi.ReductionScheme // allowed when k is split; 0 forbids to split it
	Carveout       int32                       // multiprocessors that the product leaves to others
	NoSplitK       bool                        // cuBLAS, which may split k, must not be used
	Separate       bool                        // C is not D
	DeviceScalars  bool
	Float8         bool
	RowScales      bool // a scale for each row of op(A) and each column of op(B)
	FastAccum      bool
	Library        Library

	align     [alignments]uint8 // logarithms of the addresses' alignments, at most 8
	workspace int64
}

// The alignments of a Problem.
const (
	alignA = iota
	alignB
	alignC
	alignD // includes the bias and the auxiliary buffer
	alignments
)

// Pointers are the addresses of a product; 0 means that it has no such part.
type Pointers struct {
	A, B, C, D, Bias, Aux                cudadrv.DevicePtr
	ScaleA, ScaleB, ScaleC, ScaleD, AMax cudadrv.DevicePtr
	Alpha, Beta                          cudadrv.DevicePtr // of the scale type, if Problem.DeviceScalars
}

// A Product is D = epilogue(alpha·op(A)·op(B) + beta·C), for column-major matrices.
type Product struct {
	Problem
	At      Pointers
	Factors [2]float64 // alpha and beta on the host
}

// scaleType returns the type of alpha and beta.
func (p *Problem) scaleType() cublasapi.DType {
	switch p.Compute {
	case cublasapi.Compute16F:
		return cublasapi.R16F
	case cublasapi.Compute64F:
		return cublasapi.R64F
	}
	return cublasapi.R32F
}

// plain reports whether cuBLAS can compute the product.
func (p *Problem) plain() bool {
	small := max(p.M, p.N, p.K, p.Batch, p.A.LD, p.B.LD, p.D.LD) <= math.MaxInt32
	return small && p.Epilogue == cublasltapi.EpilogueDefault && !p.Separate && !p.Float8 && !p.NoSplitK
}

// setAlignments derives the alignments from the addresses. If C is another matrix than D,
// cuBLASLt chooses kernels that suit the columns of A, B and C, but may write D at addresses that
// are not aligned, which loses the device. So the alignment of D includes its columns.
func (p *Product) setAlignments() {
	p.align = [alignments]uint8{alignment(p.At.A), alignment(p.At.B), alignment(p.At.C),
		min(alignment(p.At.D), alignment(p.At.Bias), alignment(p.At.Aux))}
	if p.Separate {
		p.align[alignD] = min(p.align[alignD], p.D.columnAlignment())
	}
}

// widestAccess is the logarithm of the largest alignment that a kernel needs of a column.
const widestAccess = 4

// columnAlignment returns the logarithm of the alignment of all columns, or 8 if kernels need no more.
func (l *Layout) columnAlignment() uint8 {
	a := bits.TrailingZeros64(uint64(l.LD*sizeOf(l.Type)) | uint64(l.Stride*sizeOf(l.Type)))
	if a >= widestAccess {
		return 8
	}
	return uint8(a)
}

// alignment returns the logarithm of the largest power of two up to 256 that divides p.
func alignment(p cudadrv.DevicePtr) uint8 {
	return uint8(min(bits.TrailingZeros64(uint64(p)), 8))
}

// String describes the product in errors and results of tuning, in the column-major terms of
// the libraries.
func (p *Problem) String() string {
	ops := [2]byte{'n', 't'}
	text := fmt.Sprintf("%c%c_%d_%d_%d_ld_%d_%d_%d_%d", ops[p.TransA&1], ops[p.TransB&1], p.M, p.N, p.K, p.A.LD, p.B.LD, p.C.LD, p.D.LD)
	if p.Batch > 1 {
		text += fmt.Sprintf("_b_%d_%d_%d_%d_%d", p.Batch, p.A.Stride, p.B.Stride, p.C.Stride, p.D.Stride)
	}
	return text
}
