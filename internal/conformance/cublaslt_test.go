package conformance

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// ltBench computes products with cuBLASLt.
type ltBench struct {
	*rig
	t   *testing.T
	api cublasapi.LtAPI
	h   cublasapi.LtHandle
	s   cudadrv.Stream
}

// in calls fn with the context of the device.
func (b *ltBench) in(fn func() cublasapi.Result) (res cublasapi.Result) {
	b.do(b.t, 0, func() cudadrv.Result { res = fn(); return cudadrv.Success })
	return res
}

// testCUBLASLt tests an implementation of cuBLASLt on the first device.
func testCUBLASLt(t *testing.T, drv cudadrv.Driver, api cublasapi.LtAPI) {
	b := &ltBench{rig: newRig(t, drv), t: t, api: api}
	b.s = b.stream(t, 0)
	require.Greater(t, api.GetVersion(), uintptr(120000))
	require.Equal(t, cublasapi.Success, b.in(func() (r cublasapi.Result) { b.h, r = api.Create(); return r }))
	for _, ty := range gemmTypes {
		for _, ta := range []cublasapi.Op{cublasapi.NoTrans, cublasapi.Trans} {
			for _, tb := range []cublasapi.Op{cublasapi.NoTrans, cublasapi.Trans} {
				t.Run(fmt.Sprintf("%s/%d%d", ty.name, ta, tb), func(t *testing.T) {
					g := &product{rig: b.rig, t: t, s: b.s, dt: ty.dt, ta: ta, tb: tb, m: 7, n: 5, k: 11}
					g.run(func(alpha, beta unsafe.Pointer, x, y, z cudadrv.DevicePtr, lda, ldb, ldc int32) {
						o := b.operation(ty.compute, ty.t, ta, tb, g, lda, ldb, ldc)
						b.multiply(o, alpha, beta, x, y, z)
						b.destroy(o)
					})
				})
			}
		}
	}
	t.Run("attributes", b.attributes)
	t.Run("unsupported", b.unsupported)
	require.Equal(t, cublasapi.Success, b.in(func() cublasapi.Result { return api.Destroy(b.h) }))
}

// operation describes a product of matrices of one type.
func (b *ltBench) operation(compute cublasapi.ComputeType, ty cublasapi.DType, ta, tb cublasapi.Op, g *product, lda, ldb, ldc int32) *cublasapi.Operation {
	scale := cublasapi.R32F
	if ty == cublasapi.R64F {
		scale = ty
	}
	o := new(cublasapi.Operation)
	var r cublasapi.Result
	o.Desc, r = b.api.MatmulDescCreate(compute, scale)
	require.Equal(b.t, cublasapi.Success, r)
	for a, op := range map[cublasapi.DescAttribute]cublasapi.Op{cublasapi.DescTransA: ta, cublasapi.DescTransB: tb} {
		require.Equal(b.t, cublasapi.Success, b.api.MatmulDescSetAttribute(o.Desc, a, unsafe.Pointer(&op), 4))
	}
	layout := func(rows, cols int, op cublasapi.Op, ld int32) cublasapi.MatrixLayout {
		if op == cublasapi.Trans {
			rows, cols = cols, rows
		}
		l, r := b.api.MatrixLayoutCreate(ty, uint64(rows), uint64(cols), int64(ld))
		require.Equal(b.t, cublasapi.Success, r)
		return l
	}
	o.A, o.B = layout(g.m, g.k, ta, lda), layout(g.k, g.n, tb, ldb)
	o.C, o.D = layout(g.m, g.n, cublasapi.NoTrans, ldc), layout(g.m, g.n, cublasapi.NoTrans, ldc)
	return o
}

func (b *ltBench) destroy(o *cublasapi.Operation) {
	require.Equal(b.t, cublasapi.Success, b.api.MatmulDescDestroy(o.Desc))
	for _, l := range []cublasapi.MatrixLayout{o.A, o.B, o.C, o.D} {
		require.Equal(b.t, cublasapi.Success, b.api.MatrixLayoutDestroy(l))
	}
}

// suggest asks for algorithms that need no workspace, for addresses of any alignment.
func (b *ltBench) suggest(o *cublasapi.Operation, align uint32) ([]cublasapi.HeuristicResult, cublasapi.Result) {
	p, r := b.api.MatmulPreferenceCreate()
	require.Equal(b.t, cublasapi.Success, r)
	for i := range cublasapi.PreferenceAttribute(4) {
		require.Equal(b.t, cublasapi.Success, b.api.MatmulPreferenceSetAttribute(p, cublasapi.PreferenceMinAlignmentABytes+i, unsafe.Pointer(&align), 4))
	}
	results := make([]cublasapi.HeuristicResult, 8)
	var n int32
	res := b.in(func() (r cublasapi.Result) { n, r = b.api.MatmulAlgoGetHeuristic(b.h, o, p, results); return r })
	require.Equal(b.t, cublasapi.Success, b.api.MatmulPreferenceDestroy(p))
	return results[:n], res
}

