package cublaslt

import (
	"math"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
	"github.com/gochorus/chorus/internal/virtual/cublas"
)

// epilogue applies bias, activation and gradients to the values of one product.
func (g *matmul) epilogue(v []float64, p *part) {
	round := func(x float64) float64 { return cublas.Round(cublasapi.DType(g.d.scale), x) }
	if g.readsBias() {
		bias := cublas.Load(g.biasType(), [][]byte{p.bias})
		for i := range v {
			v[i] = round(v[i] + bias[i%g.m])
		}
	}
	relu := g.is(cublasltapi.EpilogueReLU, cublasltapi.EpilogueReLUBias, cublasltapi.EpilogueReLUAux, cublasltapi.EpilogueReLUAuxBias)
	gelu := g.is(cublasltapi.EpilogueGELU, cublasltapi.EpilogueGELUBias, cublasltapi.EpilogueGELUAux, cublasltapi.EpilogueGELUAuxBias)
	switch {
	case g.writesAux() && g.masks():
		g.eachMask(p.aux, func(i int, bit *maskBit) { bit.set(v[i] > 0) })
	case g.writesAux():
		cublas.Store(g.auxType(), p.aux, v)
	case g.readsAux() && g.masks():
		g.eachMask(p.aux, func(i int, bit *maskBit) {
			if !bit.get() {
				v[i] = 0
			}
		})
	case g.readsAux():
		for i, x := range cublas.Load(g.auxType(), p.aux) {
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
	if g.is(cublasltapi.EpilogueDReLUBGrad, cublasltapi.EpilogueDGELUBGrad) {
		g.outputGradient(v, p)
	}
}

// outputGradient sums the rows of D.
func (g *matmul) outputGradient(v []float64, p *part) {
	sums := make([]float64, g.m)
	for i, x := range v {
		sums[i%g.m] = cublas.Round(cublasapi.R32F, sums[i%g.m]+x)
	}
	cublas.Store(g.biasType(), [][]byte{p.bias}, sums)
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
	if g.is(cublasltapi.EpilogueBGradB) {
		x, parts, trans = g.b, p.b, g.d.transB == 0 // one sum for each column of op(B)
	}
	sums := make([]float64, g.m)
	if g.is(cublasltapi.EpilogueBGradB) {
		sums = make([]float64, g.n)
	}
	for i, v := range cublas.Load(x.Type, parts) {
		row, col := i%x.Rows, i/x.Rows
		if trans {
			row = col
		}
		sums[row] = cublas.Round(cublasapi.R32F, sums[row]+v)
	}
	cublas.Store(g.biasType(), [][]byte{p.bias}, sums)
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
