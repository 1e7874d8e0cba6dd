package virtual

import (
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
	"gonum.org/v1/gonum/blas/blas64"
)

// cublasLib implements cublasapi.API with gonum's products.
type cublasLib struct {
	m       *Machine
	mu      sync.Mutex
	handles map[cublasapi.Handle]*cublasHandle
}

type cublasHandle struct {
	dev    *device
	stream cudadrv.Stream
}

var _ cublasapi.API = (*cublasLib)(nil)

func newCUBLAS(m *Machine) *cublasLib {
	return &cublasLib{m: m, handles: map[cublasapi.Handle]*cublasHandle{}}
}

// begin consults the fault plan, consumes the thread's context and finds the
// handle, which must be of the same device.
func (l *cublasLib) begin(name string, h cublasapi.Handle) (*cublasHandle, bool, cublasapi.Result) {
	dev, hang, r := l.beginDevice(name)
	if r != cublasapi.Success {
		return nil, false, r
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	handle := l.handles[h]
	if handle == nil || handle.dev != dev {
		return nil, false, cublasapi.NotInitialized
	}
	return handle, hang, cublasapi.Success
}

func (l *cublasLib) beginDevice(name string) (*device, bool, cublasapi.Result) {
	bound := l.m.threads.take()
	status, hang := l.m.faults.hit(name)
	if status != 0 {
		return nil, false, cublasapi.Result(status)
	}
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	dev := l.m.deviceOf(bound)
	if dev == nil || dev.retained == 0 {
		return nil, false, cublasapi.NotInitialized
	}
	if dev.status != cudadrv.Success {
		return nil, false, cublasapi.ExecutionFailed
	}
	if l.m.permits(name) != cudadrv.Success {
		return nil, false, cublasapi.NotInitialized
	}
	return dev, hang, cublasapi.Success
}

func (l *cublasLib) Create() (cublasapi.Handle, cublasapi.Result) {
	dev, _, r := l.beginDevice("cublasCreate")
	if r != cublasapi.Success {
		return 0, r
	}
	l.m.mu.Lock()
	h := cublasapi.Handle(l.m.handle())
	l.m.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handles[h] = &cublasHandle{dev: dev}
	return h, cublasapi.Success
}

func (l *cublasLib) Destroy(h cublasapi.Handle) cublasapi.Result {
	_ = l.m.threads.take()
	if status, _ := l.m.faults.hit("cublasDestroy"); status != 0 {
		return cublasapi.Result(status)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.handles[h] == nil {
		return cublasapi.NotInitialized
	}
	delete(l.handles, h)
	return cublasapi.Success
}

func (l *cublasLib) SetStream(h cublasapi.Handle, s cudadrv.Stream) cublasapi.Result {
	handle, _, r := l.begin("cublasSetStream", h)
	if r != cublasapi.Success {
		return r
	}
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	st, res := l.m.stream(handle.dev, s)
	if res != cudadrv.Success || st.dev != handle.dev {
		return cublasapi.InvalidValue
	}
	handle.stream = s
	return cublasapi.Success
}

// A matrix is one operand of a product: columns of rows elements, ld apart.
type matrix struct {
	p          cudadrv.DevicePtr
	t          cublasapi.DType
	rows, cols int
	ld         int
}

// bytes is the extent from the first to the last element.
func (x matrix) bytes() uint64 {
	if x.rows == 0 || x.cols == 0 {
		return 0
	}
	return uint64((x.cols-1)*x.ld+x.rows) * uint64(gemmTypes[x.t].Size())
}

var gemmTypes = map[cublasapi.DType]ncclapi.DType{
	cublasapi.R32F: ncclapi.Float32, cublasapi.R64F: ncclapi.Float64,
	cublasapi.R16F: ncclapi.Float16, cublasapi.R16BF: ncclapi.BFloat16,
}

// A gemm is one product, C = alpha·op(A)·op(B) + beta·C.
type gemm struct {
	ta, tb      cublasapi.Op
	k           int
	alpha, beta float64
	a, b, c     matrix
}

func (l *cublasLib) GemmEx(h cublasapi.Handle, ta, tb cublasapi.Op, m, n, k int32, alpha unsafe.Pointer,
	a cudadrv.DevicePtr, at cublasapi.DType, lda int32, b cudadrv.DevicePtr, bt cublasapi.DType, ldb int32,
	beta unsafe.Pointer, c cudadrv.DevicePtr, ct cublasapi.DType, ldc int32, compute cublasapi.ComputeType, algo int32) cublasapi.Result {
	handle, hang, r := l.begin("cublasGemmEx", h)
	if r != cublasapi.Success {
		return r
	}
	if m < 0 || n < 0 || k < 0 || ta>>1 != 0 || tb>>1 != 0 || alpha == nil || beta == nil || algo < cublasapi.GemmDefault {
		return cublasapi.InvalidValue
	}
	g := &gemm{ta: ta, tb: tb, k: int(k)}
	g.a = operand(a, at, ta, m, k, lda)
	g.b = operand(b, bt, tb, k, n, ldb)
	g.c = operand(c, ct, cublasapi.NoTrans, m, n, ldc)
	for _, x := range []matrix{g.a, g.b, g.c} {
		if x.ld < max(1, x.rows) {
			return cublasapi.InvalidValue
		}
	}
	if !g.supported(compute) {
		return cublasapi.NotSupported
	}
	if compute == cublasapi.Compute64F {
		g.alpha, g.beta = *(*float64)(alpha), *(*float64)(beta)
	} else {
		g.alpha, g.beta = float64(*(*float32)(alpha)), float64(*(*float32)(beta))
	}
	if m == 0 || n == 0 {
		return cublasapi.Success
	}
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	s, res := l.m.stream(handle.dev, handle.stream)
	if res != cudadrv.Success || s.capture != nil && s.capture.invalid {
		return cublasapi.ExecutionFailed
	}
	cl := call{m: l.m, name: "cublasGemmEx", hang: hang}
	cl.enqueue(s, g.run)
	return cublasapi.Success
}

func operand(p cudadrv.DevicePtr, t cublasapi.DType, op cublasapi.Op, rows, cols, ld int32) matrix {
	if op == cublasapi.Trans {
		rows, cols = cols, rows
	}
	return matrix{p: p, t: t, rows: int(rows), cols: int(cols), ld: int(ld)}
}

// supported has the combinations that Chorus relies on: everything in float64,
// or inputs of one type and an output of that type or float32.
func (g *gemm) supported(compute cublasapi.ComputeType) bool {
	if compute == cublasapi.Compute64F {
		return g.a.t == cublasapi.R64F && g.b.t == cublasapi.R64F && g.c.t == cublasapi.R64F
	}
	if compute != cublasapi.Compute32F || g.a.t != g.b.t || g.a.t == cublasapi.R64F {
		return false
	}
	_, known := gemmTypes[g.a.t]
	return known && (g.c.t == g.a.t || g.c.t == cublasapi.R32F)
}

func (g *gemm) run(o *op) {
	m := o.s.dev.m
	var a, b, c []byte
	m.mu.Lock()
	a, t := o.touch(g.a.p, g.a.bytes(), false)
	if t == nil {
		b, t = o.touch(g.b.p, g.b.bytes(), false)
	}
	if t == nil {
		c, t = o.touch(g.c.p, g.c.bytes(), true)
	}
	m.mu.Unlock()
	if t != nil {
		o.fail(t)
		return
	}
	if g.beta == 0 {
		g.clearOutput(c) // beta of 0 means that C is not read, not even a NaN
	}
	if g.c.t == cublasapi.R64F {
		g.product64(a, b, c)
		return
	}
	sum := widen(g.c.t, c)
	g.product32(widen(g.a.t, a), widen(g.b.t, b), sum)
	g.narrow(c, sum)
}

func (g *gemm) clearOutput(c []byte) {
	size := int(gemmTypes[g.c.t].Size())
	for j := range g.c.cols {
		clear(c[j*g.c.ld*size : (j*g.c.ld+g.c.rows)*size])
	}
}

// widen returns elements as float32, converted if need be.
func widen(t cublasapi.DType, p []byte) []float32 {
	if t == cublasapi.R32F {
		return view[float32](p)
	}
	v := make([]float32, len(p)/2)
	codecs[gemmTypes[t]].decode(v, p)
	return v
}

// narrow writes the result's columns, and nothing between them.
func (g *gemm) narrow(c []byte, sum []float32) {
	if g.c.t == cublasapi.R32F {
		return
	}
	for j := range g.c.cols {
		lo, hi := j*g.c.ld, j*g.c.ld+g.c.rows
		codecs[gemmTypes[g.c.t]].encode(c[2*lo:2*hi], sum[lo:hi])
	}
}

// gonum's matrices are row-major. A column-major matrix is the row-major one
// transposed, so that the product is computed as Cᵀ = op(B)ᵀ·op(A)ᵀ.

func (g *gemm) product32(a, b, c []float32) {
	blas32.Gemm(transpose(g.tb), transpose(g.ta), float32(g.alpha),
		blas32.General{Rows: g.b.cols, Cols: g.b.rows, Stride: g.b.ld, Data: b},
		blas32.General{Rows: g.a.cols, Cols: g.a.rows, Stride: g.a.ld, Data: a}, float32(g.beta),
		blas32.General{Rows: g.c.cols, Cols: g.c.rows, Stride: g.c.ld, Data: c})
}

func (g *gemm) product64(a, b, c []byte) {
	blas64.Gemm(transpose(g.tb), transpose(g.ta), g.alpha,
		blas64.General{Rows: g.b.cols, Cols: g.b.rows, Stride: g.b.ld, Data: view[float64](b)},
		blas64.General{Rows: g.a.cols, Cols: g.a.rows, Stride: g.a.ld, Data: view[float64](a)}, g.beta,
		blas64.General{Rows: g.c.cols, Cols: g.c.rows, Stride: g.c.ld, Data: view[float64](c)})
}

func transpose(op cublasapi.Op) blas.Transpose {
	if op == cublasapi.Trans {
		return blas.Trans
	}
	return blas.NoTrans
}
