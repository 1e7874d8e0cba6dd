package tensor_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A failure is a product that must be refused. make returns it from valid operands.
type failure struct {
	want string // in the error
	make func(l *lab, c, a, b *tensor.Tensor, cfg *tensor.MatMulConfig)
}

// Products of 48x32 = 48x64 · 64x32 with one mistake each; of float32, bfloat16 or 8-bit floats.
var failures = map[string]map[string]failure{
	"float32": {
		"inner dimension": {"do not fit", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) { *b = narrow(l, *b, 0, 0, 63) }},
		"rows":            {"do not fit", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) { *c = narrow(l, *c, 0, 0, 47) }},
		"columns":         {"do not fit", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) { *c = narrow(l, *c, 1, 0, 31) }},
		"vector":          {"want matrices", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) { *b = selected(l, *b, 1, 0) }},
		"four dimensions": {"want matrices", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*c = l.make(f32, 2, 48, 32, layout{}).Tensor
			*c = unsqueezed(l, *c)
		}},
		"batch without a batched c": {"want matrices", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = l.make(f32, 2, 48, 64, layout{}).Tensor
		}},
		"batches differ": {"same number of matrices", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a, *c = l.make(f32, 2, 48, 64, layout{}).Tensor, l.make(f32, 3, 48, 32, layout{}).Tensor
		}},
		"types differ": {"different types", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*b = l.make(f64, 0, 64, 32, layout{}).Tensor
		}},
		"narrow output": {"not supported", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*c = l.make(bf16, 0, 48, 32, layout{}).Tensor
		}},
		"integers": {"not supported", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a, *b = l.vector(memory.Int8, []int{48, 64}), l.vector(memory.Int8, []int{64, 32})
			*c = l.vector(memory.Int32, []int{48, 32})
		}},
		"steps in a": {"a has strides [256 2]", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = stepped(l, l.make(f32, 0, 48, 256, layout{}).Tensor, 64)
		}},
		"steps in c": {"c has strides", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*c = stepped(l, l.make(f32, 0, 48, 256, layout{}).Tensor, 32)
		}},
		"repeated row": {"a has strides [0 1]", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = expanded(l, narrow(l, *a, 0, 0, 1), 48, 64)
		}},
		"repeated c": {"share memory", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a, *c = l.make(f32, 2, 48, 64, layout{}).Tensor, l.make(f32, 2, 48, 32, layout{repeated: true}).Tensor
		}},
		"a in c": {"c shares memory with a", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			all := l.make(f32, 0, 48, 80, layout{}).Tensor
			*a, *c = narrow(l, all, 1, 0, 64), narrow(l, all, 1, 48, 32)
		}},
		"b in c": {"c shares memory with b", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			all := l.make(f32, 0, 112, 32, layout{}).Tensor
			*b, *c = narrow(l, all, 0, 0, 64), narrow(l, all, 0, 63, 48)
		}},
		"host memory": {"the host", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			x, err := tensor.OfHost(make([]float32, 48*64), 48, 64)
			require.NoError(l.t, err)
			*a = x
		}},
		"no tensor": {"no tensor given", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) { *a = tensor.Tensor{} }},
		"closed":    {"Close", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) { require.NoError(l.t, l.open[1].Close()) }},

		"epilogue": {"unknown Epilogue 99", func(_ *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Epilogue = 99 }},
		"bias of gradient": {"do not add", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Epilogue, cfg.Bias = tensor.ReLUGrad, l.vector(f32, []int{32})
		}},
		"gradient of none": {"not a gradient", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.BiasGrad = l.vector(f32, []int{32})
		}},
		"no gradient": {"BiasGrad is not set", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Epilogue = tensor.SumA }},
		"no aux":      {"Aux is not set", func(_ *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Epilogue = tensor.GELUGrad }},
		"aux of none": {"does not use", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Aux = l.vector(f32, []int{48, 32}) }},
		"aux of other type": {"Aux is float64", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Epilogue, cfg.Aux = tensor.GELU, l.vector(f64, []int{48, 32})
		}},
		"short mask": {"Aux is uint8", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Epilogue, cfg.Aux = tensor.ReLU, l.vector(memory.Uint8, []int{48, 8})
		}},
		"aux is c": {"c shares memory with Aux", func(l *lab, c, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Epilogue, cfg.Aux = tensor.GELU, *c
		}},
		"long bias":          {"Bias has shape [33]", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Bias = l.vector(f32, []int{33}) }},
		"bias of other type": {"Bias is bfloat16", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Bias = l.vector(bf16, []int{32}) }},
		"bias of batch":      {"Bias has shape [2 32]", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Bias = l.vector(f32, []int{2, 32}) }},
		"bias of a transposed c": {"must be", func(l *lab, c, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			*c, cfg.Bias = l.make(f32, 0, 48, 32, layout{transposed: true}).Tensor, l.vector(f32, []int{32})
		}},
		"gradient is b": {"BiasGrad shares memory with b", func(l *lab, _, _, b *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Epilogue, cfg.Aux, cfg.BiasGrad = tensor.GELUGrad, l.vector(f32, []int{48, 32}), narrow(l, selected(l, *b, 1, 0), 0, 0, 32)
		}},
		"gradient of a batch": {"BiasGrad has shape [32]", func(l *lab, c, a, b *tensor.Tensor, cfg *tensor.MatMulConfig) {
			*a, *c, *b = l.make(f32, 2, 48, 64, layout{}).Tensor, l.make(f32, 2, 48, 32, layout{}).Tensor, l.make(f32, 2, 64, 32, layout{}).Tensor
			cfg.Epilogue, cfg.Aux, cfg.BiasGrad = tensor.GELUGrad, l.vector(f32, []int{2, 48, 32}), l.vector(f32, []int{32})
		}},

		"add of other shape": {"Add has shape", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Add = l.vector(f32, []int{32, 48}) }},
		"add of other type":  {"Add is float64", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.Add = l.vector(f64, []int{48, 32}) }},
		"add of other order": {"want the order of c", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Add = l.make(f32, 0, 48, 32, layout{transposed: true}).Tensor
		}},
		"add beside c": {"c shares memory with Add", func(l *lab, c, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			all := l.make(f32, 0, 60, 32, layout{}).Tensor
			*c, cfg.Add = narrow(l, all, 0, 0, 48), narrow(l, all, 0, 12, 48)
		}},
		"only one factor on the device": {"set both", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.DeviceAlpha = l.vector(f32, nil, 1)
		}},
		"factors twice": {"set both", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.DeviceAlpha, cfg.DeviceBeta, cfg.Beta = l.vector(f32, nil, 1), l.vector(f32, nil, 0), new(1.0)
		}},
		"factors of other type": {"DeviceAlpha is float64", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.DeviceAlpha, cfg.DeviceBeta = l.vector(f64, nil, 1), l.vector(f64, nil, 0)
		}},
		"several factors": {"want one element", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.DeviceAlpha, cfg.DeviceBeta = l.vector(f32, []int{2}), l.vector(f32, nil, 0)
		}},
		"scale": {"only products of 8-bit floats", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.ScaleA = l.vector(f32, nil, 1) }},
		"precision": {"unknown Float32Precision", func(_ *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Settings = &tensor.MatMulSettings{Float32Precision: 9}
		}},
		"reduction": {"unknown Reduction", func(_ *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Settings = &tensor.MatMulSettings{BF16Reduction: 9}
		}},
		"library": {"unknown Library", func(_ *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Settings = &tensor.MatMulSettings{Library: 9}
		}},
		"carveout": {"SMCarveout is -1", func(_ *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.Settings = &tensor.MatMulSettings{SMCarveout: -1}
		}},
	},
	"float16": {
		"accumulation": {"not supported", func(l *lab, c, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			*c, cfg.Settings = l.make(f32, 0, 48, 32, layout{}).Tensor, &tensor.MatMulSettings{AllowFP16Accumulation: true}
		}},
	},
	"float8_e4m3fn": {
		"layout of a": {"contiguous in rows", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = l.make(e4m3, 0, 48, 64, layout{transposed: true}).Tensor
		}},
		"layout of b": {"contiguous in columns", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*b = l.make(e4m3, 0, 64, 32, layout{}).Tensor
		}},
		"inner length": {"multiples of 16: they are 40 and 32", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a, *b = narrow(l, *a, 1, 0, 40), narrow(l, *b, 0, 0, 40)
		}},
		"columns": {"multiples of 16: they are 64 and 24", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*c, *b = narrow(l, *c, 1, 0, 24), narrow(l, *b, 1, 0, 24)
		}},
		"address": {"multiples of 16 bytes", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = narrow(l, l.make(e4m3, 0, 48, 80, layout{}).Tensor, 1, 8, 64)
		}},
		"stride": {"multiples of 16 bytes", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = narrow(l, l.make(e4m3, 0, 48, 72, layout{}).Tensor, 1, 0, 64)
		}},
		"both e5m2": {"not supported", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a, *b = l.make(e5m2, 0, 48, 64, layout{}).Tensor, l.make(e5m2, 0, 64, 32, layout{transposed: true}).Tensor
		}},
		"output": {"not supported", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*c = l.make(e5m2, 0, 48, 32, layout{}).Tensor
		}},
		"wide input": {"different types", func(l *lab, c, a, b *tensor.Tensor, _ *tensor.MatMulConfig) {
			*a = l.make(bf16, 0, 48, 64, layout{}).Tensor
		}},
		"beta": {"set Add", func(l *lab, c, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			*c, cfg.Beta = l.make(e4m3, 0, 48, 32, layout{}).Tensor, new(1.0)
		}},
		"scale type": {"ScaleA is bfloat16", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.ScaleA = l.vector(bf16, []int{1}) }},
		"scale shape": {"want float32 of shape [48 1]", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.ScaleA, cfg.ScaleB = l.vector(f32, []int{48}), l.vector(f32, []int{1, 32})
		}},
		"one scale": {"ScaleB is not set", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.ScaleA = l.vector(f32, []int{48, 1})
		}},
		"result scale": {"only a c of 8-bit floats", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) {
			cfg.ScaleResult = l.vector(f32, []int{1})
		}},
		"maximum": {"only a c of 8-bit floats", func(l *lab, _, _, _ *tensor.Tensor, cfg *tensor.MatMulConfig) { cfg.AMax = l.vector(f32, []int{1}) }},
	},
}

