package tensor_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A place is an operand of a product; the outputs come first.
type place struct {
	name  string
	t     memory.DType
	shape []int
}

// A fullProduct is a product with as many operands as one product can have.
type fullProduct struct {
	epilogue tensor.Epilogue
	outputs  int
	operands []place
}

var (
	matrixA, matrixB = []int{48, 64}, []int{32, 64} // b is a view of it, transposed
	matrixC          = []int{48, 32}
	single           = []int{1}
)

var fullProducts = map[string]fullProduct{
	"GELU": {tensor.GELU, 2, []place{{"c", f32, matrixC}, {"Aux", f32, matrixC}, {"a", f32, matrixA}, {"b", f32, matrixB},
		{"Add", f32, matrixC}, {"Bias", f32, []int{32}}, {"DeviceAlpha", f32, single}, {"DeviceBeta", f32, single}}},
	"ReLU": {tensor.ReLU, 2, []place{{"c", bf16, matrixC}, {"Aux", memory.Uint8, []int{48, 16}}, {"a", bf16, matrixA}, {"b", bf16, matrixB},
		{"Add", bf16, matrixC}, {"Bias", bf16, []int{32}}}},
	"GELUGrad": {tensor.GELUGrad, 2, []place{{"c", bf16, matrixC}, {"BiasGrad", bf16, []int{32}}, {"a", bf16, matrixA}, {"b", bf16, matrixB},
		{"Add", bf16, matrixC}, {"Aux", bf16, matrixC}, {"DeviceAlpha", f32, single}, {"DeviceBeta", f32, single}}},
	"ReLUGrad": {tensor.ReLUGrad, 2, []place{{"c", bf16, matrixC}, {"BiasGrad", bf16, []int{32}}, {"a", bf16, matrixA}, {"b", bf16, matrixB},
		{"Add", bf16, matrixC}, {"Aux", memory.Uint8, []int{48, 16}}}},
	"SumA": {tensor.SumA, 2, []place{{"c", bf16, matrixC}, {"BiasGrad", bf16, []int{48}}, {"a", bf16, matrixA}, {"b", bf16, matrixB}, {"Add", bf16, matrixC}}},
	"8-bit floats": {tensor.GELU, 3, []place{{"c", e4m3, matrixC}, {"AMax", f32, single}, {"Aux", e4m3, matrixC}, {"a", e4m3, matrixA}, {"b", e4m3, matrixB},
		{"Add", bf16, matrixC}, {"Bias", bf16, []int{32}}, {"DeviceAlpha", f32, single}, {"DeviceBeta", f32, single},
		{"ScaleA", f32, single}, {"ScaleB", f32, single}, {"ScaleResult", f32, single}}},
	"scales of rows": {tensor.NoEpilogue, 1, []place{{"c", bf16, matrixC}, {"a", e4m3, matrixA}, {"b", e4m3, matrixB},
		{"Bias", bf16, []int{32}}, {"ScaleA", f32, []int{48, 1}}, {"ScaleB", f32, []int{1, 32}}}},
}

const slot = 1 << 14 // bytes; no operand is larger

// run multiplies with the operand i in slot[i] of the storage.
func (p *fullProduct) run(l *lab, storage tensor.Tensor, slots []int) error {
	var c, a, b tensor.Tensor
	cfg := tensor.MatMulConfig{Epilogue: p.epilogue}
	fields := map[string]*tensor.Tensor{"c": &c, "a": &a, "b": &b, "Add": &cfg.Add, "Bias": &cfg.Bias, "BiasGrad": &cfg.BiasGrad, "Aux": &cfg.Aux,
		"AMax": &cfg.AMax, "DeviceAlpha": &cfg.DeviceAlpha, "DeviceBeta": &cfg.DeviceBeta,
		"ScaleA": &cfg.ScaleA, "ScaleB": &cfg.ScaleB, "ScaleResult": &cfg.ScaleResult}
	for i, o := range p.operands {
		n := o.t.Size()
		for _, d := range o.shape {
			n *= d
		}
		x := narrow(l, storage, 0, slots[i]*slot, n)
		v, err := x.ViewDType(o.t)
		v = one(l, v, err)
		v, err = v.View(o.shape...)
		*fields[o.name] = one(l, v, err)
	}
	b = b.T()
	err := tensor.MatMul(l.s, c, a, b, &cfg)
	if errors.Is(err, errors.ErrUnsupported) { // the arguments are valid
		return nil
	}
	return err
}

// Every output that shares memory with another operand is refused with the names of both. Inputs
// may share memory.
func TestMatMulOutputsShareNothing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		for name, p := range fullProducts {
			t.Run(name, func(t *testing.T) { p.testPairs(t, s) })
		}
	})
}

func (p *fullProduct) testPairs(t *testing.T, s *stream.Stream) {
	l := newLab(t, s, 3)
	defer l.close()
	storage := l.vector(memory.Uint8, []int{len(p.operands) * slot})
	slots := make([]int, len(p.operands))
	for i := range slots {
		slots[i] = i
	}
	require.NoError(t, p.run(l, storage, slots))
	for i, x := range p.operands {
		for j, y := range p.operands[:i] {
			slots[i] = j
			err := p.run(l, storage, slots)
			slots[i] = i
			addIsC := y.name == "c" && x.name == "Add" && x.t == y.t
			if j >= p.outputs || addIsC {
				require.NoError(t, err, "%s in %s", x.name, y.name)
			} else {
				require.ErrorContains(t, err, fmt.Sprintf(": %s shares memory with %s: ", y.name, x.name))
			}
		}
	}
}
