package machine

import (
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// A blasRig has a device with a stream, memory, and a product of 64x64 matrices of bfloat16.
type blasRig struct {
	t   *testing.T
	m   *Machine
	ctx []cudadrv.Context
	api cublasapi.LtAPI
	h   cublasapi.LtHandle
	s   cudadrv.Stream
	mem cudadrv.DevicePtr
	o   cublasapi.Operation
	x   blasCall
}

// A blasCall is the arguments of Matmul.
type blasCall struct {
	a, b, c, d, workspace cudadrv.DevicePtr
	bytes                 uintptr
	algo                  cublasapi.Algo
}

const (
	side  = 64
	plane = 16384 // bytes between the matrices
)

func newBlasRig(t *testing.T) *blasRig {
	m, err := New(&Config{Devices: 2})
	require.NoError(t, err)
	r := &blasRig{t: t, m: m, api: NewCublasLt(m)}
	drv := m.Driver()
	require.Equal(t, cudadrv.Success, drv.Init())
	for d := range cudadrv.Device(2) {
		c, res := drv.DevicePrimaryCtxRetain(d)
		require.Equal(t, cudadrv.Success, res)
		r.ctx = append(r.ctx, c)
	}
	r.cu(func() (res cudadrv.Result) { r.s, res = drv.StreamCreateWithPriority(1, 0); return res })
	r.cu(func() (res cudadrv.Result) { r.mem, res = drv.MemAlloc(8 * plane); return res })
	r.cu(func() cudadrv.Result { return drv.MemsetD8Async(r.mem, 0, 8*plane, r.s) })
	require.Equal(t, cublasapi.Success, r.in(0, func() (res cublasapi.Result) { r.h, res = r.api.Create(); return res }))
	var res cublasapi.Result
	r.o.Desc, res = r.api.MatmulDescCreate(cublasapi.Compute32F, cublasapi.R32F)
	require.Equal(t, cublasapi.Success, res)
	for _, l := range []*cublasapi.MatrixLayout{&r.o.A, &r.o.B, &r.o.C, &r.o.D} {
		*l = r.layout(cublasapi.R16BF, side, side, side)
	}
	r.x = blasCall{a: r.mem, b: r.mem + plane, c: r.mem + 2*plane, d: r.mem + 2*plane, workspace: r.mem + 3*plane, bytes: warpedBytes}
	list, res := r.suggest(warpedBytes)
	require.Equal(t, cublasapi.Success, res)
	r.x.algo = list[0].Algo
	return r
}

// in calls fn with the context of a device.
func (r *blasRig) in(dev int, fn func() cublasapi.Result) cublasapi.Result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.Equal(r.t, cudadrv.Success, r.m.Driver().CtxSetCurrent(r.ctx[dev]))
	return fn()
}

func (r *blasRig) cu(fn func() cudadrv.Result) {
	r.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.Equal(r.t, cudadrv.Success, r.m.Driver().CtxSetCurrent(r.ctx[0]))
	require.Equal(r.t, cudadrv.Success, fn())
}

func (r *blasRig) layout(t cublasapi.DType, rows, cols uint64, ld int64) cublasapi.MatrixLayout {
	l, res := r.api.MatrixLayoutCreate(t, rows, cols, ld)
	require.Equal(r.t, cublasapi.Success, res)
	return l
}

func put[T any](r *blasRig, a cublasapi.DescAttribute, v T) {
	r.t.Helper()
	require.Equal(r.t, cublasapi.Success, r.api.MatmulDescSetAttribute(r.o.Desc, a, unsafe.Pointer(&v), unsafe.Sizeof(v)))
}