// one returns a view, which must exist.
func one(l *lab, x tensor.Tensor, err error) tensor.Tensor {
	l.t.Helper()
	require.NoError(l.t, err)
	return x
}

func narrow(l *lab, x tensor.Tensor, dim, start, n int) tensor.Tensor {
	v, err := x.Narrow(dim, start, n)
	return one(l, v, err)
}

func selected(l *lab, x tensor.Tensor, dim, i int) tensor.Tensor {
	v, err := x.Select(dim, i)
	return one(l, v, err)
}

func unsqueezed(l *lab, x tensor.Tensor) tensor.Tensor {
	v, err := x.Unsqueeze(0)
	return one(l, v, err)
}

// stepped returns every second column.
func stepped(l *lab, x tensor.Tensor, cols int) tensor.Tensor {
	v, err := x.Step(1, 0, 2*cols, 2)
	return one(l, v, err)
}

func expanded(l *lab, x tensor.Tensor, shape ...int) tensor.Tensor {
	v, err := x.Expand(shape...)
	return one(l, v, err)
}

// Every invalid product is an error that names the mistake, and writes nothing.
func TestMatMulErrors(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		for types, list := range failures {
			d := map[string]memory.DType{"float32": f32, "float16": f16, "float8_e4m3fn": e4m3}[types]
			for name, f := range list {
				t.Run(types+"/"+name, func(t *testing.T) { testFailure(t, s, d, f) })
			}
		}
	})
}

