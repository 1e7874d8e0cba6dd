package optim_test

import (
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

// Gradients in other memory in each step have the results of gradients that stay, for more parameters
// than one launch has addresses. So do those of a graph, between two steps without it.
func TestSetGradients(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), seeded(t)
		const params, steps = 300, 4
		type set struct {
			opt    *optim.Optimizer
			grads  *optim.Grads
			values []tensor.Tensor
		}
		var moved, fixed set
		var first, list, stay []optim.Param
		gradients := make([][]tensor.Tensor, steps)
		for i := range params {
			x, _ := random(t, s, r, memory.Float32, 1+i%7)
			y := upload(t, s, read(t, s, x))
			g, _ := random(t, s, r, memory.Float32, 1+i%7)
			first = append(first, optim.Param{Value: x})
			stay = append(stay, optim.Param{Value: y, Grad: g})
			moved.values, fixed.values = append(moved.values, x), append(fixed.values, y)
			for k := range gradients {
				g, _ := random(t, s, r, memory.Float32, 1+i%7)
				gradients[k] = append(gradients[k], g)
			}
		}
		list, first = first[100:], first[:100]
		for _, x := range []struct {
			to     *set
			groups []optim.Group
		}{{&moved, []optim.Group{{Params: first}, {Params: list, LR: 0.01}}}, {&fixed, []optim.Group{{Params: stay[:100]}, {Params: stay[100:], LR: 0.01}}}} {
			var err error
			x.to.opt, err = optim.NewAdamW(s, x.groups, nil)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, x.to.opt.Close()) })
			x.to.grads, err = x.to.opt.Grads(s)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, x.to.grads.Close()) })
		}
		require.ErrorContains(t, moved.opt.Step(s, nil), "parameter 0: it has no gradient: call SetGradients before")
		_, err := moved.grads.Powers(s, 2)
		require.ErrorContains(t, err, "gradient 0: its parameter has none yet: call SetGradients before")
		step := func(x *set) error {
			if _, err := x.grads.Powers(s, 2); err != nil {
				return err
			}
			_, clip, err := x.grads.Coef(s, 1)
			if err != nil {
				return err
			}
			return x.opt.Step(s, &optim.StepConfig{Clip: clip})
		}
		other := func(k int) func() error {
			return func() error {
				if err := moved.opt.SetGradients(s, gradients[k]...); err != nil {
					return err
				}
				return step(&moved)
			}
		}
		reference := func(k int) {
			for i := range params {
				require.NoError(t, tensor.Copy(s, stay[i].Grad, gradients[k][i]))
			}
			require.NoError(t, step(&fixed))
			for i := range params {
				require.Equal(t, read(t, s, fixed.values[i]), read(t, s, moved.values[i]), "gradients %d, parameter %d", k, i)
			}
		}
		require.NoError(t, other(0)())
		reference(0)
		exec, err := graph.Capture([]*stream.Stream{s}, other(1), nil)
		require.NoError(t, err)
		defer exec.Close()
		require.NoError(t, other(2)())
		reference(2)
		require.NoError(t, exec.Launch(s))
		reference(1)
		require.NoError(t, other(3)())
		reference(3)
	})
}

func TestSetGradientsErrors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, r := newStream(t, devs[0]), seeded(t)
	x, _ := random(t, s, r, memory.Float32, 8)
	y, _ := random(t, s, r, memory.Float32, 8)
	half, _ := random(t, s, r, memory.BFloat16, 8)
	g, _ := random(t, s, r, memory.BFloat16, 8)
	far, _ := random(t, newStream(t, devs[1]), r, memory.Float32, 8)
	o, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{{Value: narrow(t, x, 0, 4)}, {Value: y, Grad: half}}}}, nil)
	require.NoError(t, err)
	grads, err := o.Grads(s)
	require.NoError(t, err)
	closed, err := tensor.Make(s, memory.BFloat16, 8)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for want, list := range map[string][]tensor.Tensor{
		"1 gradients for 2 parameters: want one for each":             {g},
		"gradient 0: there is no tensor":                              {{}, half},
		"the buffer is of virtual:1":                                  {narrow(t, x, 4, 8), far},
		"gradient 0 has 8 elements of float32: want 4 of float32":     {y, half},
		"gradient 0 has 4 elements of bfloat16: want 4 of float32":    {narrow(t, g, 0, 4), half},
		"gradient 1 has 8 elements of float32: want 8 of bfloat16":    {narrow(t, x, 4, 8), x},
		"the value of parameter 0 and a new gradient share memory":    {narrow(t, x, 2, 6), half},
		"gradient 1: optim: 8 elements on virtual:0: use after Close": {narrow(t, x, 4, 8), closed},
	} {
		require.ErrorContains(t, o.SetGradients(s, list...), want)
	}
	require.ErrorContains(t, o.Step(s, nil), "parameter 0: it has no gradient", "an error changes nothing")
	require.NoError(t, o.SetGradients(s, narrow(t, x, 4, 8), g))
	require.NoError(t, o.Step(s, nil))
	require.NoError(t, grads.Close())
	require.NoError(t, o.SetGradients(s, narrow(t, x, 4, 8), half), "the closed Grads do not follow")
	require.NoError(t, o.Close())
	require.ErrorIs(t, o.SetGradients(s, x, half), device.ErrClosed)
	_, err = o.Grads(s)
	require.ErrorIs(t, err, device.ErrClosed)
}