// multiply computes the product in place with the first algorithm that can run.
func (b *ltBench) multiply(o *cublasapi.Operation, alpha, beta unsafe.Pointer, x, y, z cudadrv.DevicePtr) {
	list, r := b.suggest(o, 8)
	require.Equal(b.t, cublasapi.Success, r)
	for _, h := range list {
		if h.State != cublasapi.Success {
			continue
		}
		require.Zero(b.t, h.WorkspaceSize)
		var checked cublasapi.HeuristicResult
		require.Equal(b.t, cublasapi.Success, b.in(func() cublasapi.Result { return b.api.MatmulAlgoCheck(b.h, o, &h.Algo, &checked) }))
		require.Equal(b.t, cublasapi.Success, b.in(func() cublasapi.Result {
			return b.api.Matmul(b.h, o.Desc, cublasapi.Scalar{Host: alpha}, cublasapi.LtMatrix{Ptr: x, Layout: o.A}, cublasapi.LtMatrix{Ptr: y, Layout: o.B},
				cublasapi.Scalar{Host: beta}, cublasapi.LtMatrix{Ptr: z, Layout: o.C}, cublasapi.LtMatrix{Ptr: z, Layout: o.D}, &h.Algo, 0, 0, b.s)
		}))
		return
	}
	require.Fail(b.t, "no algorithm can run")
}

// attributes: a wrong size or number is refused.
func (b *ltBench) attributes(t *testing.T) {
	d, r := b.api.MatmulDescCreate(cublasapi.Compute32F, cublasapi.R32F)
	require.Equal(t, cublasapi.Success, r)
	v := [16]byte{1} // which is valid for all of them
	for a, size := range cublasapi.Attributes {
		if a >= cublasapi.DescAScaleMode && b.api.GetVersion() < 120800 || a == cublasapi.DescComputeType || a == cublasapi.DescScaleType {
			continue
		}
		require.Equal(t, cublasapi.Success, b.api.MatmulDescSetAttribute(d, a, unsafe.Pointer(&v), size), "attribute %d", a)
		require.Equal(t, cublasapi.InvalidValue, b.api.MatmulDescSetAttribute(d, a, unsafe.Pointer(&v), size-1), "attribute %d", a)
	}
	for _, a := range []cublasapi.DescAttribute{-1, 9, 1000} {
		require.Equal(t, cublasapi.InvalidValue, b.api.MatmulDescSetAttribute(d, a, unsafe.Pointer(&v), 4), "attribute %d", a)
	}
	require.Equal(t, cublasapi.Success, b.api.MatmulDescDestroy(d))
}

// unsupported: 8-bit floats need a transposed A on Hopper, and one input that is not e5m2.
func (b *ltBench) unsupported(t *testing.T) {
	g := &product{m: 32, n: 32, k: 32}
	for _, x := range []struct {
		a, b   cublasapi.DType
		ta, tb cublasapi.Op
		ok     bool
	}{
		{cublasapi.R8FE4M3, cublasapi.R8FE4M3, cublasapi.Trans, cublasapi.NoTrans, true},
		{cublasapi.R8FE5M2, cublasapi.R8FE4M3, cublasapi.Trans, cublasapi.NoTrans, true},
		{cublasapi.R8FE5M2, cublasapi.R8FE5M2, cublasapi.Trans, cublasapi.NoTrans, false},
		{cublasapi.R8FE4M3, cublasapi.R8FE4M3, cublasapi.NoTrans, cublasapi.NoTrans, false},
	} {
		if major := b.attribute(t, cudadrv.AttrComputeCapabilityMajor); major != 9 {
			t.Skipf("compute capability %d.x has other rules", major)
		}
		o := b.operation(cublasapi.Compute32F, cublasapi.R16BF, x.ta, x.tb, g, 32, 32, 32)
		for l, ty := range map[*cublasapi.MatrixLayout]cublasapi.DType{&o.A: x.a, &o.B: x.b} {
			require.Equal(t, cublasapi.Success, b.api.MatrixLayoutDestroy(*l))
			var r cublasapi.Result
			*l, r = b.api.MatrixLayoutCreate(ty, 32, 32, 32)
			require.Equal(t, cublasapi.Success, r)
		}
		list, r := b.suggest(o, 16)
		require.Equal(t, x.ok, r == cublasapi.Success && len(list) > 0, "%+v: %v", x, r)
		b.destroy(o)
	}
}

func (b *ltBench) attribute(t *testing.T, a cudadrv.Attribute) int32 {
	v, r := b.drv.DeviceGetAttribute(a, 0)
	require.Equal(t, cudadrv.Success, r)
	return v
}
