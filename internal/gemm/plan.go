// Package gemm enqueues matrix products on streams with cuBLASLt and cuBLAS.
//
// Each stream keeps descriptors and algorithms of its latest products, a workspace from the
// caching allocator, and a handle of cuBLAS if one was needed. A product that the stream has
// had before, with other addresses of the same alignment, costs a look-up and the library's
// call, and allocates nothing. The algorithms that were chosen or tuned belong to the device.
//
// cuBLASLt computes every product. If it is missing, or has no algorithm for a product, cuBLAS
// computes those without epilogues, scales and separate inputs for beta.
package gemm

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
)

// A plan has the library objects of a Problem. Its address does not change, because C
// reads from it.
type plan struct {
	Problem
	blas    bool   // cuBLAS computes it
	chosen  uint64 // the version of the choices
	desc    cublasapi.MatmulDesc
	layouts [4]cublasapi.MatrixLayout
	algo    cublasapi.Algo
	need    uintptr  // bytes of workspace
	tuned   bool     // or a tuning has failed
	set     Pointers // the addresses in the descriptor
}

// newPlan returns the plan of the call in progress. The descriptor gets its addresses first,
// because the choice of an algorithm depends on their alignments.
func (q *queue) newPlan() (*plan, error) {
	p := &plan{Problem: q.now.Problem, chosen: q.site.choices.version.Load()}
	lt, missing := q.site.openLt(q.dev)
	plain := p.plain()
	switch {
	case plain && (p.Library == CUBLAS || p.K == 0 || errors.Is(missing, errors.ErrUnsupported) && p.Library == Any):
		p.blas = true
		return p, q.prepareBLAS(p)
	case missing != nil:
		return nil, fmt.Errorf("the product needs cuBLASLt: %w", missing)
	case p.K == 0:
		return nil, fmt.Errorf("the inner dimension is 0: such a product has no algorithms to choose from")
	}
	if v := lt.GetVersion(); p.RowScales && v < rowScalesVersion {
		return nil, &device.UnsupportedError{Feature: "a product with scales for rows and columns", Need: "cuBLASLt 12.9", Have: "cuBLASLt " + versionText(v)}
	}
	err := q.describe(lt, p)
	if err == nil {
		err = q.choose(p)
	}
	if err == nil {
		return p, nil
	}
	err = errors.Join(err, q.drop(p))
	if !isRefusal(err) {
		return nil, err
	}
	if plain && p.Library == Any {
		p.blas = true
		return p, q.prepareBLAS(p)
	}
	return nil, q.unsupported(p, err)
}

// rowScalesVersion is the first version with ScaleOuterVec32F.
const rowScalesVersion = 120900

func versionText(v uintptr) string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }

// isRefusal reports whether cuBLASLt has no algorithm, which it says by one of
// two results.
func isRefusal(err error) bool {
	s, ok := errors.AsType[*Status](err)
	return ok && s.Call == heuristicCall && (s.Result == cublasapi.NotSupported || s.Result == cublasapi.InvalidValue)
}

const heuristicCall = "cublasLtMatmulAlgoGetHeuristic"

// unsupported is the error if cuBLASLt has no algorithm.
func (q *queue) unsupported(p *plan, err error) error {
	return &device.UnsupportedError{
		Feature: "this product",
		Need:    fmt.Sprintf("an algorithm for its types, alignments and epilogue with at most %d bytes of workspace", p.workspace),
		Have:    fmt.Sprintf("cuBLASLt %s, which has none on %s (%v)", versionText(q.site.lt.GetVersion()), q.dev, err),
	}
}

