package optim_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/tensor"
)

// A program may change its list after NewGrads, and close tensors that it put there.
func TestGradsKeepTheirList(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		r := seeded(t)
		a, _ := random(t, s, r, memory.Float32, 2)
		b, _ := random(t, s, r, memory.Float32, 2)
		list := []tensor.Tensor{a}
		g, err := optim.NewGrads(s, list...)
		require.NoError(t, err)
		defer g.Close()
		list[0] = b
		_, err = g.ClipNorm(s, 1, 2)
		require.NoError(t, err)
		require.NoError(t, a.Close())
		_, err = g.ClipNorm(s, 1, 2)
		require.ErrorIs(t, err, device.ErrClosed)
	})
}

func TestGradsShareNoMemory(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	x, _ := random(t, s, seeded(t), memory.Float32, 6)
	_, err := optim.NewGrads(s, x, x)
	require.ErrorContains(t, err, "gradient 0 and gradient 1 share memory")
	_, err = optim.NewGrads(s, narrow(t, x, 2, 6), narrow(t, x, 0, 3))
	require.ErrorContains(t, err, "gradient 1 and gradient 0 share memory")
	g, err := optim.NewGrads(s, narrow(t, x, 3, 6), narrow(t, x, 0, 3))
	require.NoError(t, err)
	require.NoError(t, g.Close())
}

func TestValuesShareNoMemory(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	x, _ := random(t, s, seeded(t), memory.Float32, 6)
	y, _ := random(t, s, seeded(t), memory.Float32, 6)
	params := []optim.Param{{Value: narrow(t, x, 0, 4), Grad: narrow(t, y, 0, 4)}, {Value: narrow(t, x, 2, 6), Grad: narrow(t, y, 2, 6)}}
	_, err := optim.NewAdamW(s, []optim.Group{{Params: params}}, nil)
	require.ErrorContains(t, err, "the value of parameter 0 and the value of parameter 1 share memory")
}

// A step writes values and copies, so gradients and other copies share no memory with them.
func TestGradientsAndCopiesAreApart(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	r := seeded(t)
	x, _ := random(t, s, r, memory.Float32, 8)
	y, _ := random(t, s, r, memory.Float32, 8)
	low, _ := random(t, s, r, memory.Float16, 8)
	inside, err := x.ViewDType(memory.Float16)
	require.NoError(t, err)
	at := func(x tensor.Tensor, from int) tensor.Tensor { return narrow(t, x, from, from+4) }
	for name, c := range map[string]struct {
		params []optim.Param
		want   string
	}{
		"same":          {[]optim.Param{{Value: x, Grad: x}}, "the value of parameter 0 and the gradient of parameter 0 share memory"},
		"behind":        {[]optim.Param{{Value: at(x, 0), Grad: at(x, 3)}}, "the value of parameter 0 and the gradient of parameter 0"},
		"before":        {[]optim.Param{{Value: at(x, 3), Grad: at(x, 0)}}, "the value of parameter 0 and the gradient of parameter 0"},
		"another's":     {[]optim.Param{{Value: at(x, 4), Grad: at(y, 0)}, {Value: at(x, 0), Grad: at(x, 4)}}, "the value of parameter 0 and the gradient of parameter 1"},
		"half":          {[]optim.Param{{Value: at(x, 0), Grad: at(inside, 4)}}, "the value of parameter 0 and the gradient of parameter 0"},
		"copy in value": {[]optim.Param{{Value: at(x, 0), Grad: at(y, 0), Copy: at(inside, 0)}}, "the value of parameter 0 and the copy of parameter 0"},
		"two copies":    {[]optim.Param{{Value: at(x, 0), Grad: at(y, 0), Copy: at(low, 0)}, {Value: at(x, 4), Grad: at(y, 4), Copy: at(low, 2)}}, "the copy of parameter 0 and the copy of parameter 1"},
		"copy is grad":  {[]optim.Param{{Value: at(x, 0), Grad: at(low, 2), Copy: at(low, 0)}}, "the copy of parameter 0 and the gradient of parameter 0"},
	} {
		_, err := optim.NewSGD(s, []optim.Group{{Params: c.params}}, nil)
		require.ErrorContains(t, err, c.want, name)
	}
	o, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{
		{Value: at(x, 0), Grad: at(y, 0), Copy: at(low, 0)}, {Value: at(x, 4), Grad: at(y, 0), Copy: at(low, 4)}}}}, nil)
	require.NoError(t, err, "neighbours, and one gradient for two values")
	require.NoError(t, o.Close())
}