func testFailure(t *testing.T, s *stream.Stream, d memory.DType, f failure) {
	l := newLab(t, s, 11)
	defer l.close()
	out := d
	if d == e4m3 {
		out = bf16
	}
	c, a, b := l.make(out, 0, 48, 32, layout{}).Tensor, l.make(d, 0, 48, 64, layout{}).Tensor, l.make(d, 0, 64, 32, layout{transposed: true}).Tensor
	require.NoError(t, tensor.MatMul(s, c, a, b, nil), "without the mistake")
	var cfg tensor.MatMulConfig
	f.make(l, &c, &a, &b, &cfg)
	var before []byte
	if c.Contiguous() && c.Len() > 0 {
		before = l.bytes(c)
	}
	err := tensor.MatMul(s, c, a, b, &cfg)
	require.ErrorContains(t, err, f.want)
	require.ErrorContains(t, err, "tensor: matmul: ")
	if before != nil {
		require.Equal(t, before, l.bytes(c))
	}
}

// A product of float32 that is reproducible: integers, so that every order of sums is exact.
func (l *lab) integers(t memory.DType, rows, cols int) tensor.Tensor {
	v := make([]float32, rows*cols)
	for i := range v {
		v[i] = float32(l.r.IntN(5) - 2)
	}
	return l.vector(t, []int{rows, cols}, v...)
}

// Several goroutines compute products on one stream and on several, of shapes that others
// use too.
func TestMatMulConcurrency(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		var streams [3]*stream.Stream
		for i := range streams {
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			defer s.Close()
			streams[i] = s
		}
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				l := newLab(t, streams[i%3], uint64(i))
				defer l.close()
				for round := range 8 {
					m, n, k := 64+round%3, 80, 70
					a, b, c, bias := l.integers(bf16, m, k), l.integers(bf16, k, n), l.make(f32, 0, m, n, layout{}), l.integers(f32, 1, n)
					err := tensor.MatMul(l.s, c.Tensor, a, b, &tensor.MatMulConfig{Bias: selected(l, bias, 0, 0)})
					if err != nil {
						t.Error(err)
						return
					}
					ref := l.multiply(c.Tensor, a, b, []float64{1}, []float64{1})
					ref.addRows(l.values(bias))
					require.Equal(t, ref.sum, l.values(c.Tensor))
				}
			})
		}
		wg.Wait()
	})
}

// The factors on the device are read when the product runs, so that a graph uses new ones at
// each launch.
func TestMatMulFactorsInGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 3)
		defer l.close()
		a, b, c := l.integers(f32, 24, 40), l.integers(f32, 40, 16), l.integers(f32, 24, 16)
		alpha, beta := l.vector(f32, nil, 1), l.vector(f32, nil, 0)
		old := l.values(c)
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			return tensor.MatMul(s, c, a, b, &tensor.MatMulConfig{DeviceAlpha: alpha, DeviceBeta: beta})
		}, nil)
		require.NoError(t, err)
		defer g.Close()
		require.Equal(t, old, l.values(c), "a capture runs nothing")
		for i := range 3 {
			x, y := float32(i), float32(1-i)
			for at, v := range map[*tensor.Tensor]float32{&alpha: x, &beta: y} {
				host, err := tensor.OfHost([]float32{v})
				require.NoError(t, err)
				require.NoError(t, tensor.Copy(s, *at, host))
			}
			old := l.values(c)
			require.NoError(t, g.Launch(s))
			ref := l.multiply(c, a, b, []float64{1}, []float64{1})
			ref.scale(float64(x))
			ref.combine(float64(y), old)
			require.Equal(t, ref.sum, l.values(c))
		}
	})
}

// Without elements nothing is enqueued; without an inner dimension the sum is 0.
func TestMatMulEmpty(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 5)
		defer l.close()
		for _, d := range []memory.DType{f32, bf16, f64} {
			for _, dims := range [][4]int{{0, 0, 3, 2}, {0, 3, 0, 2}, {2, 0, 3, 2}, {2, 3, 0, 0}} {
				batch, m, n, k := dims[0], dims[1], dims[2], dims[3]
				require.NoError(t, tensor.MatMul(s, l.make(d, batch, m, n, layout{}).Tensor, l.make(d, batch, m, k, layout{}).Tensor, l.make(d, batch, k, n, layout{}).Tensor, nil))
			}
			for _, batch := range []int{0, 2} {
				c := l.make(d, batch, 3, 4, layout{})
				want := l.values(c.Tensor)
				require.NoError(t, tensor.MatMul(s, c.Tensor, l.make(d, batch, 3, 0, layout{}).Tensor, l.make(d, batch, 0, 4, layout{}).Tensor, &tensor.MatMulConfig{Beta: new(2.0)}))
				for i := range want {
					want[i] *= 2
				}
				require.Equal(t, want, l.values(c.Tensor))
			}
		}
	})
}