// describe creates the descriptor and the layouts.
func (q *queue) describe(lt cublasapi.LtAPI, p *plan) error {
	var r cublasapi.Result
	if p.desc, r = lt.MatmulDescCreate(p.Compute, p.scaleType()); r != cublasapi.Success {
		return failed("cublasLtMatmulDescCreate", r)
	}
	if err := q.attributes(lt, p); err != nil {
		return err
	}
	if err := q.point(p); err != nil {
		return err
	}
	rows, cols := [4]int64{p.M, p.K, p.M, p.M}, [4]int64{p.K, p.N, p.N, p.N}
	if p.TransA == cublasapi.Trans {
		rows[0], cols[0] = p.K, p.M
	}
	if p.TransB == cublasapi.Trans {
		rows[1], cols[1] = p.N, p.K
	}
	for i, x := range []Layout{p.A, p.B, p.C, p.D} {
		if p.layouts[i], r = lt.MatrixLayoutCreate(x.Type, uint64(rows[i]), uint64(cols[i]), x.LD); r != cublasapi.Success {
			return failed("cublasLtMatrixLayoutCreate", r)
		}
		if p.Batch == 1 {
			continue
		}
		batch := int32(p.Batch)
		r = lt.MatrixLayoutSetAttribute(p.layouts[i], cublasapi.LayoutBatchCount, unsafe.Pointer(&batch), unsafe.Sizeof(batch))
		if r == cublasapi.Success {
			r = lt.MatrixLayoutSetAttribute(p.layouts[i], cublasapi.LayoutStridedBatchOffset, unsafe.Pointer(&x.Stride), unsafe.Sizeof(x.Stride))
		}
		if r != cublasapi.Success {
			return failed("cublasLtMatrixLayoutSetAttribute", r)
		}
	}
	return nil
}

// attributes sets the attributes that are not addresses and differ from the defaults.
func (q *queue) attributes(lt cublasapi.LtAPI, p *plan) error {
	list := attributes{lt: lt, desc: p.desc}
	setAttribute(&list, cublasapi.DescTransA, int32(p.TransA), p.TransA != 0)
	setAttribute(&list, cublasapi.DescTransB, int32(p.TransB), p.TransB != 0)
	setAttribute(&list, cublasapi.DescEpilogue, p.Epilogue, p.Epilogue != cublasapi.EpilogueDefault)
	setAttribute(&list, cublasapi.DescPointerMode, cublasapi.PointerModeDevice, p.DeviceScalars)
	setAttribute(&list, cublasapi.DescSMCountTarget, q.site.target(p.Carveout), p.Carveout != 0)
	setAttribute(&list, cublasapi.DescFastAccum, int8(1), p.FastAccum)
	setAttribute(&list, cublasapi.DescAScaleMode, cublasapi.ScaleOuterVec32F, p.RowScales)
	setAttribute(&list, cublasapi.DescBScaleMode, cublasapi.ScaleOuterVec32F, p.RowScales)
	bias := p.Bias != Layout{}
	setAttribute(&list, cublasapi.DescBiasDataType, int32(p.Bias.Type), bias)
	setAttribute(&list, cublasapi.DescBiasBatchStride, p.Bias.Stride, bias && p.Batch > 1)
	aux := p.Aux != Layout{}
	setAttribute(&list, cublasapi.DescEpilogueAuxLD, p.Aux.LD, aux)
	setAttribute(&list, cublasapi.DescEpilogueAuxBatchStride, p.Aux.Stride, aux && p.Batch > 1)
	setAttribute(&list, cublasapi.DescEpilogueAuxDataType, int32(p.Aux.Type), aux && p.Float8 && p.Aux.Type != MaskType)
	return list.err
}

// MaskType is the type of Problem.Aux if it is a bit mask.
const MaskType cublasapi.DType = -1

// attributes sets attributes until the first error.
type attributes struct {
	lt   cublasapi.LtAPI
	desc cublasapi.MatmulDesc
	err  error
}

func setAttribute[T any](x *attributes, a cublasapi.DescAttribute, v T, wanted bool) {
	if x.err != nil || !wanted {
		return
	}
	if r := x.lt.MatmulDescSetAttribute(x.desc, a, unsafe.Pointer(&v), unsafe.Sizeof(v)); r != cublasapi.Success {
		x.err = fmt.Errorf("cublasLtMatmulDescSetAttribute %d: %w", a, r)
	}
}