// suggest asks for algorithms with a limit of the workspace.
func (r *blasRig) suggest(workspace uint64) (list []cublasapi.HeuristicResult, res cublasapi.Result) {
	p, res := r.api.MatmulPreferenceCreate()
	require.Equal(r.t, cublasapi.Success, res)
	require.Equal(r.t, cublasapi.Success, r.api.MatmulPreferenceSetAttribute(p, cublasapi.PreferenceMaxWorkspaceBytes, unsafe.Pointer(&workspace), 8))
	list = make([]cublasapi.HeuristicResult, 1)
	res = r.in(0, func() (res cublasapi.Result) { _, res = r.api.MatmulAlgoGetHeuristic(r.h, &r.o, p, list); return res })
	require.Equal(r.t, cublasapi.Success, r.api.MatmulPreferenceDestroy(p))
	return list, res
}

// multiply calls the library.
func (r *blasRig) multiply() cublasapi.Result {
	f := [2]float32{1, 0}
	x := &r.x
	return r.in(0, func() cublasapi.Result {
		return r.api.Matmul(r.h, r.o.Desc, cublasapi.Scalar{Host: unsafe.Pointer(&f[0])}, cublasapi.LtMatrix{Ptr: x.a, Layout: r.o.A}, cublasapi.LtMatrix{Ptr: x.b, Layout: r.o.B},
			cublasapi.Scalar{Host: unsafe.Pointer(&f[1])}, cublasapi.LtMatrix{Ptr: x.c, Layout: r.o.C}, cublasapi.LtMatrix{Ptr: x.d, Layout: r.o.D},
			&x.algo, x.workspace, x.bytes, r.s)
	})
}

// Arguments that real libraries refuse, or that give wrong results there, are errors of the
// call.
func TestArguments(t *testing.T) {
	for name, f := range map[string]func(r *blasRig){
		"small workspace":      func(r *blasRig) { r.x.bytes = warpedBytes - 1 },
		"unaligned workspace":  func(r *blasRig) { r.x.workspace += 128 },
		"unaligned A":          func(r *blasRig) { r.x.a += 2 },
		"unaligned D":          func(r *blasRig) { r.x.c += 8; r.x.d += 8 },
		"no B":                 func(r *blasRig) { r.x.b = 0 },
		"no algorithm":         func(r *blasRig) { r.x.algo = cublasapi.Algo{} },
		"another inner length": func(r *blasRig) { r.o.B = r.layout(cublasapi.R16BF, side+1, side, side+1) },
		"short leading dimension": func(r *blasRig) {
			r.o.A = r.layout(cublasapi.R16BF, side, side, side-1)
		},
		"other batch": func(r *blasRig) {
			n := int32(2)
			require.Equal(r.t, cublasapi.Success, r.api.MatrixLayoutSetAttribute(r.o.B, cublasapi.LayoutBatchCount, unsafe.Pointer(&n), 4))
		},
		"C in place with another layout": func(r *blasRig) { r.o.C = r.layout(cublasapi.R16BF, side, side, side+8) },
		"no bias":                        func(r *blasRig) { put(r, cublasapi.DescEpilogue, cublasapi.EpilogueBias) },
		"no auxiliary buffer":            func(r *blasRig) { put(r, cublasapi.DescEpilogue, cublasapi.EpilogueDGELU) },
		"mask of 64 bits": func(r *blasRig) {
			put(r, cublasapi.DescEpilogue, cublasapi.EpilogueReLUAux)
			put(r, cublasapi.DescEpilogueAuxPointer, r.mem+4*plane)
			put(r, cublasapi.DescEpilogueAuxLD, int64(side))
		},
		"unaligned bias": func(r *blasRig) {
			put(r, cublasapi.DescEpilogue, cublasapi.EpilogueBias)
			put(r, cublasapi.DescBiasPointer, r.mem+4*plane+2)
		},
		"factors on the host in device mode": func(r *blasRig) { put(r, cublasapi.DescPointerMode, cublasapi.PointerModeDevice) },
		"destroyed descriptor":               func(r *blasRig) { require.Equal(r.t, cublasapi.Success, r.api.MatmulDescDestroy(r.o.Desc)) },
		"destroyed layout":                   func(r *blasRig) { require.Equal(r.t, cublasapi.Success, r.api.MatrixLayoutDestroy(r.o.B)) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newBlasRig(t)
			require.Equal(t, cublasapi.Success, r.multiply(), "before")
			f(r)
			require.Equal(t, cublasapi.InvalidValue, r.multiply())
			require.Empty(t, r.m.Reports())
		})
	}
}

