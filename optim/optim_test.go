package optim_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// random returns a tensor of normal numbers, and the numbers as the type rounds them.
func random(t *testing.T, s *stream.Stream, r *rand.Rand, d memory.DType, n int) (tensor.Tensor, []float64) {
	a := array{DType: d.String(), Shape: []int{n}}
	for range n {
		x := r.NormFloat64()
		switch d {
		case memory.Float16:
			a.Bytes = binary.LittleEndian.AppendUint16(a.Bytes, uint16(memory.Float16Of(float32(x))))
		case memory.BFloat16:
			a.Bytes = binary.LittleEndian.AppendUint16(a.Bytes, uint16(memory.BFloat16Of(float32(x))))
		case memory.Float32:
			a.Bytes = binary.LittleEndian.AppendUint32(a.Bytes, math.Float32bits(float32(x)))
		default:
			a.Bytes = binary.LittleEndian.AppendUint64(a.Bytes, math.Float64bits(x))
		}
	}
	return upload(t, s, a), values(a)
}

func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// A reference is AdamW in float64.
type reference struct {
	p, m, v []float64
	step    float64
}

func (r *reference) adamW(g []float64, lr, decay float64) {
	r.step++
	if r.m == nil {
		r.m, r.v = make([]float64, len(g)), make([]float64, len(g))
	}
	for i := range g {
		r.p[i] -= lr * decay * r.p[i]
		r.m[i] = 0.9*r.m[i] + 0.1*g[i]
		r.v[i] = 0.999*r.v[i] + 0.001*g[i]*g[i]
		r.p[i] -= lr / (1 - math.Pow(0.9, r.step)) * r.m[i] / (math.Sqrt(r.v[i])/math.Sqrt(1-math.Pow(0.999, r.step)) + 1e-8)
	}
}

func requireValues(t *testing.T, s *stream.Stream, want []float64, got tensor.Tensor, within float64, what string) {
	t.Helper()
	have := values(read(t, s, got))
	require.Equal(t, len(want), len(have), what)
	for i := range want {
		require.InDelta(t, want[i], have[i], within*max(1, math.Abs(want[i])), "%s: element %d", what, i)
	}
}

// Groups have options of their own; lengths span several blocks; parts of a flat memory
// begin anywhere; gradients of half types update float32 values and their copies.
func TestGroups(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		flat, fv := random(t, s, r, memory.Float32, 40_000)
		flatGrad, gv := random(t, s, r, memory.Float32, 40_000)
		odd, err := flat.Narrow(0, 3, 33_001) // aligned to nothing, longer than a block
		require.NoError(t, err)
		oddGrad, err := flatGrad.Narrow(0, 3, 33_001)
		require.NoError(t, err)
		master, mv := random(t, s, r, memory.Float32, 70)
		half, hv := random(t, s, r, memory.BFloat16, 70)
		low, _ := random(t, s, r, memory.BFloat16, 70)
		double, dv := random(t, s, r, memory.Float64, 5)
		doubleGrad, dg := random(t, s, r, memory.Float64, 5)
		empty, _ := random(t, s, r, memory.Float32, 0)

		o, err := optim.NewAdamW(s, []optim.Group{
			{Params: []optim.Param{{Value: odd, Grad: oddGrad}, {Value: empty, Grad: empty}}},
			{Params: []optim.Param{{Value: master, Grad: half, Copy: low}, {Value: double, Grad: doubleGrad}}, LR: 0.01, WeightDecay: new(0.2)},
		}, nil)
		require.NoError(t, err)
		defer o.Close()
		first := reference{p: fv[3:][:33_001:33_001]}
		second, third := reference{p: mv}, reference{p: dv}
		rest := append([]float64{}, fv[33_004:]...)
		rates := []float64{0.01, 0.01, 0.02}
		for i, lr := range rates {
			if i == 2 {
				require.NoError(t, o.SetLR(s, 1, lr))
			}
			require.NoError(t, o.Step(s, nil))
			first.adamW(gv[3:33_004], 1e-3, 0.01)
			second.adamW(hv, lr, 0.2)
			third.adamW(dg, lr, 0.2)
		}
		requireValues(t, s, fv[:33_004], narrow(t, flat, 0, 33_004), 2e-6, "flat")
		requireValues(t, s, rest, narrow(t, flat, 33_004, 40_000), 0, "behind the parameter")
		requireValues(t, s, mv, master, 2e-6, "master")
		requireValues(t, s, values(read(t, s, master)), low, 0x1p-8, "copy")
		requireValues(t, s, dv, double, 1e-13, "float64")
	})
}

