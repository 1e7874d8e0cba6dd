package machine

import (
	"sync"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// cublasLib implements cublasapi.API with gonum's matrix products.
type cublasLib struct {
	m       *Machine
	mu      sync.Mutex
	handles map[cublasapi.Handle]*cublasHandle
	loaded  map[cublasLoaded]bool // kernels that were used; guarded by the machine's lock
}

type cublasHandle struct {
	dev       *Device
	stream    cudadrv.Stream
	workspace Span // empty if there is none
	mode      cublasapi.PointerMode
}

// A cublasLoaded is what products with one kernel have in common.
type cublasLoaded struct {
	dev            *Device
	name           string
	a, b, c        cublasapi.DType
	transA, transB cublasapi.Op
}

// NewCublas returns the cuBLAS of a machine.
func NewCublas(m *Machine) cublasapi.API {
	return &cublasLib{m: m, handles: map[cublasapi.Handle]*cublasHandle{}, loaded: map[cublasLoaded]bool{}}
}

// begin consults the fault plan, unbinds the thread's context and looks up the
// handle, which must belong to the same device.
func (l *cublasLib) begin(name string, h cublasapi.Handle) (*cublasHandle, Fault, cublasapi.Result) {
	dev, x, r := Begin(l.m, name)
	if r != cublasapi.Success {
		return nil, x, r
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	handle := l.handles[h]
	if handle == nil || handle.dev != dev {
		return nil, x, cublasapi.NotInitialized
	}
	return handle, x, cublasapi.Success
}

// Begin begins a call that needs a context: it consults the fault plan, unbinds the thread's
// context and returns its device and the planned fault of its operation.
func Begin(m *Machine, name string) (dev *Device, x Fault, r cublasapi.Result) {
	bound := m.Unbind()
	x = m.FaultIn(bound, name)
	if x.Status != 0 {
		return nil, x, cublasapi.Result(x.Status)
	}
	m.Lock()
	defer m.Unlock()
	dev = m.Retained(bound)
	if dev == nil {
		return nil, x, cublasapi.NotInitialized
	}
	if dev.Status() != cudadrv.Success {
		return nil, x, cublasapi.ExecutionFailed
	}
	if m.Permits(name) != cudadrv.Success {
		return nil, x, cublasapi.NotInitialized
	}
	return dev, x, cublasapi.Success
}

func (l *cublasLib) Create() (cublasapi.Handle, cublasapi.Result) {
	dev, _, r := Begin(l.m, "cublasCreate")
	if r != cublasapi.Success {
		return 0, r
	}
	l.m.Lock()
	h := cublasapi.Handle(l.m.Handle())
	l.m.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handles[h] = &cublasHandle{dev: dev}
	return h, cublasapi.Success
}

func (l *cublasLib) Destroy(h cublasapi.Handle) cublasapi.Result {
	_ = l.m.Unbind()
	if x := l.m.Fault("cublasDestroy"); x.Status != 0 {
		return cublasapi.Result(x.Status)
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
	l.m.Lock()
	defer l.m.Unlock()
	st, res := l.m.Stream(handle.dev, s)
	if res != cudadrv.Success || st.Device() != handle.dev {
		return cublasapi.InvalidValue
	}
	handle.stream, handle.workspace = s, Span{}
	return cublasapi.Success
}

func (l *cublasLib) SetWorkspace(h cublasapi.Handle, p cudadrv.DevicePtr, bytes uintptr) cublasapi.Result {
	handle, _, r := l.begin("cublasSetWorkspace", h)
	if r != cublasapi.Success {
		return r
	}
	if p%WorkspaceAlignment != 0 || p == 0 && bytes > 0 {
		return cublasapi.InvalidValue
	}
	handle.workspace = Span{uint64(p), uint64(p) + uint64(bytes)}
	return cublasapi.Success
}

// WorkspaceAlignment is the alignment of a workspace in bytes. Hopper gives wrong results if
// it is smaller.
const WorkspaceAlignment = 256

func (l *cublasLib) SetMathMode(h cublasapi.Handle, m cublasapi.Math) cublasapi.Result {
	if _, _, r := l.begin("cublasSetMathMode", h); r != cublasapi.Success {
		return r
	}
	if m != cublasapi.DefaultMath && m != cublasapi.MathDisallowReducedPrecisionReduction {
		return cublasapi.InvalidValue
	}
	return cublasapi.Success // the sums over k are never made in parts
}

func (l *cublasLib) SetPointerMode(h cublasapi.Handle, m cublasapi.PointerMode) cublasapi.Result {
	handle, _, r := l.begin("cublasSetPointerMode", h)
	if r != cublasapi.Success {
		return r
	}
	if m>>1 != 0 {
		return cublasapi.InvalidValue
	}
	handle.mode = m
	return cublasapi.Success
}

func (l *cublasLib) SetSmCountTarget(h cublasapi.Handle, n int32) cublasapi.Result {
	if _, _, r := l.begin("cublasSetSmCountTarget", h); r != cublasapi.Success {
		return r
	}
	if n < 0 {
		return cublasapi.InvalidValue
	}
	return cublasapi.Success
}

// A gemm is a batch of products, C = alpha·op(A)·op(B) + beta·C.
type gemm struct {
	Product
	batch       int
	scale       cublasapi.DType
	alpha, beta Scalar
	a, b, c     Operand
	workspace   Span
}

// A Scalar is alpha or beta: a value, or an address on the device.
type Scalar struct {
	value  float64
	device cudadrv.DevicePtr
}

// ScalarOf reads a scalar on the host, or keeps the address for Read.
func ScalarOf(t cublasapi.DType, s cublasapi.Scalar, mode cublasapi.PointerMode) (Scalar, bool) {
	switch {
	case mode == cublasapi.PointerModeDevice:
		return Scalar{device: s.Device}, s.Host == nil && s.Device != 0
	case s.Host == nil:
		return Scalar{}, false
	}
	return Scalar{value: HostScalar(t, s.Host)}, true
}

// Read returns the value as it is when the operation runs, because a scalar may
// be in device memory. The machine is locked.
func (s Scalar) Read(o *Op, t cublasapi.DType) (float64, *Trouble) {
	if s.device == 0 {
		return s.value, nil
	}
	p, trouble := o.Touch(s.device, uint64(SizeOf(t)), false)
	if trouble != nil {
		return 0, trouble
	}
	return Load(t, [][]byte{p})[0], nil
}

func (l *cublasLib) GemmEx(h cublasapi.Handle, ta, tb cublasapi.Op, m, n, k int32, alpha cublasapi.Scalar, a, b cublasapi.Matrix,
	beta cublasapi.Scalar, c cublasapi.Matrix, compute cublasapi.ComputeType, algo int32) cublasapi.Result {
	a.Stride, b.Stride, c.Stride = 0, 0, 0 // not arguments of the function
	return l.gemm("cublasGemmEx", h, ta, tb, m, n, k, alpha, a, b, beta, c, 1, compute, algo)
}

func (l *cublasLib) GemmStridedBatchedEx(h cublasapi.Handle, ta, tb cublasapi.Op, m, n, k int32, alpha cublasapi.Scalar, a, b cublasapi.Matrix,
	beta cublasapi.Scalar, c cublasapi.Matrix, batch int32, compute cublasapi.ComputeType, algo int32) cublasapi.Result {
	return l.gemm("cublasGemmStridedBatchedEx", h, ta, tb, m, n, k, alpha, a, b, beta, c, batch, compute, algo)
}

func (l *cublasLib) gemm(name string, h cublasapi.Handle, ta, tb cublasapi.Op, m, n, k int32, alpha cublasapi.Scalar, a, b cublasapi.Matrix,
	beta cublasapi.Scalar, c cublasapi.Matrix, batch int32, compute cublasapi.ComputeType, algo int32) cublasapi.Result {
	handle, x, r := l.begin(name, h)
	if r != cublasapi.Success {
		return r
	}
	if m < 0 || n < 0 || k < 0 || batch < 0 || ta>>1 != 0 || tb>>1 != 0 || algo < cublasapi.GemmDefault {
		return cublasapi.InvalidValue
	}
	g := &gemm{scale: ScaleTypeOf(compute), batch: int(batch), workspace: handle.workspace,
		Product: Product{TransA: ta == cublasapi.Trans, TransB: tb == cublasapi.Trans,
			M: int(m), N: int(n), K: int(k), A: a.Type, B: b.Type, Compute: compute}}
	g.a, g.b, g.c = operand(a, ta, m, k), operand(b, tb, k, n), operand(c, cublasapi.NoTrans, m, n)
	var ok [2]bool
	g.alpha, ok[0] = ScalarOf(g.scale, alpha, handle.mode)
	g.beta, ok[1] = ScalarOf(g.scale, beta, handle.mode)
	if !ok[0] || !ok[1] || !g.valid() {
		return cublasapi.InvalidValue
	}
	if !g.supported() {
		return cublasapi.NotSupported
	}
	if m == 0 || n == 0 || batch == 0 {
		return cublasapi.Success
	}
	l.m.Lock()
	defer l.m.Unlock()
	// Kernels are loaded at their first use, and loading waits for the device.
	if key := (cublasLoaded{handle.dev, name, a.Type, b.Type, c.Type, ta, tb}); !l.loaded[key] {
		if l.m.Drain("the first product of its kind", handle.dev) != cudadrv.Success {
			return cublasapi.ExecutionFailed
		}
		l.loaded[key] = true
	}
	s, res := l.m.Stream(handle.dev, handle.stream)
	if res != cudadrv.Success || s.Invalidated() {
		return cublasapi.ExecutionFailed
	}
	s.EnqueueCall(name, x, g.run)
	return cublasapi.Success
}

func operand(x cublasapi.Matrix, op cublasapi.Op, rows, cols int32) Operand {
	if op == cublasapi.Trans {
		rows, cols = cols, rows
	}
	return Operand{Ptr: x.Ptr, Type: x.Type, Rows: int(rows), Cols: int(cols), LD: int(x.LD), Stride: x.Stride}
}

// valid checks leading dimensions, and that the matrices of C do not overlap.
func (g *gemm) valid() bool {
	for _, x := range []Operand{g.a, g.b, g.c} {
		if x.LD < max(1, x.Rows) || x.Stride < 0 {
			return false
		}
	}
	return g.c.Disjoint(g.batch)
}

// supported reports whether Chorus uses this combination: inputs of one type with an output
// of that type or float32, and a compute type for them.
func (g *gemm) supported() bool {
	a, c := g.a.Type, g.c.Type
	if g.b.Type != a {
		return false
	}
	half := a == cublasapi.R16F || a == cublasapi.R16BF
	switch g.Compute {
	case cublasapi.Compute64F:
		return a == cublasapi.R64F && c == a
	case cublasapi.Compute16F:
		return a == cublasapi.R16F && c == a
	case cublasapi.Compute32F:
		return half && (c == a || c == cublasapi.R32F) || a == cublasapi.R32F && c == a
	}
	return g.Compute == cublasapi.Compute32FFastTF32 && a == cublasapi.R32F && c == a
}

func (g *gemm) run(o *Op) {
	for i := range g.batch {
		t := Alias(o, g.c.Spans(i), g.a.Spans(i))
		if t == nil {
			t = Alias(o, g.c.Spans(i), g.b.Spans(i))
		}
		if t == nil {
			t = g.one(o, i)
		}
		if t != nil {
			o.Fail(t)
			return
		}
	}
}

// one computes product i without reading C if beta is 0, so that a NaN in C has
// no effect.
func (g *gemm) one(o *Op, i int) *Trouble {
	m := o.Machine()
	m.Lock()
	a, t := g.a.Touch(o, i, false)
	var b, c [][]byte
	if t == nil {
		b, t = g.b.Touch(o, i, false)
	}
	if t == nil {
		c, t = g.c.Touch(o, i, true)
	}
	if w := g.workspace; t == nil {
		_, t = o.Touch(cudadrv.DevicePtr(w.From), w.To-w.From, true)
	}
	var alpha, beta float64
	if t == nil {
		alpha, t = g.alpha.Read(o, g.scale)
	}
	if t == nil {
		beta, t = g.beta.Read(o, g.scale)
	}
	m.Unlock()
	if t != nil {
		return t
	}
	v := g.Sums(a, b)
	Combine(g.scale, v, alpha, beta, g.c.Type, c)
	Store(g.c.Type, c, v)
	return nil
}

// Combine sets v to alpha·v + beta·C, rounded to the scale type after each operation.
func Combine(scale cublasapi.DType, v []float64, alpha, beta float64, t cublasapi.DType, c [][]byte) {
	var old []float64
	if beta != 0 {
		old = Load(t, c)
	}
	for i := range v {
		v[i] = Round(scale, alpha*v[i])
		if old != nil {
			v[i] = Round(scale, v[i]+Round(scale, beta*old[i]))
		}
	}
}
