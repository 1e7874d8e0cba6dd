package optim_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
)

func TestOptionsAreFinite(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	x, _ := random(t, s, seeded(t), memory.Float32, 2)
	y, _ := random(t, s, seeded(t), memory.Float32, 2)
	groups := []optim.Group{{Params: []optim.Param{{Value: x, Grad: y}}}}
	inf := math.Inf(1)
	for want, cfg := range map[string]*optim.AdamConfig{"weight decay +Inf": {WeightDecay: &inf}, "eps +Inf": {Eps: inf}} {
		_, err := optim.NewAdamW(s, groups, cfg)
		require.ErrorContains(t, err, want)
	}
	for want, cfg := range map[string]*optim.SGDConfig{
		"weight decay +Inf": {WeightDecay: inf},
		"momentum +Inf":     {Momentum: inf},
		"dampening NaN":     {Momentum: 0.9, Dampening: math.NaN()},
		"dampening -Inf":    {Momentum: 0.9, Dampening: math.Inf(-1)},
	} {
		_, err := optim.NewSGD(s, groups, cfg)
		require.ErrorContains(t, err, want)
	}
}