// A NaN in c has no effect if beta is 0, and inputs that are NaN or infinite have theirs.
func TestMatMulSpecialValues(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 5)
		defer l.close()
		nan, inf := float32(math.NaN()), float32(math.Inf(1))
		for _, d := range []memory.DType{f32, bf16, f16, f64} {
			c := l.vector(d, []int{2, 2}, nan, nan, nan, nan)
			a, b := l.vector(d, []int{2, 2}, 1, 2, 3, inf), l.vector(d, []int{2, 2}, 1, 0, 0, nan)
			require.NoError(t, tensor.MatMul(s, c, a, l.vector(d, []int{2, 2}, 1, 0, 0, 1), nil))
			got := l.values(c)
			require.Equal(t, []float64{1, 2}, got[:2], d)
			require.True(t, math.IsNaN(got[2]) && math.IsInf(got[3], 1), "%v: %v", d, got)
			require.NoError(t, tensor.MatMul(s, c, a, b, nil))
			require.True(t, math.IsNaN(l.values(c)[1]), d)
		}
		c := l.vector(e4m3, []int{16, 16}, make([]float32, 256)...)
		big := make([]float32, 256)
		for i := range big {
			big[i] = 100
		}
		require.NoError(t, tensor.MatMul(s, c, l.vector(e4m3, []int{16, 16}, big...), l.vector(e4m3, []int{16, 16}, big...).T(), nil))
		require.Equal(t, 448.0, l.values(c)[17], "8-bit floats saturate")
	})
}

// The settings have torch's defaults, and products without settings use those of the process.
func TestMatMulDefaults(t *testing.T) {
	before, err := tensor.MatMulDefaults()
	require.NoError(t, err)
	require.Equal(t, tensor.MatMulSettings{}, before)
	_, err = tensor.SetMatMulDefaults(tensor.MatMulSettings{Float32Precision: 7})
	require.ErrorContains(t, err, "tensor: set matmul defaults: unknown Float32Precision 7")
	old, err := tensor.SetMatMulDefaults(tensor.MatMulSettings{Float32Precision: tensor.High})
	require.NoError(t, err)
	require.Equal(t, before, old)
	defer func() { _, _ = tensor.SetMatMulDefaults(before) }()
	now, err := tensor.MatMulDefaults()
	require.NoError(t, err)
	require.Equal(t, tensor.High, now.Float32Precision)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 5)
		defer l.close()
		const fine = 1 + 0x1p-20 // is 1 in TF32
		n := 64
		c, a, b := l.make(f32, 0, n, n, layout{}).Tensor, l.make(f32, 0, n, n, layout{}).Tensor, l.make(f32, 0, n, n, layout{}).Tensor
		ones := make([]float32, n*n)
		for i := range ones {
			ones[i] = fine
		}
		host, err := tensor.OfHost(ones, n, n)
		require.NoError(t, err)
		require.NoError(t, errors.Join(tensor.Copy(s, a, host), tensor.Copy(s, b, host)))
		require.NoError(t, tensor.MatMul(s, c, a, b, nil))
		require.Equal(t, float64(n), l.values(c)[0], "TF32")
		require.NoError(t, tensor.MatMul(s, c, a, b, &tensor.MatMulConfig{Settings: &tensor.MatMulSettings{}}))
		require.Greater(t, l.values(c)[0], float64(n), "float32")
	})
}

// A batch that shares b is one product, if its rows continue and no bias differs between the
// matrices. The results are the same in every case.
func TestMatMulSharedWeight(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 5)
		defer l.close()
		const batch, m, n, k = 3, 16, 24, 8
		b := l.integers(f32, k, n)
		for _, rows := range []layout{{}, {after: 4}, {above: 1}, {interleaved: true}} {
			for _, shape := range [][]int{{n}, {batch, n}} {
				for _, add := range []layout{{}, {repeated: true}} {
					a, c := l.make(f32, batch, m, k, rows), l.make(f32, batch, m, n, rows)
					cfg := &tensor.MatMulConfig{Bias: l.vector(f32, shape), Add: l.make(f32, batch, m, n, add).Tensor}
					before := l.bytes(c.storage)
					require.NoError(t, tensor.MatMul(s, c.Tensor, a.Tensor, b, cfg))
					ref := l.multiply(c.Tensor, a.Tensor, b, []float64{1}, []float64{1})
					ref.combine(1, l.values(cfg.Add))
					ref.addRows(l.values(cfg.Bias))
					checkClose(t, f32, ref.sum, l.values(c.Tensor), ref.bound(&trial{lab: l, types: [3]memory.DType{f32, f32, f32}}), "%+v, bias %v, add %+v", rows, shape, add)
					l.requireGaps(c, before)
				}
			}
		}
	})
}

// Both libraries read factors on the device, for every type of factor.
func TestMatMulFactorsOnDevice(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 5)
		defer l.close()
		for _, lib := range []tensor.BLASLibrary{tensor.CUBLAS, tensor.CUBLASLt} {
			for _, x := range []struct{ d, factor memory.DType }{{f32, f32}, {bf16, f32}, {f64, f64}, {f16, f16}} {
				settings := &tensor.MatMulSettings{Library: lib, AllowFP16Accumulation: x.factor == f16}
				a, b, c := l.integers(x.d, 16, 24), l.integers(x.d, 24, 32), l.integers(x.d, 16, 32)
				for _, device := range []bool{true, false, true} {
					old := l.values(c)
					cfg := &tensor.MatMulConfig{Settings: settings, Alpha: new(2.0), Beta: new(-1.0)}
					if device {
						cfg = &tensor.MatMulConfig{Settings: settings, DeviceAlpha: l.vector(x.factor, nil, 2), DeviceBeta: l.vector(x.factor, nil, -1)}
					}
					require.NoError(t, tensor.MatMul(s, c, a, b, cfg))
					ref := l.multiply(c, a, b, []float64{2}, []float64{1})
					ref.combine(-1, old)
					require.Equal(t, ref.sum, l.values(c), "%v, library %d, device %v", x, lib, device)
				}
			}
		}
	})
}

