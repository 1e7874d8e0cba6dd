package tensor_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// Without an inner dimension the product is 0, and the other parts are as ever (torch.addmm).
func TestMatMulWithoutInnerDimension(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		for _, d := range []memory.DType{f32, bf16} {
			for _, dims := range [][3]int{{0, 48, 32}, {2, 48, 32}, {0, 1, 32}, {0, 48, 1}} {
				t.Run(fmt.Sprint(d, dims), func(t *testing.T) { testNoInner(t, s, d, dims[0], dims[1], dims[2]) })
			}
		}
	})
}

func testNoInner(t *testing.T, s *stream.Stream, d memory.DType, batch, m, n int) {
	l := newLab(t, s, 13)
	defer l.close()
	a, b := l.make(d, batch, m, 0, layout{}).Tensor, l.make(d, batch, 0, n, layout{}).Tensor
	c, rows := l.make(d, batch, m, n, layout{}).Tensor, l.integers(d, 1, n)
	nan := float32(math.NaN())
	bias, sums := selected(l, rows, 0, 0), l.vector(d, []int{m}, slices.Repeat([]float32{nan}, m)...)
	all := l.integers(d, max(1, batch)*m, n)
	add, err := all.View(c.Shape()...)
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		cfg  tensor.MatMulConfig
		want func(add, bias float64) float64
	}{
		"bias":       {tensor.MatMulConfig{Bias: bias}, func(_, y float64) float64 { return y }},
		"ReLU":       {tensor.MatMulConfig{Bias: bias, Epilogue: tensor.ReLU}, func(_, y float64) float64 { return max(0, y) }},
		"add":        {tensor.MatMulConfig{Add: add, Beta: new(2.0), Alpha: new(math.NaN())}, func(x, _ float64) float64 { return 2 * x }},
		"add of 1":   {tensor.MatMulConfig{Add: add, Alpha: new(0.0)}, func(x, _ float64) float64 { return x }},
		"add of 0":   {tensor.MatMulConfig{Add: add, Beta: new(0.0)}, func(x, _ float64) float64 { return 0 }},
		"everything": {tensor.MatMulConfig{Add: add, Bias: bias, Epilogue: tensor.ReLU}, func(x, y float64) float64 { return max(0, x+y) }},
		"no split":   {tensor.MatMulConfig{Settings: &tensor.MatMulSettings{BF16Reduction: tensor.NoSplitK}}, func(_, _ float64) float64 { return 0 }},
		"on device":  {tensor.MatMulConfig{Add: add, DeviceAlpha: l.vector(f32, nil, nan), DeviceBeta: l.vector(f32, nil, 2)}, func(x, _ float64) float64 { return 2 * x }},
		"sums of a":  {tensor.MatMulConfig{Epilogue: tensor.SumA, BiasGrad: sums}, func(_, _ float64) float64 { return 0 }},
	} {
		if d == f32 && tc.cfg.Epilogue == tensor.SumA || batch > 0 && tc.cfg.Epilogue == tensor.SumA {
			continue
		}
		err := tensor.MatMul(s, c, a, b, &tc.cfg)
		if tc.cfg.DeviceAlpha.Len() == 1 && min(m, n) == 1 && tc.cfg.DeviceAlpha.DType() == f32 {
			require.ErrorIs(t, err, errors.ErrUnsupported, name)
			continue
		}
		require.NoError(t, err, name)
		x, y, want := l.values(add), l.values(bias), l.values(c)
		for i := range want {
			want[i] = tc.want(x[i], y[i%n])
		}
		require.Equal(t, want, l.values(c), name)
		if tc.cfg.Epilogue == tensor.SumA {
			require.Equal(t, make([]float64, m), l.values(sums), name)
		}
	}
}

// A product of 8-bit floats without an inner dimension is the scaled bias.
func TestMatMulFloat8WithoutInnerDimension(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		if devs[0].Require(device.Float8) != nil {
			t.Skip("the device has no products of 8-bit floats")
		}
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 13)
		defer l.close()
		c, a, b := l.make(e4m3, 0, 48, 32, layout{}).Tensor, l.make(e4m3, 0, 48, 0, layout{}).Tensor, l.make(e4m3, 0, 0, 32, layout{transposed: true}).Tensor
		bias := l.vector(bf16, []int{32}, slices.Repeat([]float32{-3}, 32)...)
		amax := l.vector(f32, nil, 99)
		require.NoError(t, tensor.MatMul(s, c, a, b, &tensor.MatMulConfig{Bias: bias, AMax: amax, ScaleResult: l.vector(f32, nil, 2)}))
		require.Equal(t, slices.Repeat([]float64{-6}, 48*32), l.values(c))
		require.Equal(t, []float64{3}, l.values(amax))
	})
}