// Combinations that no algorithm computes.
func TestUnsupported(t *testing.T) {
	layouts := func(r *blasRig, a, b, c, d cublasapi.DType) {
		r.o.A, r.o.B, r.o.C, r.o.D = r.layout(a, side, side, side), r.layout(b, side, side, side), r.layout(c, side, side, side), r.layout(d, side, side, side)
	}
	e4, e5, bf, f32 := cublasapi.R8FE4M3, cublasapi.R8FE5M2, cublasapi.R16BF, cublasapi.R32F
	trans := func(r *blasRig) { put(r, cublasapi.DescTransA, int32(1)) }
	for name, f := range map[string]func(r *blasRig){
		"mixed inputs":      func(r *blasRig) { layouts(r, bf, cublasapi.R16F, bf, bf) },
		"C of another type": func(r *blasRig) { layouts(r, bf, bf, f32, bf) },
		"8-bit NN":          func(r *blasRig) { layouts(r, e4, e4, bf, bf) },
		"8-bit TT":          func(r *blasRig) { trans(r); put(r, cublasapi.DescTransB, int32(1)); layouts(r, e4, e4, bf, bf) },
		"two e5m2":          func(r *blasRig) { trans(r); layouts(r, e5, e5, bf, bf) },
		"e5m2 of e4m3":      func(r *blasRig) { trans(r); layouts(r, e4, e4, bf, e5) },
		"8-bit C":           func(r *blasRig) { trans(r); layouts(r, e4, e4, e4, e4) },
		"8-bit gradient": func(r *blasRig) {
			trans(r)
			layouts(r, e4, e4, bf, bf)
			put(r, cublasapi.DescEpilogue, cublasapi.EpilogueDGELU)
		},
		"scale of bfloat16":     func(r *blasRig) { put(r, cublasapi.DescAScalePointer, r.mem) },
		"fast sums of bfloat16": func(r *blasRig) { put(r, cublasapi.DescFastAccum, int8(1)) },
		"scale of a bfloat16 D": func(r *blasRig) { trans(r); layouts(r, e4, e4, bf, bf); put(r, cublasapi.DescDScalePointer, r.mem) },
		"gradient of float32 input": func(r *blasRig) {
			layouts(r, f32, f32, f32, f32)
			put(r, cublasapi.DescEpilogue, cublasapi.EpilogueBGradA)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newBlasRig(t)
			f(r)
			_, res := r.suggest(1 << 20)
			require.Equal(t, cublasapi.NotSupported, res)
			require.Equal(t, cublasapi.NotSupported, r.multiply())
		})
	}
	r := newBlasRig(t)
	trans(r)
	layouts(r, e4, e5, bf, bf)
	_, res := r.suggest(1 << 20)
	require.Equal(t, cublasapi.Success, res, "a product that is supported")
}

// Calls need the context of the handle's device.
func TestContexts(t *testing.T) {
	r := newBlasRig(t)
	x := new(cublasapi.HeuristicResult)
	check := func() cublasapi.Result { return r.api.MatmulAlgoCheck(r.h, &r.o, &r.x.algo, x) }
	require.Equal(t, cublasapi.Success, r.in(0, check))
	require.Equal(t, uintptr(warpedBytes), x.WorkspaceSize)
	require.Equal(t, cublasapi.NotInitialized, r.in(1, check), "another device")
	require.Equal(t, cublasapi.NotInitialized, check(), "no context")
}