func narrow(t *testing.T, x tensor.Tensor, from, to int) tensor.Tensor {
	y, err := x.Narrow(0, from, to-from)
	require.NoError(t, err)
	return y
}

// A step divides by the scale and multiplies by the factor, and a found infinity skips it:
// nothing changes, and it does not count.
func TestStepConfig(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		x, xv := random(t, s, r, memory.Float32, 1000)
		g, gv := random(t, s, r, memory.Float32, 1000)
		o, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{{Value: x, Grad: g}}}}, &optim.SGDConfig{LR: 0.5, Momentum: 0.9})
		require.NoError(t, err)
		defer o.Close()
		skipped := &optim.StepConfig{FoundInf: device32(t, s, 2)} // a sum over ranks, as torch's sharded scaler has
		require.NoError(t, o.Step(s, skipped))
		requireValues(t, s, xv, x, 0, "skipped")
		step := func() float32 {
			n := make([]float32, 1)
			require.NoError(t, o.State()[0].Step.CopyTo(s, n))
			return n[0]
		}
		require.Zero(t, step())
		cfg := &optim.StepConfig{GradScale: device32(t, s, 8), Clip: device32(t, s, 0.5), FoundInf: device32(t, s, 0)}
		require.NoError(t, o.Step(s, cfg))
		require.NoError(t, o.Step(s, cfg))
		require.EqualValues(t, 2, step())
		for i := range xv {
			xv[i] -= 0.5 * gv[i] / 16 * (1 + 1.9)
		}
		requireValues(t, s, xv, x, 1e-6, "two steps")
		requireValues(t, s, gv, g, 0, "the gradient stays")
	})
}

// A captured step counts, and follows the learning rate in device memory.
func TestCapturedStep(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		x, xv := random(t, s, r, memory.Float32, 500)
		g, gv := random(t, s, r, memory.Float32, 500)
		o, err := optim.NewAdamW(s, []optim.Group{{Params: []optim.Param{{Value: x, Grad: g}}}}, nil)
		require.NoError(t, err)
		defer o.Close()
		grads, err := optim.NewGrads(s, o.Gradients()...)
		require.NoError(t, err)
		defer grads.Close()
		step := func() error {
			if _, err := grads.Powers(s, 2); err != nil {
				return err
			}
			_, factor, err := grads.Coef(s, 1)
			if err != nil {
				return err
			}
			return o.Step(s, &optim.StepConfig{Clip: factor})
		}
		require.NoError(t, step())
		exec, err := graph.Capture([]*stream.Stream{s}, step, nil)
		require.NoError(t, err)
		defer exec.Close()
		norm := 0.0
		for _, v := range gv {
			norm += v * v
		}
		for i := range gv {
			gv[i] /= math.Sqrt(norm) + 1e-6
		}
		ref := reference{p: xv}
		ref.adamW(gv, 1e-3, 0.01)
		for k := range 4 {
			lr := 1e-3 * float64(k)
			require.NoError(t, o.LR(0).CopyFrom(s, []float64{lr}))
			require.NoError(t, exec.Launch(s))
			ref.adamW(gv, lr, 0.01)
		}
		requireValues(t, s, xv, x, 1e-5, "five steps")
	})
}

// A state that was saved and loaded goes on as if nothing had happened.
func TestLoadState(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		x, xv := random(t, s, r, memory.Float32, 300)
		g, _ := random(t, s, r, memory.Float32, 300)
		cfg := &optim.AdamConfig{AMSGrad: true}
		groups := []optim.Group{{Params: []optim.Param{{Value: x, Grad: g}}}}
		a, err := optim.NewAdam(s, groups, cfg)
		require.NoError(t, err)
		defer a.Close()
		require.NoError(t, a.Step(s, nil))
		middle := read(t, s, x)
		b, err := optim.NewAdam(s, groups, cfg)
		require.NoError(t, err)
		defer b.Close()
		state := a.State()[0]
		require.NoError(t, b.LoadState(s, []optim.State{state}))
		require.NoError(t, b.SetStep(s, 0, 1))
		require.NoError(t, a.Step(s, nil))
		want := read(t, s, x)
		write(t, s, x, middle)
		require.NoError(t, b.Step(s, nil))
		requireNear(t, s, want, x, 0, "after loading")
		require.NotEqual(t, xv, values(want))

		state.ExpAvgSq = tensor.Tensor{}
		require.ErrorContains(t, b.LoadState(s, []optim.State{state}), "exp_avg_sq of parameter 0")
		state = a.State()[0]
		state.ExpAvg = narrow(t, state.ExpAvg, 0, 299)
		require.ErrorContains(t, b.LoadState(s, []optim.State{state}), "has 299 elements: want 300")
		require.ErrorContains(t, b.LoadState(s, nil), "states of 0 parameters")
	})
}