// point puts the addresses of the call into the descriptor, if they have changed.
func (q *queue) point(p *plan) error {
	if p.blas {
		return nil
	}
	x, y := &q.now.At, &p.set
	if x.Bias == y.Bias && x.Aux == y.Aux && x.ScaleA == y.ScaleA && x.ScaleB == y.ScaleB &&
		x.ScaleC == y.ScaleC && x.ScaleD == y.ScaleD && x.AMax == y.AMax {
		return nil
	}
	for _, f := range [...]struct {
		a        cublasapi.DescAttribute
		to, from *cudadrv.DevicePtr
	}{
		{cublasapi.DescBiasPointer, &y.Bias, &x.Bias}, {cublasapi.DescEpilogueAuxPointer, &y.Aux, &x.Aux},
		{cublasapi.DescAScalePointer, &y.ScaleA, &x.ScaleA}, {cublasapi.DescBScalePointer, &y.ScaleB, &x.ScaleB},
		{cublasapi.DescCScalePointer, &y.ScaleC, &x.ScaleC}, {cublasapi.DescDScalePointer, &y.ScaleD, &x.ScaleD},
		{cublasapi.DescAMaxDPointer, &y.AMax, &x.AMax},
	} {
		if *f.to == *f.from {
			continue
		}
		*f.to = *f.from
		if r := q.site.lt.MatmulDescSetAttribute(p.desc, f.a, unsafe.Pointer(f.to), unsafe.Sizeof(*f.to)); r != cublasapi.Success {
			*f.to = 0
			return fmt.Errorf("cublasLtMatmulDescSetAttribute %d: %w", f.a, r)
		}
	}
	return nil
}

// drop destroys the descriptor and the layouts.
func (q *queue) drop(p *plan) error {
	var errs []error
	if p.desc != 0 {
		errs = append(errs, failed("cublasLtMatmulDescDestroy", q.site.lt.MatmulDescDestroy(p.desc)))
		p.desc = 0
	}
	for i, x := range p.layouts {
		if x != 0 {
			errs = append(errs, failed("cublasLtMatrixLayoutDestroy", q.site.lt.MatrixLayoutDestroy(x)))
			p.layouts[i] = 0
		}
	}
	return errors.Join(errs...)
}

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
	Epilogue       cublasapi.Epilogue
	Schemes        cublasapi.ReductionScheme // allowed when k is split; 0 forbids to split it
	Carveout       int32                     // multiprocessors that the product leaves to others
	NoSplitK       bool                      // cuBLAS, which may split k, must not be used
	Separate       bool                      // C is not D
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
	return small && p.Epilogue == cublasapi.EpilogueDefault && !p.Separate && !p.Float8 && !p.NoSplitK
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

// scalars holds alpha and beta in the scale type.
type scalars struct {
	f64 [2]float64
	f32 [2]float32
	f16 [2]uint16
}

func (c *scalars) set(p *Product) {
	for i, v := range p.Factors {
		c.f64[i], c.f32[i] = v, float32(v)
		if p.Compute == cublasapi.Compute16F {
			c.f16[i] = dtype.Half.Encode(float32(v))
		}
	}
}

// of returns the addresses of alpha and beta.
func (c *scalars) of(p *Product) (alpha, beta cublasapi.Scalar) {
	if p.DeviceScalars {
		return cublasapi.Scalar{Device: p.At.Alpha}, cublasapi.Scalar{Device: p.At.Beta}
	}
	at := [2]unsafe.Pointer{unsafe.Pointer(&c.f32[0]), unsafe.Pointer(&c.f32[1])}
	switch p.scaleType() {
	case cublasapi.R64F:
		at = [2]unsafe.Pointer{unsafe.Pointer(&c.f64[0]), unsafe.Pointer(&c.f64[1])}
	case cublasapi.R16F:
		at = [2]unsafe.Pointer{unsafe.Pointer(&c.f16[0]), unsafe.Pointer(&c.f16[1])}
	}
	return cublasapi.Scalar{Host: at[0]}, cublasapi.Scalar{Host: at[1]}
}

