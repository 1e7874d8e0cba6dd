package tensor

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/memory"
)

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
