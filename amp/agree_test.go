package amp_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
)

// An infinity on one rank makes all ranks skip the step, for each type of gradients.
func TestAgreeOnEachType(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		one, inf := float32(1), float32(math.Inf(1))
		for _, unscale := range []bool{false, true} {
			agreeOn(t, devs, unscale, one, inf)
			agreeOn(t, devs, unscale, memory.BFloat16Of(one), memory.BFloat16Of(inf))
		}
		agreeOn(t, devs, false, memory.Float16Of(one), memory.Float16Of(inf))
	})
}

func agreeOn[T memory.Element](t *testing.T, devs []*device.Device, unscale bool, one, inf T) {
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer g.Close()
	scs, opts, values := make([]*amp.Scaler, 2), make([]*optim.Optimizer, 2), make([]memory.Slice[T], 2)
	for i, grad := range []T{one, inf} {
		s := g.Stream(i)
		values[i], err = memory.MakeFrom(s, []T{one})
		require.NoError(t, err)
		defer values[i].Close()
		grads, err := memory.MakeFrom(s, []T{grad})
		require.NoError(t, err)
		defer grads.Close()
		opts[i], err = optim.NewSGD(s, []optim.Group{{Params: []optim.Param{optim.Of(values[i], grads)}}}, nil)
		require.NoError(t, err)
		defer opts[i].Close()
		scs[i], err = amp.NewScaler(s, &amp.ScalerConfig{InitScale: 2})
		require.NoError(t, err)
		defer scs[i].Close()
	}
	require.ErrorContains(t, amp.Agree(g, scs...), "call Unscale or Check before")
	for i, sc := range scs {
		if unscale {
			require.NoError(t, sc.Unscale(g.Stream(i), opts[i]))
		} else {
			require.NoError(t, sc.Check(g.Stream(i), opts[i]))
			require.ErrorContains(t, sc.Check(g.Stream(i), opts[i]), "were checked")
		}
	}
	require.NoError(t, amp.Agree(g, scs...))
	for i, sc := range scs {
		require.NoError(t, sc.Step(g.Stream(i), opts[i], nil))
		require.NoError(t, sc.Update(g.Stream(i)))
		got := []T{inf}
		require.NoError(t, values[i].CopyTo(g.Stream(i), got))
		require.Equal(t, []T{one}, got)
		state, err := sc.State(g.Stream(i))
		require.NoError(t, err)
		require.EqualValues(t, 1, state.Scale)
	}
}

// Agree has nothing of an optimiser that was not checked before it.
func TestStepOfWhatWasNotAgreed(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer g.Close()
	a, b := benchOn(t, g.Stream(0), 1), benchOn(t, g.Stream(0), 1)
	sc := a.scaler(t, nil)
	require.NoError(t, sc.Check(a.s, a.opt))
	require.NoError(t, amp.Agree(g, sc))
	require.ErrorContains(t, sc.Step(b.s, b.opt, nil), "not checked before Agree")
	require.NoError(t, sc.Step(a.s, a.opt, nil))
	require.NoError(t, sc.Update(a.s))
	require.NoError(t, sc.Step(b.s, b.opt, nil))
}
