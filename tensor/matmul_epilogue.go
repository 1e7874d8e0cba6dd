package tensor

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An Epilogue is an operation on each element of a product, in the same kernel.
type Epilogue uint8

// The epilogues. Forward passes:
const (
	NoEpilogue Epilogue = iota
	// ReLU is max(0, x). If Aux is set, it gets a bit mask of the positive elements for
	// ReLUGrad, in an unspecified order. Aux is uint8 of shape [m w], or [b m w] for a batch,
	// with w ≥ 16·⌈n/128⌉ and strides that are multiples of 16.
	ReLU
	// GELU is torch.nn.functional.gelu(approximate="tanh"). If Aux is set, it gets the input
	// of GELU: it has the shape and type of c, and strides that are multiples of 8. If c is an
	// 8-bit float, Aux may also be float16. A product of 8-bit floats has Aux if c is float16,
	// bfloat16 or e5m2, or if c and both inputs are e4m3.
	GELU
)

// Gradients. Products of 8-bit floats do not support them.
const (
	// ReLUGrad multiplies by the derivative of ReLU from Aux. If BiasGrad is set, it gets the
	// sums of the columns of c: shape [n], or [b n] for a batch, of the type of c.
	ReLUGrad Epilogue = iota + 16
	// GELUGrad multiplies by the derivative of GELU at the inputs in Aux. BiasGrad is as for
	// ReLUGrad.
	GELUGrad
	// SumA sets BiasGrad to the sums of a over k: shape [m], or [b m] for a batch, of the type
	// of c. If c = dYᵀ·X is the gradient of a weight, it is the gradient of the bias. The
	// inputs are float16 or bfloat16.
	SumA
	// SumB sets BiasGrad to the sums of b over k: shape [n], or [b n] for a batch, as SumA.
	SumB
)

// An epilogueForm says what an Epilogue needs, and its names in cuBLASLt. Index 1 is for a
// bias, or a bias gradient.
type epilogueForm struct {
	plain, aux       [2]cublasapi.Epilogue // 0 if cuBLASLt lacks the epilogue
	needAux, masks   bool
	gradient, needed bool // BiasGrad may be set; must be set
}

var epilogueForms = map[Epilogue]*epilogueForm{
	NoEpilogue: {plain: [2]cublasapi.Epilogue{cublasapi.EpilogueDefault, cublasapi.EpilogueBias}},
	ReLU: {plain: [2]cublasapi.Epilogue{cublasapi.EpilogueReLU, cublasapi.EpilogueReLUBias},
		aux: [2]cublasapi.Epilogue{cublasapi.EpilogueReLUAux, cublasapi.EpilogueReLUAuxBias}, masks: true},
	GELU: {plain: [2]cublasapi.Epilogue{cublasapi.EpilogueGELU, cublasapi.EpilogueGELUBias},
		aux: [2]cublasapi.Epilogue{cublasapi.EpilogueGELUAux, cublasapi.EpilogueGELUAuxBias}},
	ReLUGrad: {aux: [2]cublasapi.Epilogue{cublasapi.EpilogueDReLU, cublasapi.EpilogueDReLUBGrad}, needAux: true, masks: true, gradient: true},
	GELUGrad: {aux: [2]cublasapi.Epilogue{cublasapi.EpilogueDGELU, cublasapi.EpilogueDGELUBGrad}, needAux: true, gradient: true},
	SumA:     {plain: [2]cublasapi.Epilogue{0, cublasapi.EpilogueBGradB}, gradient: true, needed: true},
	SumB:     {plain: [2]cublasapi.Epilogue{0, cublasapi.EpilogueBGradA}, gradient: true, needed: true},
}

// setEpilogue sets the epilogue, the bias and the buffers.
func (m *multiplication) setEpilogue(cfg *MatMulConfig) error {
	m.Epilogue = cublasapi.EpilogueDefault
	if cfg.Epilogue == NoEpilogue && cfg.Bias.at().DType == memory.Invalid && cfg.Aux.at().DType == memory.Invalid && cfg.BiasGrad.at().DType == memory.Invalid {
		return nil
	}
	form := epilogueForms[cfg.Epilogue]
	if form == nil {
		return fmt.Errorf("unknown Epilogue %d", cfg.Epilogue)
	}
	if err := form.check(cfg); err != nil {
		return err
	}
	if !m.swapped && (cfg.Bias.at().DType != memory.Invalid || cfg.Aux.at().DType != memory.Invalid || cfg.BiasGrad.at().DType != memory.Invalid) {
		return fmt.Errorf("c of strides %v is not row-major: with Bias, Aux or BiasGrad it must be", m.c.at().Strides)
	}
	variant := 0
	vector := cfg.Bias
	if cfg.Bias.at().DType != memory.Invalid || cfg.BiasGrad.at().DType != memory.Invalid {
		variant = 1
	}
	if form.gradient {
		vector = cfg.BiasGrad
	}
	if variant == 1 {
		if err := m.setBias(vector, cfg.Epilogue == SumA, form.gradient); err != nil {
			return err
		}
	}
	if cfg.Aux.at().DType == memory.Invalid {
		m.Epilogue = form.plain[variant]
		return nil
	}
	m.Epilogue = form.aux[variant]
	return m.setAux(cfg.Aux, form.masks)
}

