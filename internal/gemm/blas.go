package gemm

import (
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// blas is the cuBLAS of a stream. Each stream has a handle, so that products of several
// streams do not share a workspace.
type blas struct {
	api    cublasapi.API
	handle cublasapi.Handle

	// The settings of the handle.
	workspace cudadrv.DevicePtr
	math      cublasapi.Math
	mode      cublasapi.PointerMode
	sms       int32
}

// prepareBLAS makes the handle, and the plan's needs.
func (q *queue) prepareBLAS(p *plan) error {
	p.need = uintptr(q.site.workspace)
	if q.blas != nil {
		return nil
	}
	api, err := q.dev.System().CUBLAS()
	if err != nil {
		return err
	}
	b := &blas{api: api}
	if err := q.bound(func() (err error) {
		var r cublasapi.Result
		b.handle, r = api.Create()
		return failed("cublasCreate", r)
	}); err != nil {
		return err
	}
	q.blas = b
	err = q.bound(func() error { return failed("cublasSetStream", api.SetStream(b.handle, gpu.StreamOf(q.s).Raw())) })
	if err != nil {
		_ = q.closeBLAS()
	}
	return err
}

// closeBLAS destroys the handle.
func (q *queue) closeBLAS() error {
	b := q.blas
	if b == nil {
		return nil
	}
	q.blas = nil
	return q.bound(func() error { return failed("cublasDestroy", b.api.Destroy(b.handle)) })
}

// adjust sets the handle for the call in progress. Each setting is one call, which needs the
// context.
func (q *queue) adjust() error {
	b := q.blas
	if b.workspace != q.room {
		b.workspace = 0
		err := q.bound(func() error {
			return failed("cublasSetWorkspace", b.api.SetWorkspace(b.handle, q.room, uintptr(q.site.workspace)))
		})
		if err != nil {
			return err
		}
		b.workspace = q.room
	}
	math, mode := cublasapi.DefaultMath, cublasapi.PointerModeHost
	if q.now.Schemes&cublasltapi.ReductionOutputType == 0 {
		math = cublasapi.MathDisallowReducedPrecisionReduction
	}
	if q.now.DeviceScalars {
		mode = cublasapi.PointerModeDevice
	}
	if math != b.math {
		if err := q.bound(func() error { return failed("cublasSetMathMode", b.api.SetMathMode(b.handle, math)) }); err != nil {
			return err
		}
		b.math = math
	}
	if mode != b.mode {
		if err := q.bound(func() error { return failed("cublasSetPointerMode", b.api.SetPointerMode(b.handle, mode)) }); err != nil {
			return err
		}
		b.mode = mode
	}
	if sms := q.site.target(q.now.Carveout); sms != b.sms {
		if err := q.bound(func() error { return failed("cublasSetSmCountTarget", b.api.SetSmCountTarget(b.handle, sms)) }); err != nil {
			return err
		}
		b.sms = sms
	}
	return nil
}

// enqueueBLAS makes the call of cuBLAS.
func (q *queue) enqueueBLAS() error {
	b, p := q.blas, &q.now
	alpha, beta := q.scalars.of(p)
	x := cublasapi.Matrix{Ptr: p.At.A, Type: p.A.Type, LD: int32(p.A.LD), Stride: p.A.Stride}
	y := cublasapi.Matrix{Ptr: p.At.B, Type: p.B.Type, LD: int32(p.B.LD), Stride: p.B.Stride}
	z := cublasapi.Matrix{Ptr: p.At.D, Type: p.D.Type, LD: int32(p.D.LD), Stride: p.D.Stride}
	m, n, k := int32(p.M), int32(p.N), int32(p.K)
	if p.Batch == 1 {
		return failed("cublasGemmEx", b.api.GemmEx(b.handle, p.TransA, p.TransB, m, n, k, alpha, x, y, beta, z, p.Compute, cublasapi.GemmDefault))
	}
	return failed("cublasGemmStridedBatchedEx", b.api.GemmStridedBatchedEx(b.handle, p.TransA, p.TransB, m, n, k,
		alpha, x, y, beta, z, int32(p.Batch), p.Compute, cublasapi.GemmDefault))
}
