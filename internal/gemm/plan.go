package gemm

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// A plan has the library objects of a Problem. Its address does not change, because C
// reads from it.
type plan struct {
	Problem
	blas    bool   // cuBLAS computes it
	chosen  uint64 // the version of the choices
	desc    cublasltapi.MatmulDesc
	layouts [4]cublasltapi.MatrixLayout
	algo    cublasltapi.Algo
	need    uintptr  // bytes of workspace
	tuned   bool     // or a tuning has failed
	set     Pointers // the addresses in the descriptor
}

// newPlan makes the plan of the call in progress. The descriptor gets its addresses first,
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

// isRefusal reports whether cuBLASLt has no algorithm. It tells so by one of two results.
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

// describe makes the descriptor and the layouts.
func (q *queue) describe(lt cublasltapi.API, p *plan) error {
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
		r = lt.MatrixLayoutSetAttribute(p.layouts[i], cublasltapi.LayoutBatchCount, unsafe.Pointer(&batch), unsafe.Sizeof(batch))
		if r == cublasapi.Success {
			r = lt.MatrixLayoutSetAttribute(p.layouts[i], cublasltapi.LayoutStridedBatchOffset, unsafe.Pointer(&x.Stride), unsafe.Sizeof(x.Stride))
		}
		if r != cublasapi.Success {
			return failed("cublasLtMatrixLayoutSetAttribute", r)
		}
	}
	return nil
}

// attributes sets the attributes that are not addresses and differ from the defaults.
func (q *queue) attributes(lt cublasltapi.API, p *plan) error {
	list := attributes{lt: lt, desc: p.desc}
	setAttribute(&list, cublasltapi.DescTransA, int32(p.TransA), p.TransA != 0)
	setAttribute(&list, cublasltapi.DescTransB, int32(p.TransB), p.TransB != 0)
	setAttribute(&list, cublasltapi.DescEpilogue, p.Epilogue, p.Epilogue != cublasltapi.EpilogueDefault)
	setAttribute(&list, cublasltapi.DescPointerMode, cublasapi.PointerModeDevice, p.DeviceScalars)
	setAttribute(&list, cublasltapi.DescSMCountTarget, q.site.target(p.Carveout), p.Carveout != 0)
	setAttribute(&list, cublasltapi.DescFastAccum, int8(1), p.FastAccum)
	setAttribute(&list, cublasltapi.DescAScaleMode, cublasltapi.ScaleOuterVec32F, p.RowScales)
	setAttribute(&list, cublasltapi.DescBScaleMode, cublasltapi.ScaleOuterVec32F, p.RowScales)
	bias := p.Bias != Layout{}
	setAttribute(&list, cublasltapi.DescBiasDataType, int32(p.Bias.Type), bias)
	setAttribute(&list, cublasltapi.DescBiasBatchStride, p.Bias.Stride, bias && p.Batch > 1)
	aux := p.Aux != Layout{}
	setAttribute(&list, cublasltapi.DescEpilogueAuxLD, p.Aux.LD, aux)
	setAttribute(&list, cublasltapi.DescEpilogueAuxBatchStride, p.Aux.Stride, aux && p.Batch > 1)
	setAttribute(&list, cublasltapi.DescEpilogueAuxDataType, int32(p.Aux.Type), aux && p.Float8 && p.Aux.Type != MaskType)
	return list.err
}

// MaskType is the type of Problem.Aux if it is a bit mask.
const MaskType cublasapi.DType = -1

// attributes sets attributes until the first error.
type attributes struct {
	lt   cublasltapi.API
	desc cublasltapi.MatmulDesc
	err  error
}

func setAttribute[T any](x *attributes, a cublasltapi.DescAttribute, v T, wanted bool) {
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
		a        cublasltapi.DescAttribute
		to, from *cudadrv.DevicePtr
	}{
		{cublasltapi.DescBiasPointer, &y.Bias, &x.Bias}, {cublasltapi.DescEpilogueAuxPointer, &y.Aux, &x.Aux},
		{cublasltapi.DescAScalePointer, &y.ScaleA, &x.ScaleA}, {cublasltapi.DescBScalePointer, &y.ScaleB, &x.ScaleB},
		{cublasltapi.DescCScalePointer, &y.ScaleC, &x.ScaleC}, {cublasltapi.DescDScalePointer, &y.ScaleD, &x.ScaleD},
		{cublasltapi.DescAMaxDPointer, &y.AMax, &x.AMax},
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