func (f *epilogueForm) check(cfg *MatMulConfig) error {
	switch {
	case f.gradient && cfg.Bias.at().DType != memory.Invalid:
		return fmt.Errorf("field Bias is set, which the epilogues of gradients do not add")
	case !f.gradient && cfg.BiasGrad.at().DType != memory.Invalid:
		return fmt.Errorf("field BiasGrad is set, but the Epilogue is not a gradient")
	case f.needed && cfg.BiasGrad.at().DType == memory.Invalid:
		return fmt.Errorf("field BiasGrad is not set: the Epilogue needs it")
	case f.needAux && cfg.Aux.at().DType == memory.Invalid:
		return fmt.Errorf("field Aux is not set: the Epilogue needs the Aux of the forward pass")
	case f.aux[0] == 0 && cfg.Aux.at().DType != memory.Invalid:
		return fmt.Errorf("field Aux is set, which the Epilogue does not use")
	}
	return nil
}

// setBias sets Bias, or BiasGrad if output is true: its length is n, or m if rows is true.
func (m *multiplication) setBias(t Tensor, rows, output bool) error {
	name, n := "Bias", m.c.at().Shape[len(m.c.at().Shape)-1]
	if output {
		name = "BiasGrad"
	}
	if rows {
		n = m.rows
	}
	at, err := m.extra(name, &t)
	if err != nil {
		return err
	}
	if want := m.biasType(t.at().DType); t.at().DType != want {
		return fmt.Errorf("%s is %s: want %s", name, t.at().DType, want)
	}
	last := len(t.at().Shape) - 1
	if last < 0 || last > 1 || t.at().Shape[last] != n || n > 1 && t.at().Strides[last] != 1 {
		return fmt.Errorf("%s has shape %v and strides %v: want [%d], with a stride of 1", name, t.at().Shape, t.at().Strides, n)
	}
	stride := 0
	if last == 1 {
		if len(m.c.at().Shape) == 2 || t.at().Shape[0] != m.c.at().Shape[0] {
			return fmt.Errorf("%s has shape %v: want [%d], or one row for each product of a batch", name, t.at().Shape, n)
		}
		stride = t.at().Strides[0]
	}
	if output && m.Batch > 1 && stride < n {
		return fmt.Errorf("%s has shape %v and strides %v: the products of the batch need one row each", name, t.at().Shape, t.at().Strides)
	}
	m.At.Bias, m.Problem.Bias = at, gemm.Layout{Type: elementType(t.at().DType), Stride: int64(stride)}
	return nil
}

// biasType returns the type of a bias, which is given if two types are
// possible, as in a product of 8-bit floats.
func (m *multiplication) biasType(given memory.DType) memory.DType {
	c := m.c.at().DType
	switch {
	case !m.Float8:
		return c
	case c == memory.Float32:
		return memory.BFloat16
	case !float8(c):
		return c
	case given == memory.Float16:
		return given
	}
	return memory.BFloat16
}

// setAux sets Aux.
func (m *multiplication) setAux(t Tensor, mask bool) error {
	at, err := m.extra("Aux", &t)
	if err != nil {
		return err
	}
	rank := len(m.c.at().Shape)
	want, width, unit, element := m.c.at().DType, m.c.at().Shape[rank-1], 8, m.c.at().DType
	if mask {
		want, width, unit = memory.Uint8, (width+127)/128*16, 16
	} else if float8(want) && t.at().DType == memory.Float16 {
		want, element = t.at().DType, t.at().DType
	}
	fits := t.at().DType == want && len(t.at().Shape) == rank && t.at().Shape[rank-2] == m.rows && (rank == 2 || t.at().Shape[0] == m.c.at().Shape[0]) &&
		(t.at().Shape[rank-1] == width || mask && t.at().Shape[rank-1] > width) && t.at().Strides[rank-1] == 1
	ld := t.at().Strides[max(0, rank-2)]
	if fits && m.rows == 1 {
		ld = (t.at().Shape[rank-1] + unit - 1) / unit * unit
	}
	stride := 0
	if fits && rank == 3 {
		stride = t.at().Strides[0]
	}
	if !fits || ld%unit != 0 || ld < t.at().Shape[rank-1] || m.Batch > 1 && (stride%unit != 0 || stride < ld*m.rows) {
		return fmt.Errorf("field Aux is %s of shape %v with strides %v: want %s of %d rows of %d elements, and strides that are multiples of %d",
			t.at().DType, t.at().Shape, t.at().Strides, want, m.rows, width, unit)
	}
	m.At.Aux, m.Problem.Aux = at, gemm.Layout{Type: elementType(element), LD: int64(ld), Stride: int64(stride)}
	if mask {
		m.Problem.Aux = gemm.Layout{Type: gemm.MaskType, LD: int64(8 * ld), Stride: int64(8 * stride)}
	}
	return nil
}

