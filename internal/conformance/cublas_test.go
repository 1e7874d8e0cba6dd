package conformance

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

var gemmTypes = []struct {
	name    string
	t       cublasapi.DType
	dt      ncclapi.DType
	compute cublasapi.ComputeType
}{
	{"f32", cublasapi.R32F, ncclapi.Float32, cublasapi.Compute32F},
	{"f64", cublasapi.R64F, ncclapi.Float64, cublasapi.Compute64F},
	{"f16", cublasapi.R16F, ncclapi.Float16, cublasapi.Compute32F},
	{"bf16", cublasapi.R16BF, ncclapi.BFloat16, cublasapi.Compute32F},
}

// testCUBLAS tests an implementation of cuBLAS on the first device.
func testCUBLAS(t *testing.T, drv cudadrv.Driver, api cublasapi.API) {
	r := newRig(t, drv)
	s := r.stream(t, 0)
	var h cublasapi.Handle
	blas := func(f func() cublasapi.Result) (res cublasapi.Result) {
		r.do(t, 0, func() cudadrv.Result { res = f(); return cudadrv.Success })
		return res
	}
	require.Equal(t, cublasapi.Success, blas(func() (res cublasapi.Result) { h, res = api.Create(); return res }))
	require.Equal(t, cublasapi.Success, blas(func() cublasapi.Result { return api.SetStream(h, s) }))
	for _, ty := range gemmTypes {
		for _, ta := range []cublasapi.Op{cublasapi.NoTrans, cublasapi.Trans} {
			for _, tb := range []cublasapi.Op{cublasapi.NoTrans, cublasapi.Trans} {
				t.Run(fmt.Sprintf("%s/%d%d", ty.name, ta, tb), func(t *testing.T) {
					g := &product{rig: r, t: t, s: s, dt: ty.dt, ta: ta, tb: tb, m: 7, n: 5, k: 11}
					g.run(func(alpha, beta unsafe.Pointer, a, b, c cudadrv.DevicePtr, lda, ldb, ldc int32) {
						res := blas(func() cublasapi.Result {
							return api.GemmEx(h, ta, tb, 7, 5, 11, cublasapi.Scalar{Host: alpha}, cublasapi.Matrix{Ptr: a, Type: ty.t, LD: lda},
								cublasapi.Matrix{Ptr: b, Type: ty.t, LD: ldb}, cublasapi.Scalar{Host: beta},
								cublasapi.Matrix{Ptr: c, Type: ty.t, LD: ldc}, ty.compute, cublasapi.GemmDefault)
						})
						require.Equal(t, cublasapi.Success, res)
					})
				})
			}
		}
	}
	t.Run("short leading dimension", func(t *testing.T) {
		p := r.alloc(t, 0, 4096)
		one := cublasapi.Scalar{Host: unsafe.Pointer(new(float32(1)))}
		short, x := cublasapi.Matrix{Ptr: p, Type: cublasapi.R32F, LD: 3}, cublasapi.Matrix{Ptr: p, Type: cublasapi.R32F, LD: 4}
		res := blas(func() cublasapi.Result {
			return api.GemmEx(h, cublasapi.NoTrans, cublasapi.NoTrans, 4, 4, 4, one, short, x, one, x, cublasapi.Compute32F, cublasapi.GemmDefault)
		})
		require.Equal(t, cublasapi.InvalidValue, res)
	})
	require.Equal(t, cublasapi.Success, blas(func() cublasapi.Result { return api.Destroy(h) }))
}

// A product is one test of GemmEx, with leading dimensions longer than necessary.
type product struct {
	*rig
	t       *testing.T
	s       cudadrv.Stream
	dt      ncclapi.DType
	ta, tb  cublasapi.Op
	m, n, k int
}

func (g *product) run(call func(alpha, beta unsafe.Pointer, a, b, c cudadrv.DevicePtr, lda, ldb, ldc int32)) {
	lda, ldb, ldc := g.m+2, g.k+3, g.m+1
	acols, bcols := g.k, g.n
	if g.ta == cublasapi.Trans {
		lda, acols = g.k+2, g.m
	}
	if g.tb == cublasapi.Trans {
		ldb, bcols = g.n+3, g.k
	}
	a, av := g.operand(lda*acols, 1)
	b, bv := g.operand(ldb*bcols, 2)
	c, cv := g.operand(ldc*g.n, 3)
	const alpha, beta = 1.5, -0.5
	if g.dt == ncclapi.Float64 {
		x, y := new(float64(alpha)), new(float64(beta))
		call(unsafe.Pointer(x), unsafe.Pointer(y), a, b, c, int32(lda), int32(ldb), int32(ldc))
	} else {
		x, y := new(float32(alpha)), new(float32(beta))
		call(unsafe.Pointer(x), unsafe.Pointer(y), a, b, c, int32(lda), int32(ldb), int32(ldc))
	}
	got := g.download(g.t, 0, g.s, c, len(cv))
	l := layouts[g.dt]
	at := func(v []byte, i int) float64 { return l.value(bitsAt(g.dt, v, i)) }
	for j := range g.n {
		for i := range ldc {
			index := j*ldc + i
			if i >= g.m {
				require.Equal(g.t, bitsAt(g.dt, cv, index), bitsAt(g.dt, got, index), "an element between the columns was written")
				continue
			}
			sum, size := beta*at(cv, index), math.Abs(beta*at(cv, index))
			for p := range g.k {
				x, y := at(av, pick(g.ta, i, p, lda)), at(bv, pick(g.tb, p, j, ldb))
				sum, size = sum+alpha*x*y, size+math.Abs(alpha*x*y)
			}
			require.InDelta(g.t, sum, at(got, index), l.eps()*math.Abs(sum)+float64(g.k+2)*float64(1.2e-7)*size, "row %d, column %d", i, j)
		}
	}
}

// pick returns the index of element (i, j) of op(X).
func pick(op cublasapi.Op, i, j, ld int) int {
	if op == cublasapi.Trans {
		i, j = j, i
	}
	return j*ld + i
}

func (g *product) operand(count int, seed uint64) (cudadrv.DevicePtr, []byte) {
	v := input(g.dt, ncclapi.Sum, count, seed)
	p := g.alloc(g.t, 0, uintptr(len(v)))
	g.upload(g.t, 0, g.s, p, v)
	g.sync(g.t, 0, g.s)
	return p, v
}