// A state that does not fit changes nothing, whichever of its tensors is wrong.
func TestLoadOfAStateThatDoesNotFit(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		var params []optim.Param
		for range 2 {
			x, _ := random(t, s, r, memory.Float32, 6)
			g, _ := random(t, s, r, memory.Float32, 6)
			params = append(params, optim.Param{Value: shaped(t, x, 2, 3), Grad: shaped(t, g, 2, 3)})
		}
		o, err := optim.NewAdam(s, []optim.Group{{Params: params}}, nil)
		require.NoError(t, err)
		defer o.Close()
		require.NoError(t, o.Step(s, nil))
		before := [][]float64{}
		for _, x := range o.State() {
			before = append(before, values(read(t, s, x.ExpAvg)), values(read(t, s, x.ExpAvgSq)))
		}
		fresh := func(shape ...int) tensor.Tensor {
			x, err := tensor.Make(s, memory.Float32, shape...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, x.Close()) })
			require.NoError(t, tensor.Copy(s, x, shaped(t, params[0].Grad, shape...)))
			return x
		}
		closed := fresh(2, 3)
		require.NoError(t, closed.Close())
		for want, wrong := range map[string]tensor.Tensor{
			"exp_avg_sq of parameter 1 has shape [3 2]: want [2 3]": fresh(3, 2),
			"exp_avg_sq of parameter 1: float32 [2 3]":              closed,
			"the optimiser has it: true, the state has it: false":   {},
		} {
			state := []optim.State{{ExpAvg: fresh(2, 3), ExpAvgSq: fresh(6)}, {ExpAvg: fresh(2, 3), ExpAvgSq: wrong}}
			require.ErrorContains(t, o.LoadState(s, state), want)
		}
		for i, x := range o.State() {
			require.Equal(t, before[2*i], values(read(t, s, x.ExpAvg)))
			require.Equal(t, before[2*i+1], values(read(t, s, x.ExpAvgSq)))
		}
		require.NoError(t, o.LoadState(s, []optim.State{{ExpAvg: fresh(2, 3), ExpAvgSq: fresh(6)}, {ExpAvg: fresh(6), ExpAvgSq: fresh(2, 3)}}))
		require.Equal(t, values(read(t, s, params[0].Grad)), values(read(t, s, o.State()[1].ExpAvgSq)))
	})
}

// shaped returns a view with another shape.
func shaped(t testing.TB, x tensor.Tensor, shape ...int) tensor.Tensor {
	t.Helper()
	x, err := x.View(shape...)
	require.NoError(t, err)
	return x
}

func TestClipValue(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		m, err := memory.MakeFrom(s, []float32{-3, -0.5, float32(math.NaN()), 0.25, float32(math.Inf(1))})
		require.NoError(t, err)
		defer m.Close()
		g, err := optim.NewGrads(s, optim.Of(m, m).Grad)
		require.NoError(t, err)
		defer g.Close()
		require.NoError(t, g.ClipValue(s, 0.5))
		got := make([]float32, 5)
		require.NoError(t, m.CopyTo(s, got))
		require.True(t, math.IsNaN(float64(got[2])))
		got[2] = 7
		require.Equal(t, []float32{-0.5, -0.5, 7, 0.25, 0.5}, got)
	})
}

// Norms of many tensors that span blocks, of mixed types, against float64.
func TestNorms(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		var xs []tensor.Tensor
		var all []float64
		for i := range 40 {
			d := []memory.DType{memory.Float32, memory.Float64}[i%2]
			x, v := random(t, s, r, d, r.IntN(3000)+i%5*9000)
			xs, all = append(xs, x), append(all, v...)
		}
		g, err := optim.NewGrads(s, xs...)
		require.NoError(t, err)
		defer g.Close()
		_, _, err = g.Coef(s, 1)
		require.ErrorContains(t, err, "call Powers before Coef")
		for _, p := range []float64{1, 2, 3, math.Inf(1)} {
			want := 0.0
			for _, x := range all {
				if math.IsInf(p, 1) {
					want = max(want, math.Abs(x))
				} else {
					want += math.Pow(math.Abs(x), p)
				}
			}
			if !math.IsInf(p, 1) {
				want = math.Pow(want, 1/p)
			}
			_, err := g.Powers(s, p)
			require.NoError(t, err)
			norm, _, err := g.Coef(s, 1)
			require.NoError(t, err)
			got := make([]float32, 1)
			require.NoError(t, norm.CopyTo(s, got))
			require.InEpsilon(t, want, got[0], 1e-6, "order %v", p)
		}
	})
}