// setScales sets what only products of 8-bit floats have.
func (m *multiplication) setScales(cfg *MatMulConfig) (err error) {
	if !m.Float8 {
		if cfg.ScaleA.at().DType != memory.Invalid || cfg.ScaleB.at().DType != memory.Invalid || cfg.ScaleResult.at().DType != memory.Invalid || cfg.AMax.at().DType != memory.Invalid || cfg.FastAccum {
			return fmt.Errorf("a scale, AMax or FastAccum is set, which only products of 8-bit floats have")
		}
		return nil
	}
	m.FastAccum = cfg.FastAccum
	if !float8(m.c.at().DType) && (cfg.ScaleResult.at().DType != memory.Invalid || cfg.AMax.at().DType != memory.Invalid) {
		return fmt.Errorf("field ScaleResult or AMax is set, which only a c of 8-bit floats has")
	}
	if m.At.ScaleD, err = m.scalar("ScaleResult", &cfg.ScaleResult, memory.Float32); err != nil {
		return err
	}
	if m.At.AMax, err = m.scalar("AMax", &cfg.AMax, memory.Float32); err != nil {
		return err
	}
	if cfg.ScaleA.Len() > 1 || cfg.ScaleB.Len() > 1 {
		return m.setRowScales(cfg)
	}
	a, err := m.scalar("ScaleA", &cfg.ScaleA, memory.Float32)
	if err != nil {
		return err
	}
	b, err := m.scalar("ScaleB", &cfg.ScaleB, memory.Float32)
	if err != nil {
		return err
	}
	m.orderScales(a, b)
	return nil
}

// orderScales sets the scales of a and b.
func (m *multiplication) orderScales(a, b cudadrv.DevicePtr) {
	m.At.ScaleA, m.At.ScaleB = a, b
	if m.swapped {
		m.At.ScaleA, m.At.ScaleB = b, a
	}
}

// setRowScales sets a scale for each row of a and each column of b.
func (m *multiplication) setRowScales(cfg *MatMulConfig) error {
	if m.Batch > 1 || len(m.c.at().Shape) != 2 || float8(m.c.at().DType) {
		return fmt.Errorf("field ScaleA and ScaleB have several elements: that needs a c of two dimensions that is not an 8-bit float")
	}
	rows, cols := m.c.at().Shape[0], m.c.at().Shape[1]
	a, err := m.vector("ScaleA", &cfg.ScaleA, [2]int{rows, 1})
	if err != nil {
		return err
	}
	b, err := m.vector("ScaleB", &cfg.ScaleB, [2]int{1, cols})
	if err != nil {
		return err
	}
	m.RowScales = true
	m.orderScales(a, b)
	return nil
}

func (m *multiplication) vector(name string, t *Tensor, shape [2]int) (cudadrv.DevicePtr, error) {
	if t.at().DType == memory.Invalid {
		return 0, fmt.Errorf("%s is not set: set both scales if one has several elements", name)
	}
	at, err := m.extra(name, t)
	if err != nil {
		return 0, err
	}
	if t.at().DType != memory.Float32 || len(t.at().Shape) != 2 || [2]int(t.at().Shape) != shape || !t.Contiguous() {
		return 0, fmt.Errorf("%s is %s of shape %v with strides %v: want float32 of shape %v, contiguous", name, t.at().DType, t.at().Shape, t.at().Strides, shape)
	}
	return at, nil
}