// Uses of memory that the GPU would not notice are reported when the product runs.
func TestReports(t *testing.T) {
	for name, x := range map[string]struct {
		change func(r *blasRig)
		want   string
	}{
		"output in A":          {func(r *blasRig) { r.x.c, r.x.d = r.x.a+128, r.x.a+128 }, "shares the bytes"},
		"output in B":          {func(r *blasRig) { r.x.c, r.x.d = r.x.b, r.x.b }, "shares the bytes"},
		"output beside C":      {func(r *blasRig) { r.x.c += 256 }, "shares the bytes"},
		"output out of bounds": {func(r *blasRig) { r.x.c, r.x.d = r.mem+8*plane-256, r.mem+8*plane-256 }, "past the end"},
		"workspace of nobody":  {func(r *blasRig) { r.x.workspace = r.mem + 16*plane }, "past the end"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newBlasRig(t)
			x.change(r)
			require.Equal(t, cublasapi.Success, r.multiply())
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			require.Equal(t, cudadrv.Success, r.m.Driver().CtxSetCurrent(r.ctx[0]))
			require.NotEqual(t, cudadrv.Success, r.m.Driver().StreamSynchronize(r.s))
			require.Contains(t, strings.Join(r.m.Reports(), "\n"), x.want)
		})
	}
}

// Algorithms are rebuilt from their numbers, and compute the same.
func TestAlgorithms(t *testing.T) {
	r := newBlasRig(t)
	types := &cublasapi.Types{Compute: cublasapi.Compute32F, Scale: cublasapi.R32F, A: cublasapi.R16BF, B: cublasapi.R16BF, C: cublasapi.R16BF, D: cublasapi.R16BF}
	algo := new(cublasapi.Algo)
	require.Equal(t, cublasapi.Success, r.in(0, func() cublasapi.Result { return r.api.MatmulAlgoInit(r.h, types, simple, algo) }))
	configure := func(a cublasapi.ConfigAttribute, v uint32) {
		require.Equal(t, cublasapi.Success, r.api.MatmulAlgoConfigSetAttribute(algo, a, unsafe.Pointer(&v), 4))
	}
	check := func() (uintptr, cublasapi.Result) {
		x := new(cublasapi.HeuristicResult)
		res := r.in(0, func() cublasapi.Result { return r.api.MatmulAlgoCheck(r.h, &r.o, algo, x) })
		return x.WorkspaceSize, res
	}
	bytes, res := check()
	require.Equal(t, cublasapi.Success, res)
	require.Zero(t, bytes)
	configure(cublasapi.ConfigSplitKNum, 4)
	_, res = check()
	require.Equal(t, cublasapi.NotSupported, res, "parts, and no way to add them")
	for scheme, want := range map[cublasapi.ReductionScheme]uintptr{
		cublasapi.ReductionComputeType: 4 * side * side * 4, cublasapi.ReductionOutputType: 4 * side * side * 2, cublasapi.ReductionInPlace: 4 * side} {
		configure(cublasapi.ConfigReductionScheme, uint32(scheme))
		bytes, res = check()
		require.Equal(t, cublasapi.Success, res)
		require.Equal(t, want, bytes)
	}
	v := uint32(0)
	w, res := r.api.MatmulAlgoConfigGetAttribute(algo, cublasapi.ConfigSplitKNum, unsafe.Pointer(&v), 4)
	require.Equal(t, []any{uintptr(4), cublasapi.Success, uint32(4)}, []any{w, res, v})
	require.Equal(t, cublasapi.InvalidValue, r.api.MatmulAlgoConfigSetAttribute(algo, cublasapi.ConfigInnerShapeID, unsafe.Pointer(&v), 4), "16 bits")
	require.Equal(t, cublasapi.InvalidValue, r.api.MatmulAlgoConfigSetAttribute(algo, cublasapi.ConfigID, unsafe.Pointer(&v), 4), "read only")
	configure(cublasapi.ConfigTileID, 1000)
	_, res = check()
	require.Equal(t, cublasapi.NotSupported, res)
}

// The contents of an algorithm fit into cublasapi.Algo.
func TestAlgoFits(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(algo{}), unsafe.Sizeof(cublasapi.Algo{}))
}