// An alpha of 0 leaves beta·Add + Bias and the epilogue, in place and out of place, with the
// factors on the host and on the device, and in a graph.
func TestMatMulZeroAlpha(t *testing.T) {
	testhost.Serial(t)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 1)
		defer l.close()
		for _, d := range []memory.DType{f64, f32, bf16, f16} {
			for _, shape := range [][3]int{{22, 1, 34}, {1, 22, 34}, {24, 16, 32}} {
				for variant := range 96 {
					l.zeroAlpha(d, shape, variant)
				}
			}
			l.close()
		}
		if l.cuda && devs[0].Require(device.Float8) != nil {
			return
		}
		for variant := range 96 {
			l.zeroAlpha(e4m3, [3]int{1, 32, 48}, variant)
		}
	})
}

func (l *lab) zeroAlpha(d memory.DType, shape [3]int, variant int) {
	t, m, n, k := l.t, shape[0], shape[1], shape[2]
	separate, relu, bias, onDevice, captured := variant&1 != 0, variant&2 != 0, variant&4 != 0, variant&8 != 0, variant&16 != 0
	alpha, beta := 0.0, []float64{1, 0, -1.25}[variant/32]
	a, b := l.vector(d, []int{m, k}), l.vector(d, []int{k, n})
	if d == e4m3 { // whose b is contiguous in columns, and whose c has another type
		b, d = l.vector(d, []int{n, k}).T(), bf16
	}
	c, add := l.vector(d, []int{m, n}), l.vector(d, []int{m, n})
	cfg := tensor.MatMulConfig{Alpha: &alpha, Beta: &beta}
	if onDevice {
		scale := f32
		if d == f64 {
			scale = f64
		}
		cfg = tensor.MatMulConfig{DeviceAlpha: l.vector(scale, nil, 0), DeviceBeta: l.vector(scale, nil, float32(beta))}
	}
	refused := onDevice && min(m, n) == 1 && (separate || relu || bias)
	want := l.values(c)
	if separate {
		cfg.Add = add
		want = l.values(add)
	}
	for i := range want {
		want[i] *= beta
	}
	if bias {
		cfg.Bias = l.vector(d, []int{n})
		for i, x := range l.values(cfg.Bias) {
			for j := range m {
				want[j*n+i] += x
			}
		}
	}
	if relu {
		cfg.Epilogue = tensor.ReLU
		for i := range want {
			want[i] = max(0, want[i])
		}
	}
	text := fmt.Sprintf("%v %v beta %v separate %v relu %v bias %v on device %v captured %v", d, shape, beta, separate, relu, bias, onDevice, captured)
	run := func() error { return tensor.MatMul(l.s, c, a, b, &cfg) }
	if captured {
		run = l.capture(run)
	}
	if err := run(); refused {
		require.ErrorContains(t, err, "factors on the device", text)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		return
	} else {
		require.NoError(t, err, text)
	}
	bound := make([]float64, len(want))
	for i, w := range want {
		bound[i] = 2 * numerics[d].unit * (math.Abs(w) + 4)
	}
	checkClose(t, d, want, l.values(c), bound, "%s", text)
}

// capture returns a function that captures run in a graph and launches it.
func (l *lab) capture(run func() error) func() error {
	return func() error {
		x, err := graph.Capture([]*stream.Stream{l.s}, run, nil)
		if err != nil {
			return err
		}
		return errors.Join(x.Launch(l.s), l.s.Sync(testgpu.Context(l.t)), x.Close())
	}
}

// TestMatMulSumsWithoutAlgorithm sums inputs where cuBLASLt has no algorithm that does it, as for
// some layouts on GPUs.
func TestMatMulSumsWithoutAlgorithm(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cublasLtMatmulAlgoGetHeuristic#1=CUBLAS_STATUS_NOT_SUPPORTED"})
	s, err := stream.New(sys.Devices()[0], nil)
	require.NoError(t, err)
	l := newLab(t, s, 1)
	l.sumsOfVector([3]int{24, 16, 64}, 1)
	l.close()
	require.NoError(t, s.Close())
}

// TestMatMulSumsOfVectors: cuBLASLt stores wrong sums if c has one row or one column.
func TestMatMulSumsOfVectors(t *testing.T) {
	testhost.Serial(t)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 1)
		defer l.close()
		for _, shape := range [][3]int{{15, 1, 616}, {1, 15, 616}, {26, 1, 59}, {1, 1, 1}} {
			for variant := range 32 {
				l.sumsOfVector(shape, variant)
			}
			l.close()
		}
	})
}