// checkWhole checks what depends on several parts of the product.
func (m *multiplication) checkWhole(cfg *MatMulConfig) error {
	if cfg.BiasGrad.at().DType != memory.Invalid && m.empty() {
		return fmt.Errorf("field BiasGrad is set, but c has no elements")
	}
	if m.empty() || !m.Float8 {
		return nil
	}
	anyLayout, err := requireFloat8(m.s.Device())
	if err != nil {
		return err
	}
	if m.K > 0 && !anyLayout && (m.TransA != cublasapi.Trans || m.TransB != cublasapi.NoTrans) {
		return fmt.Errorf("8-bit floats need an a that is contiguous in rows and a b that is contiguous in columns, as in a·w.T(): their strides are %v and %v", m.a.at().Strides, m.b.at().Strides)
	}
	cols := m.c.at().Shape[len(m.c.at().Shape)-1]
	if m.K%16 != 0 || cols%16 != 0 {
		return fmt.Errorf("8-bit floats need a k and an n that are multiples of 16: they are %d and %d", m.K, cols)
	}
	from, inputs := m.At.A|m.At.B, gemm.Layout{LD: m.Problem.A.LD | m.Problem.B.LD, Stride: m.Problem.A.Stride | m.Problem.B.Stride}
	if m.K == 0 { // a and b are not read
		from, inputs = 0, gemm.Layout{}
	}
	for _, x := range [...]struct {
		name string
		at   cudadrv.DevicePtr
		l    gemm.Layout
		size int64
	}{
		{"a or b", from, inputs, 1},
		{"c", m.At.D, m.Problem.D, int64(m.c.at().DType.Size())},
		{"Add", m.At.C, m.Problem.C, int64(max(1, cfg.Add.at().DType.Size()))},
		{"Bias", m.At.Bias, gemm.Layout{}, 1},
	} {
		if uint64(x.at)%16 != 0 || x.l.LD*x.size%16 != 0 || x.l.Stride*x.size%16 != 0 {
			return fmt.Errorf("%s has an address or strides that are not multiples of 16 bytes, which 8-bit floats need", x.name)
		}
	}
	return nil
}

// sums reports whether the epilogue sums an input.
func (cfg *MatMulConfig) sums() bool { return cfg.Epilogue == SumA || cfg.Epilogue == SumB }

// sumsOfVector reports whether c has one row or one column, and the epilogue sums an input.
// cuBLASLt 13 stores wrong sums for some of these products.
func (m *multiplication) sumsOfVector(cfg *MatMulConfig) bool {
	return cfg.sums() && min(m.M, m.N) == 1
}

// multiplyAndSum enqueues the product without its epilogue, and then the sums: they are the
// product of the input with ones.
func multiplyAndSum(s *stream.Stream, c, a, b Tensor, cfg *MatMulConfig) error {
	chosen, err := matMulSettings(cfg)
	if err != nil {
		return err
	}
	settings := *chosen
	settings.FP16Reduction = max(settings.FP16Reduction, FullPrecision) // as cuBLASLt sums inputs
	settings.BF16Reduction = max(settings.BF16Reduction, FullPrecision)
	plain := *cfg
	plain.Epilogue, plain.BiasGrad = NoEpilogue, Tensor{}
	if err := MatMul(s, c, a, b, &plain); err != nil {
		return err
	}
	if cfg.Epilogue == SumA {
		return sum(s, cfg.BiasGrad, a, -1, &settings)
	}
	return sum(s, cfg.BiasGrad, b, -2, &settings)
}

// sum enqueues to = the sums of x over its last dimension (-1) or its last but one (-2).
func sum(s *stream.Stream, to, x Tensor, dim int, settings *MatMulSettings) error {
	shape := x.Shape()
	k := shape[len(shape)+dim]
	ones, err := makeOnes(s, x.DType(), k)
	if err != nil {
		return err
	}
	sums, err := to.Unsqueeze(dim)
	if err == nil && dim == -1 {
		err = withView(ones, k, 1, func(ones Tensor) error { return MatMul(s, sums, x, ones, &MatMulConfig{Settings: settings}) })
	} else if err == nil {
		err = withView(ones, 1, k, func(ones Tensor) error { return MatMul(s, sums, ones, x, &MatMulConfig{Settings: settings}) })
	}
	return errors.Join(err, ones.Close())
}

func withView(x Tensor, rows, cols int, fn func(Tensor) error) error {
	v, err := x.View(rows, cols)
	if err != nil {
		return err
	}
	return fn(v)
}

// makeOnes returns n ones of a type.
func makeOnes(s *stream.Stream, t memory.DType, n int) (Tensor, error) {
	bytes, err := Make(s, memory.Uint8, n)
	if err != nil {
		return Tensor{}, err
	}
	ones, err := Make(s, t, n)
	if err == nil && n > 0 {
		err = gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemsetD8Async(cudadrv.DevicePtr(bytes.Ptr()), 1, uintptr(n), gpu.StreamOf(s).Raw())
		})
	}
	if err == nil {
		err = Copy(s, ones, bytes)
	}
	if err = errors.Join(err, bytes.Close()); err != nil {
		return Tensor{}, errors.Join(err, ones.Close())
	}
	return ones, nil
}