// All calls work on an optimiser whose groups have no parameters.
func TestNoParameters(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	for name, open := range map[string]func() (*optim.Optimizer, error){
		"Adam":  func() (*optim.Optimizer, error) { return optim.NewAdam(s, []optim.Group{{}}, nil) },
		"AdamW": func() (*optim.Optimizer, error) { return optim.NewAdamW(s, []optim.Group{{}, {LR: 1}}, nil) },
		"SGD": func() (*optim.Optimizer, error) {
			return optim.NewSGD(s, []optim.Group{{}}, &optim.SGDConfig{Momentum: 0.9})
		},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := open()
			require.NoError(t, err)
			defer o.Close()
			grads, err := o.Grads(s)
			require.NoError(t, err)
			defer grads.Close()
			for range 2 {
				require.NoError(t, o.SetGradients(s))
				_, err = grads.Powers(s, 2)
				require.NoError(t, err)
				norm, factor, err := grads.Coef(s, 1)
				require.NoError(t, err)
				got := make([]float32, 2)
				require.NoError(t, norm.CopyTo(s, got[:1]))
				require.NoError(t, factor.CopyTo(s, got[1:]))
				require.Equal(t, []float32{0, 1}, got)
				require.NoError(t, o.Step(s, &optim.StepConfig{Clip: factor}))
			}
			require.NoError(t, o.RefreshCopies(s))
			require.Empty(t, o.State())
			require.Empty(t, o.Gradients())
			require.NoError(t, o.LoadState(s, nil))
			require.NoError(t, o.SetLR(s, 0, 0.5))
		})
	}
}

func TestErrors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, other := newStream(t, devs[0]), newStream(t, devs[1])
	r := seeded(t)
	x, _ := random(t, s, r, memory.Float32, 8)
	g, _ := random(t, s, r, memory.Float32, 8)
	short, _ := random(t, s, r, memory.Float32, 7)
	half, _ := random(t, s, r, memory.Float16, 8)
	far, _ := random(t, other, r, memory.Float32, 8)
	whole, err := tensor.Make(s, memory.Int32, 8)
	require.NoError(t, err)
	defer whole.Close()
	gaps, err := g.Step(0, 0, 8, 2)
	require.NoError(t, err)
	four := narrow(t, x, 0, 4)
	for want, p := range map[string]optim.Param{
		"value: there is no tensor":             {Grad: g},
		"8 elements with a gradient of 7":       {Value: x, Grad: short},
		"float16 with a gradient of float32":    {Value: half, Grad: g},
		"the buffer is of virtual:1":            {Value: x, Grad: far},
		"want float16, bfloat16, float32":       {Value: whole, Grad: whole},
		"has gaps between its elements":         {Value: four, Grad: gaps},
		"a copy of 7 float32 elements beside 8": {Value: x, Grad: g, Copy: short},
		"parameter 1 of group 0 occurs twice":   {Value: x, Grad: x},
	} {
		list := []optim.Param{p}
		if p.Grad.Ptr() == x.Ptr() && p.Value.Ptr() == x.Ptr() {
			list = []optim.Param{{Value: x, Grad: g}, p}
		}
		_, err := optim.NewAdamW(s, []optim.Group{{Params: list}}, nil)
		require.ErrorContains(t, err, want)
	}
	ok := []optim.Group{{Params: []optim.Param{{Value: x, Grad: g}}}}
	for want, cfg := range map[string]*optim.AdamConfig{
		"betas [1 0.9]":     {Betas: [2]float64{1, 0.9}},
		"learning rate -1":  {LR: -1},
		"learning rate NaN": {LR: math.NaN()},
		"weight decay -0.5": {WeightDecay: new(-0.5)},
		"eps -1":            {Eps: -1},
	} {
		_, err := optim.NewAdam(s, ok, cfg)
		require.ErrorContains(t, err, want)
	}
	_, err = optim.NewSGD(s, ok, &optim.SGDConfig{Nesterov: true})
	require.ErrorContains(t, err, "want momentum above 0")
	_, err = optim.NewSGD(s, nil, nil)
	require.ErrorContains(t, err, "no groups given")
	_, err = optim.NewSGD(nil, ok, nil)
	require.ErrorContains(t, err, "no stream")

	o, err := optim.NewSGD(s, ok, nil)
	require.NoError(t, err)
	require.ErrorContains(t, o.Step(other, nil), "a stream on virtual:1")
	two, err := memory.MakeFrom(s, []float32{1, 2})
	require.NoError(t, err)
	defer two.Close()
	require.ErrorContains(t, o.Step(s, &optim.StepConfig{Clip: two}), "a device number of 2 elements")
	require.ErrorContains(t, o.SetLR(s, 1, 0.1), "a group below 1")
	require.ErrorContains(t, o.SetStep(s, 0, -1), "0 or more")
	require.NoError(t, o.Close())
	require.NoError(t, o.Close())
	require.ErrorIs(t, o.Step(s, nil), device.ErrClosed)
	require.NoError(t, (*optim.Optimizer)(nil).Close())

	grads, err := optim.NewGrads(s, g)
	require.NoError(t, err)
	_, err = grads.Powers(s, -1)
	require.ErrorContains(t, err, "order -1")
	_, err = grads.ClipNorm(s, math.NaN(), 2)
	require.ErrorContains(t, err, "at most NaN")
	require.ErrorContains(t, grads.Unscale(s, two.Slice(0, 1), two), "found is 2 elements")
	require.NoError(t, grads.Close())
	require.ErrorIs(t, grads.ClipValue(s, 1), device.ErrClosed)
}

