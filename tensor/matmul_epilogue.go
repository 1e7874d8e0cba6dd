package tensor

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/memory"
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
	plain, aux       [2]cublasltapi.Epilogue // 0 if cuBLASLt lacks the epilogue
	needAux, masks   bool
	gradient, needed bool // BiasGrad may be set; must be set
}

var epilogueForms = map[Epilogue]*epilogueForm{
	NoEpilogue: {plain: [2]cublasltapi.Epilogue{cublasltapi.EpilogueDefault, cublasltapi.EpilogueBias}},
	ReLU: {plain: [2]cublasltapi.Epilogue{cublasltapi.EpilogueReLU, cublasltapi.EpilogueReLUBias},
		aux: [2]cublasltapi.Epilogue{cublasltapi.EpilogueReLUAux, cublasltapi.EpilogueReLUAuxBias}, masks: true},
	GELU: {plain: [2]cublasltapi.Epilogue{cublasltapi.EpilogueGELU, cublasltapi.EpilogueGELUBias},
		aux: [2]cublasltapi.Epilogue{cublasltapi.EpilogueGELUAux, cublasltapi.EpilogueGELUAuxBias}},
	ReLUGrad: {aux: [2]cublasltapi.Epilogue{cublasltapi.EpilogueDReLU, cublasltapi.EpilogueDReLUBGrad}, needAux: true, masks: true, gradient: true},
	GELUGrad: {aux: [2]cublasltapi.Epilogue{cublasltapi.EpilogueDGELU, cublasltapi.EpilogueDGELUBGrad}, needAux: true, gradient: true},
	SumA:     {plain: [2]cublasltapi.Epilogue{0, cublasltapi.EpilogueBGradB}, gradient: true, needed: true},
	SumB:     {plain: [2]cublasltapi.Epilogue{0, cublasltapi.EpilogueBGradA}, gradient: true, needed: true},
}

// setEpilogue sets the epilogue, the bias and the buffers.
func (m *multiplication) setEpilogue(cfg *MatMulConfig) error {
	m.Epilogue = cublasltapi.EpilogueDefault
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
	m.At.Bias, m.Problem.Bias = at, gemm.Layout{Type: elementTypes[t.at().DType], Stride: int64(stride)}
	return nil
}

// biasType returns the type of a bias. With 8-bit floats given may be one of two types.
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
	m.At.Aux, m.Problem.Aux = at, gemm.Layout{Type: elementTypes[element], LD: int64(ld), Stride: int64(stride)}
	if mask {
		m.Problem.Aux = gemm.Layout{Type: gemm.MaskType, LD: int64(8 * ld), Stride: int64(8 * stride)}
	}
	return nil
}
