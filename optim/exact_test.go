package optim_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// vector returns a tensor that the test closes.
func vector(t *testing.T, s *stream.Stream, xs ...float32) tensor.Tensor {
	t.Helper()
	m, err := memory.MakeFrom(s, xs)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	x, err := tensor.Of(m, len(xs))
	require.NoError(t, err)
	return x
}

// A step divides by the scale, instead of multiplying by the inverse, and rounds the product with
// the factor to float32 before it squares it.
func TestGradientIsRoundedTwice(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		gs, divided, clipped := make([]float32, 1000), make([]float64, 1000), make([]float64, 1000)
		scale, clip := float32(3), float32(0.7)
		for i := range gs {
			gs[i] = float32(r.NormFloat64())
			one, two := gs[i]/scale, float32(gs[i]*clip)
			divided[i], clipped[i] = float64(float32(one*one)), float64(float32(two*two))
		}
		for name, c := range map[string]struct {
			cfg  optim.StepConfig
			want []float64
		}{
			"scale": {optim.StepConfig{GradScale: device32(t, s, scale)}, divided},
			"clip":  {optim.StepConfig{Clip: device32(t, s, clip)}, clipped},
		} {
			params := []optim.Param{{Value: vector(t, s, make([]float32, 1000)...), Grad: vector(t, s, gs...)}}
			o, err := optim.NewAdam(s, []optim.Group{{Params: params}}, &optim.AdamConfig{Betas: [2]float64{0.5, 0}})
			require.NoError(t, err)
			require.NoError(t, o.Step(s, &c.cfg))
			require.Equal(t, c.want, values(read(t, s, o.State()[0].ExpAvgSq)), name) // the square, because beta is 0
			require.NoError(t, o.Close())
		}
	})
}

// With AMSGrad the largest second moment stays NaN, as torch.maximum has it.
func TestLargestMomentStaysNaN(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, nan := newStream(t, devs[0]), float32(math.NaN())
		params := []optim.Param{{Value: vector(t, s, 1, 1, 1), Grad: vector(t, s, 2, 2, 2)}}
		o, err := optim.NewAdam(s, []optim.Group{{Params: params}}, &optim.AdamConfig{AMSGrad: true})
		require.NoError(t, err)
		defer o.Close()
		require.NoError(t, o.LoadState(s, []optim.State{{
			ExpAvg: vector(t, s, 0, 0, 0), ExpAvgSq: vector(t, s, 0, 0, 0), MaxExpAvgSq: vector(t, s, nan, 0, 100)}}))
		require.NoError(t, o.Step(s, nil))
		got := values(read(t, s, o.State()[0].MaxExpAvgSq))
		require.True(t, math.IsNaN(got[0]), "%v", got)
		require.Less(t, got[1], 1.0)
		require.Positive(t, got[1])
		require.Equal(t, 100.0, got[2])
	})
}

// Each state has the step of its group.
func TestStepsOfGroups(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	param := func() optim.Param { return optim.Param{Value: vector(t, s, 1), Grad: vector(t, s, 1)} }
	o, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{param(), param()}}, {Params: []optim.Param{param()}}, {Params: []optim.Param{param()}}}, nil)
	require.NoError(t, err)
	defer o.Close()
	for g, step := range []float32{5, 6, 7} {
		require.NoError(t, o.SetStep(s, g, step))
	}
	require.NoError(t, o.Step(s, nil))
	for i, want := range []float32{6, 6, 7, 8} {
		got := make([]float32, 1)
		require.NoError(t, o.State()[i].Step.CopyTo(s, got))
		require.Equal(t, want, got[0], "parameter %d", i)
	}
}

// LoadState refuses states whose source it would overwrite.
func TestLoadStateOfSwappedStates(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	param := func() optim.Param { return optim.Param{Value: vector(t, s, 1), Grad: vector(t, s, 1)} }
	o, err := optim.NewAdam(s, []optim.Group{{Params: []optim.Param{param(), param()}}}, nil)
	require.NoError(t, err)
	defer o.Close()
	own := o.State()
	require.NoError(t, o.LoadState(s, own))
	require.ErrorContains(t, o.LoadState(s, []optim.State{own[1], own[0]}), "load from a copy")
	twisted := []optim.State{own[0], own[1]}
	twisted[0].ExpAvg, twisted[0].ExpAvgSq = own[0].ExpAvgSq, own[0].ExpAvg
	require.ErrorContains(t, o.LoadState(s, twisted), "load from a copy")
}