func (l *lab) sumsOfVector(shape [3]int, variant int) {
	m, n, k := shape[0], shape[1], shape[2]
	sumB, half, zero, add, captured := variant&1 != 0, variant&2 != 0, variant&4 != 0, variant&8 != 0, variant&16 != 0
	out := f32
	if half {
		out = bf16
	}
	a, b, c := l.vector(bf16, []int{m, k}), l.vector(bf16, []int{k, n}), l.vector(out, []int{m, n})
	cfg := tensor.MatMulConfig{Epilogue: tensor.SumA, Alpha: new(1.0), Beta: new(0.0)}
	if zero {
		cfg.Alpha = new(0.0)
	}
	before := l.values(c)
	if add {
		cfg.Beta = new(1.0)
	}
	va, vb := l.values(a), l.values(b)
	want, product := make([]float64, m), make([]float64, m*n)
	if sumB {
		cfg.Epilogue, want = tensor.SumB, make([]float64, n)
	}
	for i := range m {
		for j := range n {
			for p := range k {
				product[i*n+j] += *cfg.Alpha * va[i*k+p] * vb[p*n+j]
			}
			product[i*n+j] += *cfg.Beta * before[i*n+j]
		}
	}
	for p := range k {
		for i := range want {
			if sumB {
				want[i] += vb[p*n+i]
			} else {
				want[i] += va[i*k+p]
			}
		}
	}
	cfg.BiasGrad = l.vector(out, []int{len(want)})
	run := func() error { return tensor.MatMul(l.s, c, a, b, &cfg) }
	if captured {
		run = l.capture(run)
	}
	text := fmt.Sprintf("%v sumB %v half %v zero %v add %v captured %v", shape, sumB, half, zero, add, captured)
	require.NoError(l.t, run(), text)
	for what, pair := range map[string][2][]float64{"sums": {want, l.values(cfg.BiasGrad)}, "product": {product, l.values(c)}} {
		for i, w := range pair[0] {
			bound := 1e-5 * float64(k)
			if half {
				bound += (math.Abs(w) + math.Sqrt(float64(k))) / 128 // parts of a split k are rounded, too
			}
			require.InDelta(l.t, w, pair[1][i], bound, "%s: %s %d", text, what, i)
		}
	}
}

// memory.Ledger has the workspace of each stream that products have needed one on.
func TestLedgerHasWorkspaces(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		before := workspaces(t, d)
		s, err := stream.New(d, nil)
		require.NoError(t, err)
		x, err := tensor.Make(s, memory.BFloat16, 512, 512) // the values do not matter
		require.NoError(t, err)
		y, err := tensor.Make(s, memory.BFloat16, 512, 512)
		require.NoError(t, err)
		require.NoError(t, tensor.MatMul(s, y, x, x, nil))
		if grown := workspaces(t, d) - before; grown != 0 || d.System().Backend() == "virtual" { // cuBLASLt may need none
			require.GreaterOrEqual(t, grown, 1<<20)
		}
		require.NoError(t, errors.Join(x.Close(), y.Close(), s.Close()))
		require.Equal(t, before, workspaces(t, d))
	})
}

func workspaces(t *testing.T, d *device.Device) int {
	u, err := memory.Ledger(d)
	require.NoError(t, err)
	for _, x := range u.Uses {
		if x.Owner == "workspaces of matrix products" {
			return int(x.Bytes)
		}
	}
	return 0
}

// quick keeps tunings of tests short.
var quick = &tensor.TuneConfig{MaxDuration: time.Millisecond, MaxIterations: 3, Candidates: 6, RotatingBytes: 1 << 16}

// Tuning changes no operand, is done once for a kind of product, and its results are right,
// also in another process that reads them.
func TestTuneMatMul(t *testing.T) {
	testhost.Serial(t)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 9)
		defer l.close()
		ctx := testgpu.Context(t)
		others, err := tensor.TuneResults(devs[0]) // of other tests
		require.NoError(t, err)
		for _, d := range []memory.DType{bf16, f32, e4m3} {
			out := d
			if d == e4m3 {
				out = bf16
			}
			a, b, c := l.make(d, 2, 24, 512, layout{}), l.make(d, 2, 512, 16, layout{transposed: true}), l.make(out, 2, 24, 16, layout{after: 16})
			bias := l.vector(out, []int{2, 16})
			cfg := &tensor.MatMulConfig{Bias: bias, Beta: new(0.5), Settings: &tensor.MatMulSettings{BF16Reduction: tensor.FullPrecision}}
			before := [][]byte{l.bytes(a.storage), l.bytes(b.storage), l.bytes(c.storage), l.bytes(bias)}
			r, err := tensor.TuneMatMul(ctx, s, c.Tensor, a.Tensor, b.Tensor, cfg, quick)
			require.NoError(t, err)
			require.Equal(t, before, [][]byte{l.bytes(a.storage), l.bytes(b.storage), l.bytes(c.storage), l.bytes(bias)})
			require.True(t, r.Measured > 0 && r.Time > 0 && r.Time <= r.Default, "%+v", r)
			again, err := tensor.TuneMatMul(ctx, s, c.Tensor, a.Tensor, b.Tensor, cfg, quick)
			require.NoError(t, err)
			require.Equal(t, r, again)
			old := l.values(c.Tensor)
			require.NoError(t, tensor.MatMul(s, c.Tensor, a.Tensor, b.Tensor, cfg))
			ref := l.multiply(c.Tensor, a.Tensor, b.Tensor, []float64{1}, []float64{1})
			ref.combine(0.5, old)
			ref.addRows(l.values(bias))
			x := &trial{lab: l, types: [3]memory.DType{d, d, out}, float8: d == e4m3, settings: *cfg.Settings}
			checkClose(t, out, ref.sum, l.values(c.Tensor), ref.bound(x), "%v: %+v", d, r)
		}
		results, err := tensor.TuneResults(devs[0])
		require.NoError(t, err)
		require.Len(t, results, len(others)+3)
	})
}