// needsNoProduct reports whether cuBLASLt must not see that k is 0, which
// cuBLAS accepts, or that alpha is 0.
func (p *Product) needsNoProduct() bool {
	if p.K == 0 {
		return !p.plain()
	}
	return p.returnsEarly() && !p.DeviceScalars && p.Factors == [2]float64{0, 1}
}

// returnsEarly reports whether cuBLASLt does not write D if alpha is 0 and beta is 1. It takes
// D = C for granted if C is a vector, even if D is another matrix or an epilogue follows.
func (p *Product) returnsEarly() bool {
	return min(p.M, p.N) == 1 &&
		(p.Separate || p.Epilogue != cublasapi.EpilogueDefault) &&
		p.Epilogue != cublasapi.EpilogueBGradA && p.Epilogue != cublasapi.EpilogueBGradB
}

// replaceProduct replaces the matrices of the call in progress by zeros, in memory
// of the stream that the caller frees, and alpha by 1; on the device by 0, because it may be NaN.
func (q *queue) replaceProduct() (room uint64, err error) {
	p := &q.now
	const k = 16 // 8-bit floats need a multiple of it
	bytes := int(k * max(p.M, p.N) * max(sizeOf(p.A.Type), sizeOf(p.B.Type)))
	room, err = memory.AllocRaw(q.s, bytes)
	if err != nil {
		return room, err
	}
	zeros := cudadrv.DevicePtr(room)
	p.K, p.TransA, p.TransB = k, cublasapi.Trans, cublasapi.NoTrans // the order of 8-bit floats
	p.A.LD, p.A.Stride, p.B.LD, p.B.Stride = k, 0, k, 0
	p.At.A, p.At.B, p.At.Alpha, p.Factors[0] = zeros, zeros, zeros, 1
	return room, q.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(zeros, 0, uintptr(bytes), gpu.StreamOf(q.s).Raw())
	})
}

// maxColumns is the number of columns that are listed one by one. Matrices with more columns
// and with gaps between them are not listed, because the gaps may belong to others.
const maxColumns = 1 << 14

// uses lists the matrices of the call in progress, for the sanitizer. It omits biases, scales
// and auxiliary buffers.
func (q *queue) uses() (uses []cudadrv.Use) {
	p := &q.now
	add := func(at cudadrv.DevicePtr, l Layout, rows, cols int64, write bool) {
		size := sizeOf(l.Type)
		batch := p.Batch
		if l.LD == rows {
			rows, cols = rows*cols, 1
		}
		if l.Stride == 0 {
			batch = 1
		}
		if at == 0 || batch*cols > maxColumns {
			return
		}
		for b := range batch {
			for c := range cols {
				first := cudadrv.DevicePtr((b*l.Stride + c*l.LD) * size)
				uses = append(uses, cudadrv.Use{Ptr: at + first, Bytes: uint64(rows * size), Write: write})
			}
		}
	}
	stored := func(rows, cols int64, op cublasapi.Op) (int64, int64) {
		if op == cublasapi.Trans {
			return cols, rows
		}
		return rows, cols
	}
	rows, cols := stored(p.M, p.K, p.TransA)
	add(p.At.A, p.A, rows, cols, false)
	rows, cols = stored(p.K, p.N, p.TransB)
	add(p.At.B, p.B, rows, cols, false)
	if p.Separate {
		add(p.At.C, p.C, p.M, p.N, false)
	}
	add(p.At.D, p.D, p.M, p.N, true)
	return uses
}