// A parameter that was closed makes the step an error, and no state changes.
func TestClosedParameter(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	v, err := memory.MakeFrom(s, []float32{1, 2})
	require.NoError(t, err)
	defer v.Close()
	g, err := memory.MakeFrom(s, []float32{1, 1})
	require.NoError(t, err)
	o, err := optim.NewAdamW(s, []optim.Group{{Params: []optim.Param{optim.Of(v, g)}}}, nil)
	require.NoError(t, err)
	defer o.Close()
	require.NoError(t, g.Close())
	require.ErrorIs(t, o.Step(s, nil), device.ErrClosed)
	n := make([]float32, 1)
	require.NoError(t, o.State()[0].Step.CopyTo(s, n))
	require.Zero(t, n[0])
}

// On a GPU a step allocates nothing on the host. (Virtual devices allocate for each launch.)
func TestStepAllocatesNothing(t *testing.T) {
	s := newStream(t, testgpu.CUDA(t, 1)[0])
	v, err := memory.MakeFrom(s, []float32{1, 2})
	require.NoError(t, err)
	defer v.Close()
	g, err := memory.MakeFrom(s, []float32{3, 4})
	require.NoError(t, err)
	defer g.Close()
	o, err := optim.NewAdamW(s, []optim.Group{{Params: []optim.Param{optim.Of(v, g)}}}, nil)
	require.NoError(t, err)
	defer o.Close()
	require.NoError(t, o.Step(s, nil))
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = o.Step(s, nil) }))
}

// The constructor sets the copies, and Of's errors name the slice.
func TestCopiesOfNewParameters(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		value, err := memory.MakeFrom(s, []float32{1, -2.5, 1e-3, 65504})
		require.NoError(t, err)
		defer value.Close()
		grad, err := memory.Make[float32](s, 4)
		require.NoError(t, err)
		low, err := tensor.Make(s, memory.Float16, 2, 2)
		require.NoError(t, err)
		defer low.Close()
		p := optim.Of(value, grad)
		p.Copy = low
		o, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{p}}}, nil)
		require.NoError(t, err)
		defer o.Close()
		got := make([]memory.Float16Bits, 4)
		bits, err := tensor.Slice[memory.Float16Bits](low)
		require.NoError(t, err)
		require.NoError(t, bits.CopyTo(s, got))
		require.Equal(t, []memory.Float16Bits{0x3c00, 0xc100, 0x1419, 0x7bff}, got)
		require.NoError(t, value.CopyFrom(s, []float32{-2.5, 1, 0, 65504}))
		require.NoError(t, o.RefreshCopies(s))
		require.NoError(t, bits.CopyTo(s, got))
		require.Equal(t, []memory.Float16Bits{0xc100, 0x3c00, 0, 0x7bff}, got)
		require.NoError(t, grad.Close())
		_, err = optim.NewSGD(s, []optim.Group{{Params: []optim.Param{optim.Of(value, grad)}}}, nil)
		require.ErrorIs(t, err, device.ErrClosed)
	})
}