// A file of results has the validators of its device, and is refused as a whole by others.
func TestTuneFile(t *testing.T) {
	testhost.Serial(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ctx := testgpu.Context(t)
	open := func(i int) *lab {
		s, err := stream.New(devs[i], nil)
		require.NoError(t, err)
		return newLab(t, s, 9)
	}
	l, m := open(0), open(1)
	product := func(l *lab) (c, a, b tensor.Tensor) {
		return l.make(bf16, 0, 64, 64, layout{}).Tensor, l.make(bf16, 0, 64, 96, layout{}).Tensor, l.make(bf16, 0, 96, 64, layout{}).Tensor
	}
	c, a, b := product(l)
	r, err := tensor.TuneMatMul(ctx, l.s, c, a, b, nil, quick)
	require.NoError(t, err)
	var file bytes.Buffer
	require.NoError(t, tensor.WriteTuneResults(devs[0], &file))
	text := file.String()
	require.Contains(t, text, "Validator,CUBLASLT_VERSION,130002\n")
	require.Contains(t, text, "\nGemmTunableOp_BFloat16_NN,nn_64_64_96_1_")
	require.Contains(t, text, ","+r.Solution+",")

	for name, bad := range map[string]string{
		"version":           strings.Replace(text, "130002", "130001", 1),
		"missing validator": strings.Replace(text, "Validator,SM_COUNT,132\n", "", 1),
		"more validators":   "Validator,PT_VERSION,2.11.0\n" + text,
		"no solution":       text + "GemmTunableOp_BFloat16_NN,nn_64\n",
		"product":           text + "GemmTunableOp_BFloat16_NN,nn_64_64,Default,1\n",
		"operation":         strings.Replace(text, "GemmTunableOp_BFloat16_NN", "GemmTunableOp_Half_NN", 1),
		"solution":          strings.Replace(text, ","+r.Solution+",", ",Lt_1_2_3,", 1),
		"time":              strings.TrimSpace(text) + "x\n",
		"nothing":           "",
		"a long line":       text + strings.Repeat("x", 1<<16),
	} {
		require.ErrorContains(t, tensor.ReadTuneResults(devs[1], strings.NewReader(bad)), "tensor: read tune results: ", name)
	}
	list, err := tensor.TuneResults(devs[1])
	require.NoError(t, err)
	require.Empty(t, list)
	const solution = "Lt_6_18_1_0_0_0_11_0_0"
	require.NoError(t, tensor.ReadTuneResults(devs[1], strings.NewReader(strings.Replace(text, ","+r.Solution+",", ","+solution+",", 1))))
	c, a, b = product(m)
	require.NoError(t, tensor.MatMul(m.s, c, a, b, nil))
	again, err := tensor.TuneMatMul(ctx, m.s, c, a, b, nil, quick)
	require.NoError(t, err)
	require.Zero(t, again.Measured, "the result is the file's")
	require.Equal(t, solution, again.Solution)
	unknown := strings.Replace(strings.Replace(text, ","+r.Solution+",", ",Lt_6_9999_1_0_0_0_11_0_0,", 1), "_64_64_96_", "_80_64_96_", 1)
	unknown = strings.Replace(unknown, "_1_64_0_96_0_64_0_64_", "_1_80_0_96_0_80_0_80_", 1)
	require.NoError(t, tensor.ReadTuneResults(devs[1], strings.NewReader(unknown)))
	c, a, b = m.make(bf16, 0, 64, 80, layout{}).Tensor, m.make(bf16, 0, 64, 96, layout{}).Tensor, m.make(bf16, 0, 96, 80, layout{}).Tensor
	require.NoError(t, tensor.MatMul(m.s, c, a, b, nil))
	again, err = tensor.TuneMatMul(ctx, m.s, c, a, b, nil, quick)
	require.NoError(t, err)
	require.Positive(t, again.Measured, "an algorithm that cuBLASLt refuses is ignored")
	for _, l := range []*lab{l, m} {
		l.close()
		require.NoError(t, l.s.Close())
	}
}

// TestTuneFileWithSplits reads algorithms that add parts of k in bfloat16, which the settings may
// forbid. cuBLASLt checks the schemes of its own suggestions only.
func TestTuneFileWithSplits(t *testing.T) {
	testhost.Serial(t)
	const inPlace, inFloat32 = "Lt_6_18_4_1_0_0_11_0_0", "Lt_6_18_4_2_0_0_11_0_0"
	for _, tc := range []struct {
		allowed  tensor.Reduction
		solution string
		taken    bool
	}{
		{tensor.ReducedPrecision, inPlace, true}, {tensor.ReducedPrecision, inFloat32, true},
		{tensor.FullPrecision, inFloat32, true}, {tensor.FullPrecision, inPlace, false},
		{tensor.NoSplitK, inFloat32, false},
	} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		cfg := &tensor.MatMulConfig{Settings: &tensor.MatMulSettings{BF16Reduction: tc.allowed}}
		var text string
		for i, dev := range devs {
			s, err := stream.New(dev, nil)
			require.NoError(t, err)
			l := newLab(t, s, 9)
			c, a, b := l.make(bf16, 0, 64, 64, layout{}).Tensor, l.make(bf16, 0, 64, 96, layout{}).Tensor, l.make(bf16, 0, 96, 64, layout{}).Tensor
			if i == 1 {
				require.NoError(t, tensor.ReadTuneResults(dev, strings.NewReader(text)))
			}
			r, err := tensor.TuneMatMul(testgpu.Context(t), s, c, a, b, cfg, quick)
			require.NoError(t, err)
			if i == 0 {
				var file bytes.Buffer
				require.NoError(t, tensor.WriteTuneResults(dev, &file))
				text = strings.Replace(file.String(), ","+r.Solution+",", ","+tc.solution+",", 1)
			} else if tc.taken {
				require.Equal(t, tc.solution, r.Solution, "%+v", tc)
			} else {
				require.Positive(t, r.Measured, "%+v", tc)
			}
			l.close()
			require.NoError(t, s.Close())
		}
	}
}

