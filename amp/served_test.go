package amp_test

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A scaler keeps no place for closed optimisers, and refuses calls with one.
func TestClosedOptimizers(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], 2)
	sc := b.scaler(t, &amp.ScalerConfig{InitScale: 8})
	off := b.scaler(t, &amp.ScalerConfig{Disabled: true})
	another := func() *optim.Optimizer {
		o, err := optim.NewSGD(b.s, []optim.Group{{Params: []optim.Param{optim.Of(b.value, b.grad)}}}, nil)
		require.NoError(t, err)
		return o
	}
	for range 130 {
		o := another()
		require.NoError(t, sc.Check(b.s, o))
		require.NoError(t, sc.Step(b.s, o, nil))
		require.NoError(t, sc.Update(b.s))
		require.NoError(t, o.Close())
		for _, sc := range []*amp.Scaler{sc, off} {
			for _, err := range []error{sc.Unscale(b.s, o), sc.Check(b.s, o), sc.Step(b.s, o, nil), sc.Unscale(b.s, nil)} {
				require.ErrorIs(t, err, device.ErrClosed)
				require.ErrorContains(t, err, "the optimiser")
			}
		}
	}
	for i := range 64 {
		o := another()
		defer o.Close()
		require.NoError(t, sc.Check(b.s, o), "optimiser %d of 64 open ones", i)
	}
	require.ErrorContains(t, sc.Check(b.s, b.opt), "a scaler serves at most 64")
}

// An optimiser that was closed between Step and Update still counts for the scale, and then never
// again, even while its place is free.
func TestInfinityOfAClosedOptimizer(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a := newBench(t, devs[0], 2)
		sc := a.scaler(t, &amp.ScalerConfig{InitScale: 8})
		scale := func() float64 {
			state, err := sc.State(a.s)
			require.NoError(t, err)
			return state.Scale
		}
		one, two, last := benchOn(t, a.s, 2), benchOn(t, a.s, 2), benchOn(t, a.s, 2)
		for _, b := range []*bench{one, two} {
			b.setGrads(t, func(int) float32 { return float32(math.Inf(1)) })
			require.NoError(t, sc.Step(a.s, b.opt, nil))
			require.NoError(t, b.opt.Close())
		}
		require.NoError(t, sc.Step(a.s, a.opt, nil))
		require.NoError(t, sc.Update(a.s))
		require.EqualValues(t, 4, scale())
		for range 2 {
			require.NoError(t, sc.Step(a.s, last.opt, nil))
			require.NoError(t, sc.Update(a.s))
			require.EqualValues(t, 4, scale())
		}
	})
}

// Update does not count what an earlier iteration found for an optimiser that is idle now.
func TestIdleOptimizer(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a := newBench(t, devs[0], 2)
		b := benchOn(t, a.s, 2)
		sc := a.scaler(t, &amp.ScalerConfig{InitScale: 8})
		a.setGrads(t, func(int) float32 { return float32(math.NaN()) })
		require.NoError(t, sc.Step(a.s, a.opt, nil))
		require.NoError(t, sc.Update(a.s))
		require.NoError(t, sc.Step(b.s, b.opt, nil))
		require.NoError(t, sc.Update(a.s))
		state, err := sc.State(a.s)
		require.NoError(t, err)
		require.EqualValues(t, 4, state.Scale)
	})
}

// As in torch, the scale grows if the growth tracker reaches the interval, not if it is above.
func TestTrackerAboveTheInterval(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 2)
		sc := b.scaler(t, nil)
		want := amp.State{Scale: 8, GrowthFactor: 2, BackoffFactor: 0.5, GrowthInterval: 3, GrowthTracker: 5}
		require.NoError(t, sc.LoadState(b.s, want))
		require.NoError(t, sc.Step(b.s, b.opt, nil))
		require.NoError(t, sc.Update(b.s))
		want.GrowthTracker = 6
		got, err := sc.State(b.s)
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

// Agree waits for the stream of the scaler's last operation, not for the first one.
func TestAgreeOnTheLastStream(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		defer g.Close()
		b := newBench(t, devs[0], 2)
		first, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		sc, err := amp.NewScaler(first, nil)
		require.NoError(t, err)
		defer sc.Close()
		require.NoError(t, first.Sync(testgpu.Context(t)))
		require.NoError(t, first.Close())
		require.NoError(t, sc.Check(b.s, b.opt))
		require.NoError(t, amp.Agree(g, sc))
		require.NoError(t, sc.Step(b.s, b.opt, nil))
		require.NoError(t, b.s.Sync(testgpu.Context(t))) // Close frees memory behind the work of the first stream
	})
}

// After a discarded capture the error says how to go on.
func TestDiscardedCapture(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], 2)
	sc := b.scaler(t, &amp.ScalerConfig{InitScale: 8})
	require.NoError(t, sc.Step(b.s, b.opt, nil))
	require.NoError(t, sc.Update(b.s))
	stop := errors.New("stop")
	_, err := graph.Capture([]*stream.Stream{b.s}, func() error { return errors.Join(sc.Step(b.s, b.opt, nil), stop) }, nil)
	require.Equal(t, stop.Error(), err.Error())
	for _, err := range []error{sc.Step(b.s, b.opt, nil), sc.Unscale(b.s, b.opt), sc.Check(b.s, b.opt)} {
		require.ErrorContains(t, err, "SetScale if a discarded graph capture contained the calls")
	}
	require.NoError(t, sc.SetScale(b.s, 8))
	require.NoError(t, sc.Step(b.s, b.opt, nil))
	require.NoError(t, sc.Update(b.s))
}

// Gradients with other memory in each step are unscaled and checked there.
func TestGradientsThatMove(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 4)
		sc := b.scaler(t, &amp.ScalerConfig{InitScale: 4})
		before := b.read(t, b.value)
		for step, x := range []float32{8, float32(math.Inf(1)), 4} {
			moved, err := memory.MakeFrom(b.s, []float32{x, x, x, x})
			require.NoError(t, err)
			grad, err := tensor.Of(moved, 4)
			require.NoError(t, err)
			require.NoError(t, b.opt.SetGradients(b.s, grad))
			require.NoError(t, sc.Unscale(b.s, b.opt))
			state, err := sc.State(b.s)
			require.NoError(t, err)
			require.Equal(t, x/float32(state.Scale), b.read(t, moved)[3], "step %d", step)
			require.NoError(t, sc.Step(b.s, b.opt, nil))
			require.NoError(t, sc.Update(b.s))
			require.NoError(t, moved.Close())
			after := b.read(t, b.value)
			require.Equal(t, step == 1, before[0] == after[0], "step %d: only infinite gradients are skipped", step)
			before = after
		}
	})
}
