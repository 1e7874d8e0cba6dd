package tensor_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/tsan"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// quick keeps tunings of tests short.
var quick = &tensor.TuneConfig{MaxDuration: time.Millisecond, MaxIterations: 3, Candidates: 6, RotatingBytes: 1 << 16}

// Tuning changes no operand, is done once for a kind of product, and its results are right,
// also in another process that reads them.
func TestTuneMatMul(t *testing.T) {
	tsan.Serial(t)
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
	tsan.Serial(t)
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
	tsan.Serial(t)
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
	tsan.Serial(t)
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