// Products are recorded once each and tuned later from the file.
func TestTuneRecorded(t *testing.T) {
	testhost.Serial(t)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 9)
		defer l.close()
		ctx := testgpu.Context(t)
		c, a, b := l.make(bf16, 0, 64, 80, layout{}).Tensor, l.make(bf16, 0, 64, 96, layout{before: 3}).Tensor, l.make(bf16, 0, 96, 80, layout{transposed: true}).Tensor
		row := l.vector(bf16, []int{81})
		bias := narrow(l, row, 0, 1, 80) // another alignment than c
		cfg := &tensor.MatMulConfig{Epilogue: tensor.ReLU, Bias: bias, Aux: l.vector(memory.Uint8, []int{64, 16})}
		require.NoError(t, tensor.MatMul(s, c, a, b, nil))
		stop, err := tensor.RecordMatMuls(devs[0])
		require.NoError(t, err)
		_, err = tensor.RecordMatMuls(devs[0])
		require.ErrorContains(t, err, "already being recorded")
		for range 2 {
			require.NoError(t, tensor.MatMul(s, c, a, b, nil))
			require.NoError(t, tensor.MatMul(s, c, a, b, cfg))
		}
		var file bytes.Buffer
		require.NoError(t, stop(&file))
		next, err := tensor.RecordMatMuls(devs[0])
		require.NoError(t, err)
		var twice bytes.Buffer
		require.ErrorContains(t, stop(&twice), "stop was called before")
		require.Zero(t, twice.Len())
		_, err = tensor.RecordMatMuls(devs[0])
		require.ErrorContains(t, err, "already being recorded", "stop has not ended the next recording")
		require.NoError(t, next(io.Discard))
		require.Equal(t, 2, strings.Count(file.String(), "\n"), file.String())
		for _, bad := range []string{"x", "GemmTunableOp_BFloat16_NN,nn_1", strings.Replace(file.String(), "_80_", "_0_", 1)} {
			_, err := tensor.TuneRecorded(ctx, s, strings.NewReader(bad), quick)
			require.ErrorContains(t, err, "line 1: ")
		}
		results, err := tensor.TuneRecorded(ctx, s, &file, quick)
		require.NoError(t, err)
		require.Len(t, results, 2)
		r, err := tensor.TuneMatMul(ctx, s, c, a, b, cfg, quick)
		require.NoError(t, err)
		require.Contains(t, results, r, "the recorded product is this one")
		require.NoError(t, tensor.MatMul(s, c, a, b, cfg))
	})
}

// Products are tuned at their first use, but not in a capture.
func TestOnlineTuning(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 9)
		defer l.close()
		require.NoError(t, tensor.SetMatMulTuning(quick))
		defer func() { require.NoError(t, tensor.SetMatMulTuning(nil)) }()
		results := func() int { r, err := tensor.TuneResults(devs[0]); require.NoError(t, err); return len(r) }
		first := results()
		c, a, b := l.integers(bf16, 64, 64), l.integers(bf16, 64, 48), l.integers(bf16, 48, 64)
		run := func() error { return tensor.MatMul(s, c, a, b, nil) }
		g, err := graph.Capture([]*stream.Stream{s}, run, nil)
		require.NoError(t, err)
		require.NoError(t, g.Close())
		require.Equal(t, first, results())
		require.NoError(t, run())
		require.NoError(t, run())
		require.Equal(t, first+1, results())
		require.Equal(t, l.multiply(c, a, b, []float64{1}, []float64{1}).sum, l.values(c))
	})
}

func TestTuneErrors(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 9)
		defer l.close()
		ctx := testgpu.Context(t)
		c, a, b := l.integers(bf16, 64, 64), l.integers(bf16, 64, 48), l.integers(bf16, 48, 64)
		_, err = tensor.TuneMatMul(ctx, s, c, a, a, nil, quick)
		require.ErrorContains(t, err, "do not fit")
		_, err = tensor.TuneMatMul(ctx, s, c, a, b, nil, &tensor.TuneConfig{MaxIterations: -1})
		require.ErrorContains(t, err, "negative")
		require.ErrorContains(t, tensor.SetMatMulTuning(&tensor.TuneConfig{ATol: -1}), "ATol is -1 and RTol is 0: want 0 or more")
		require.ErrorContains(t, tensor.SetMatMulTuning(&tensor.TuneConfig{ATol: math.NaN()}), "ATol is NaN and RTol is 0: want 0 or more")
		require.ErrorContains(t, tensor.SetMatMulTuning(&tensor.TuneConfig{RTol: math.NaN()}), "RTol is NaN: want 0 or more")
		_, err = tensor.TuneMatMul(ctx, s, c, a, b, &tensor.MatMulConfig{Settings: &tensor.MatMulSettings{Library: tensor.CUBLAS}}, quick)
		require.ErrorContains(t, err, "no algorithms to choose from")
		_, err = tensor.TuneMatMul(ctx, nil, c, a, b, nil, quick)
		require.ErrorContains(t, err, "no stream given")
		ended, cancel := context.WithCancelCause(ctx)
		gone := errors.New("gone")
		cancel(gone)
		_, err = tensor.TuneMatMul(ended, s, c, a, b, nil, quick)
		require.ErrorIs(t, err, gone)
		require.NoError(t, tensor.MatMul(s, c, a, b, nil), "after the tuning that did not end")
		_, err = graph.Capture([]*stream.Stream{s}, func() error {
			_, err := tensor.TuneMatMul(ctx, s, c, a, b, nil, quick)
			return err
		}, nil)
		require.ErrorIs(t, err, graph.ErrorUnsupported)
	})
}
