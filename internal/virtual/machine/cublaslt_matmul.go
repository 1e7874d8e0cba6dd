package machine

import (
	"math"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// A matmul is one product that is enqueued.
type matmul struct {
	shape
	algo        algo
	need        uintptr
	alpha, beta Scalar
	a, b, c, o  Operand
	workspace   cudadrv.DevicePtr
}

func (l *ltLib) Matmul(h cublasapi.LtHandle, d cublasapi.MatmulDesc, alpha cublasapi.Scalar, a, b cublasapi.LtMatrix, beta cublasapi.Scalar,
	c, out cublasapi.LtMatrix, x *cublasapi.Algo, workspace cudadrv.DevicePtr, bytes uintptr, stream cudadrv.Stream) cublasapi.Result {
	dev, planned, r := l.begin("cublasLtMatmul", h)
	if r != cublasapi.Success {
		return r
	}
	s, r := l.shapeOf(&cublasapi.Operation{Desc: d, A: a.Layout, B: b.Layout, C: c.Layout, D: out.Layout})
	if r != cublasapi.Success {
		return r
	}
	g := &matmul{shape: *s, workspace: workspace}
	config := open(x)
	if config == nil || workspace%WorkspaceAlignment != 0 || workspace == 0 && bytes > 0 {
		return cublasapi.InvalidValue
	}
	g.algo = *config
	var ok bool
	if g.need, ok = s.need(config); !ok {
		return cublasapi.NotSupported
	}
	mode := cublasapi.PointerMode(s.d.mode)
	var set [2]bool
	g.alpha, set[0] = ScalarOf(cublasapi.DType(s.d.scale), alpha, mode)
	g.beta, set[1] = ScalarOf(cublasapi.DType(s.d.scale), beta, mode)
	g.a, g.b, g.c, g.o = ltOperand(a.Ptr, s.a), ltOperand(b.Ptr, s.b), ltOperand(c.Ptr, s.c), ltOperand(out.Ptr, s.o)
	if !set[0] || !set[1] || g.need > bytes || !g.pointersFit() {
		return cublasapi.InvalidValue
	}
	l.m.Lock()
	defer l.m.Unlock()
	// Kernels are loaded at their first use, and loading waits for the device.
	if key := (ltKernel{dev, g.algo, s.a.t, s.b.t, s.o.t, s.d.transA, s.d.transB}); !l.loaded[key] {
		if l.m.Drain("the first product of its kind", dev) != cudadrv.Success {
			return cublasapi.ExecutionFailed
		}
		l.loaded[key] = true
	}
	st, res := l.m.Stream(dev, stream)
	if res != cudadrv.Success || st.Device() != dev || st.Invalidated() {
		return cublasapi.ExecutionFailed
	}
	st.EnqueueCall("cublasLtMatmul", planned, g.run)
	return cublasapi.Success
}

func ltOperand(p cudadrv.DevicePtr, x layout) Operand {
	return Operand{Ptr: p, Type: x.t, Rows: int(x.rows), Cols: int(x.cols), LD: int(x.ld), Stride: x.stride}
}

// pointersFit checks the addresses of the matrices.
func (g *matmul) pointersFit() bool {
	for i, p := range []cudadrv.DevicePtr{g.a.Ptr, g.b.Ptr, g.c.Ptr, g.o.Ptr} {
		if p == 0 && i != 2 || uint64(p)%uint64(g.algo.align[i]) != 0 {
			return false
		}
	}
	if g.readsBias() || g.writesBias() {
		// The alignment of D includes the bias.
		if uint64(g.d.bias)%uint64(min(int(g.algo.align[3]), 16)) != 0 {
			return false
		}
	}
	if g.c.Ptr == g.o.Ptr {
		return g.shape.c == g.shape.o
	}
	// The library's choice considers the columns of C only, and a kernel would lose the device.
	pitch := g.shape.o.ld * int64(SizeOf(g.shape.o.t))
	return pitch%int64(g.algo.align[3]) == 0
}

func (g *matmul) run(o *Op) {
	for i := range int(g.shape.o.batch) {
		t := g.alias(o, i)
		if t == nil {
			t = g.one(o, i)
		}
		if t != nil {
			o.Fail(t)
			return
		}
	}
}

// alias finds an output that shares memory with another matrix.
func (g *matmul) alias(o *Op, i int) *Trouble {
	out := g.o.Spans(i)
	others := []Operand{g.a, g.b}
	if g.c.Ptr != g.o.Ptr && g.c.Ptr != 0 {
		others = append(others, g.c)
	}
	if g.readsAux() || g.writesAux() {
		others = append(others, g.auxOperand())
	}
	for _, x := range others {
		if t := Alias(o, out, x.Spans(i)); t != nil {
			return t
		}
	}
	return nil
}

// auxOperand returns the auxiliary buffer; of a bit mask, as bytes.
func (g *matmul) auxOperand() Operand {
	if g.masks() {
		return Operand{Ptr: g.d.aux, Type: cublasapi.R8FE4M3, Rows: (g.m + 7) / 8, Cols: g.n, LD: int(g.d.auxLD / 8), Stride: g.d.auxStride / 8}
	}
	return Operand{Ptr: g.d.aux, Type: g.auxType(), Rows: g.m, Cols: g.n, LD: int(g.d.auxLD), Stride: g.d.auxStride}
}

// A part is one product of the batch: the values and the memory of the operands.
type part struct {
	alpha, beta    float64
	a, b, c, out   [][]byte
	aux            [][]byte
	bias           []byte
	scaleA, scaleB []float64
	scaleC, scaleD float64
	amax           []byte
}

// returnsEarly reports whether the product writes nothing: cuBLASLt 13 leaves D
// as it is if D is a vector, alpha is 0 and beta is 1, even if D is not C or an
// epilogue follows.
func (g *matmul) returnsEarly(p *part) bool {
	return min(g.m, g.n) == 1 && p.alpha == 0 && p.beta == 1 && !g.is(cublasapi.EpilogueBGradA, cublasapi.EpilogueBGradB)
}

// one computes product i.
func (g *matmul) one(o *Op, i int) *Trouble {
	m := o.Machine()
	m.Lock()
	p, t := g.touch(o, i)
	m.Unlock()
	if t != nil {
		return t
	}
	if g.returnsEarly(p) {
		return nil
	}
	f32 := cublasapi.DType(g.d.scale)
	product := Product{TransA: g.d.transA != 0, TransB: g.d.transB != 0, M: g.m, N: g.n, K: g.k,
		A: g.a.Type, B: g.b.Type, Compute: cublasapi.ComputeType(g.d.compute), Parts: int(g.algo.splitK), Partial: f32}
	if cublasapi.ReductionScheme(g.algo.scheme) == cublasapi.ReductionOutputType {
		product.Partial = g.o.Type
	}
	v := product.Sums(p.a, p.b)
	g.scaleRows(v, p)
	Combine(f32, v, p.alpha, p.beta*p.scaleC, g.c.Type, p.c)
	g.epilogue(v, p)
	if g.is(cublasapi.EpilogueBGradA, cublasapi.EpilogueBGradB) {
		g.inputGradient(p)
	}
	if p.amax != nil {
		most := 0.0
		if i > 0 {
			most = Load(cublasapi.R32F, [][]byte{p.amax})[0] // of the whole batch
		}
		for _, x := range v {
			most = max(most, math.Abs(x))
		}
		Store(cublasapi.R32F, [][]byte{p.amax}, []float64{most})
	}
	for j := range v {
		v[j] = Round(f32, v[j]*p.scaleD)
	}
	Store(g.o.Type, p.out, v)
	if o.Wrong() {
		Spoil(p.out[0])
	}
	return nil
}

// scaleRows applies the scales of A and B.
func (g *matmul) scaleRows(v []float64, p *part) {
	for j := range g.n {
		for i := range g.m {
			s := p.scaleA[min(i, len(p.scaleA)-1)] * p.scaleB[min(j, len(p.scaleB)-1)]
			v[j*g.m+i] = Round(cublasapi.DType(g.d.scale), v[j*g.m+i]*s)
		}
	}
}

// A toucher gets memory for an operation until the first trouble. The machine is locked.
type toucher struct {
	o *Op
	i int // of the product in the batch
	t *Trouble
}

func (x *toucher) matrix(m Operand, write bool) (parts [][]byte) {
	if x.t == nil {
		parts, x.t = m.Touch(x.o, x.i, write)
	}
	return parts
}

// vector returns nil for address 0.
func (x *toucher) vector(at cudadrv.DevicePtr, n int, ty cublasapi.DType, write bool) (v []byte) {
	if x.t == nil && at != 0 {
		v, x.t = x.o.Touch(at, uint64(n*SizeOf(ty)), write)
	}
	return v
}

// scale returns 1 for address 0.
func (x *toucher) scale(at cudadrv.DevicePtr, n int) []float64 {
	if v := x.vector(at, n, cublasapi.R32F, false); v != nil {
		return Load(cublasapi.R32F, [][]byte{v})
	}
	return []float64{1}
}

func (x *toucher) value(s Scalar, ty cublasapi.DType) (v float64) {
	if x.t == nil {
		v, x.t = s.Read(x.o, ty)
	}
	return v
}

// touch returns the memory of product i and records that the operation reads or
// writes it. The machine is locked.
func (g *matmul) touch(o *Op, i int) (*part, *Trouble) {
	p, x, scale := new(part), &toucher{o: o, i: i}, cublasapi.DType(g.d.scale)
	p.alpha, p.beta = x.value(g.alpha, scale), x.value(g.beta, scale)
	p.a, p.b = x.matrix(g.a, false), x.matrix(g.b, false)
	if p.beta != 0 {
		p.c = x.matrix(g.c, false)
	}
	p.out = x.matrix(g.o, true)
	if g.readsAux() || g.writesAux() {
		p.aux = x.matrix(g.auxOperand(), g.writesAux())
	}
	if g.readsBias() || g.writesBias() {
		n := g.m
		if g.is(cublasapi.EpilogueBGradB) {
			n = g.n
		}
		at := g.d.bias + cudadrv.DevicePtr(int64(i)*g.d.biasStride*int64(SizeOf(g.biasType())))
		p.bias = x.vector(at, n, g.biasType(), g.writesBias())
	}
	rowsA, rowsB := 1, 1
	if g.d.modeA == int32(cublasapi.ScaleOuterVec32F) {
		rowsA, rowsB = g.m, g.n
	}
	p.scaleA, p.scaleB = x.scale(g.d.scaleA, rowsA), x.scale(g.d.scaleB, rowsB)
	p.scaleC, p.scaleD = x.scale(g.d.scaleC, 1)[0], x.scale(g.d.scaleD, 1)[0]
	p.amax = x.vector(g.d.amax, 1, cublasapi.R32F, true)
	if g.need > 0 {
		x.vector(g.workspace, int(g.need), cublasapi.R8FE4M3, true) // bytes
	}
	return p, x.t
}

// epilogue applies bias, activation and gradients to the values of one product.
func (g *matmul) epilogue(v []float64, p *part) {
	round := func(x float64) float64 { return Round(cublasapi.DType(g.d.scale), x) }
	if g.readsBias() {
		bias := Load(g.biasType(), [][]byte{p.bias})
		for i := range v {
			v[i] = round(v[i] + bias[i%g.m])
		}
	}
	relu := g.is(cublasapi.EpilogueReLU, cublasapi.EpilogueReLUBias, cublasapi.EpilogueReLUAux, cublasapi.EpilogueReLUAuxBias)
	gelu := g.is(cublasapi.EpilogueGELU, cublasapi.EpilogueGELUBias, cublasapi.EpilogueGELUAux, cublasapi.EpilogueGELUAuxBias)
	switch {
	case g.writesAux() && g.masks():
		g.eachMask(p.aux, func(i int, bit *maskBit) { bit.set(v[i] > 0) })
	case g.writesAux():
		Store(g.auxType(), p.aux, v)
	case g.readsAux() && g.masks():
		g.eachMask(p.aux, func(i int, bit *maskBit) {
			if !bit.get() {
				v[i] = 0
			}
		})
	case g.readsAux():
		for i, x := range Load(g.auxType(), p.aux) {
			v[i] = round(v[i] * geluGradient(x))
		}
	}
	for i, x := range v {
		switch {
		case relu:
			v[i] = max(x, 0)
		case gelu:
			v[i] = round(geluOf(x))
		}
	}
	if g.is(cublasapi.EpilogueDReLUBGrad, cublasapi.EpilogueDGELUBGrad) {
		g.outputGradient(v, p)
	}
}

// outputGradient sums the rows of D.
func (g *matmul) outputGradient(v []float64, p *part) {
	sums := make([]float64, g.m)
	for i, x := range v {
		sums[i%g.m] = Round(cublasapi.R32F, sums[i%g.m]+x)
	}
	Store(g.biasType(), [][]byte{p.bias}, sums)
}

// A maskBit is one bit of a mask.
type maskBit struct {
	p   *byte
	bit byte
}

func (b *maskBit) get() bool { return *b.p&b.bit != 0 }

func (b *maskBit) set(on bool) {
	*b.p &^= b.bit
	if on {
		*b.p |= b.bit
	}
}

// eachMask calls fn with the bit of each element.
func (g *matmul) eachMask(parts [][]byte, fn func(i int, bit *maskBit)) {
	bytes := (g.m + 7) / 8
	for j := range g.n {
		col := parts[0][min(j*bytes, len(parts[0])):]
		if len(parts) > 1 {
			col = parts[j]
		}
		for i := range g.m {
			fn(j*g.m+i, &maskBit{&col[i/8], 1 << (i % 8)})
		}
	}
}

// inputGradient sums an input over k: one element for each row, or each column, of D.
func (g *matmul) inputGradient(p *part) {
	x, parts, trans := g.a, p.a, g.d.transA != 0
	if g.is(cublasapi.EpilogueBGradB) {
		x, parts, trans = g.b, p.b, g.d.transB == 0 // one sum for each column of op(B)
	}
	sums := make([]float64, g.m)
	if g.is(cublasapi.EpilogueBGradB) {
		sums = make([]float64, g.n)
	}
	for i, v := range Load(x.Type, parts) {
		row, col := i%x.Rows, i/x.Rows
		if trans {
			row = col
		}
		sums[row] = Round(cublasapi.R32F, sums[row]+v)
	}
	Store(g.biasType(), [][]byte{p.bias}, sums)
}

// The tanh approximation of GELU, 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
const (
	geluRoot  = 0.7978845608028654
	geluCubic = 0.044715
)

func geluOf(x float64) float64 {
	return 0.5 * x * (1 + math.Tanh(geluRoot*(x+geluCubic*x*x*x)))
}

func geluGradient(x float64) float64 {
	t := math.Tanh(geluRoot * (x + geluCubic*x*x*x))
	return 0.5*(1+t) + 0.5*x*(1-t*t)*geluRoot*(1+3*geluCubic*x*x)
}
