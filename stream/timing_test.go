package stream_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/stream"
)

// Events around a spin of known length measure it: within 1 % on CUDA, where
// both are clocks of the GPU, and never less on virtual devices, whose streams
// may come late.
func TestElapsedOfSpin(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, p := newStream(t, devs[0]), streamtest.NewSpinner(t, devs[0])
		p.On(s, 0) // the first launch loads the kernel
		start, end := timedEvent(t, devs[0]), timedEvent(t, devs[0])
		for _, want := range []time.Duration{20 * time.Millisecond, 100 * time.Millisecond} {
			require.NoError(t, start.Record(s))
			p.On(s, want)
			require.NoError(t, end.Record(s))
			require.NoError(t, end.Sync(testgpu.Context(t)))
			took, err := end.Elapsed(start)
			require.NoError(t, err)
			t.Logf("a spin of %v took %v", want, took)
			if devs[0].System().Backend() == "cuda" {
				require.Less(t, math.Abs(float64(took-want)), 0.01*float64(want))
			} else {
				require.GreaterOrEqual(t, took, want)
			}
		}
	})
}

// Elapsed tells which of its conditions does not hold, in torch's order, and
// the events go on.
func TestElapsedConditions(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		plain, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		defer plain.Close()
		a, b := timedEvent(t, devs[0]), timedEvent(t, devs[0])
		want := func(start, end *stream.Event, text string, status device.Status) {
			t.Helper()
			_, err := end.Elapsed(start)
			require.ErrorContains(t, err, text)
			require.ErrorIs(t, err, status)
		}
		want(a, plain, "must be made with EventConfig.Timing", device.ErrorInvalidHandle)
		want(plain, a, "must be made with EventConfig.Timing", device.ErrorInvalidHandle)
		want(a, b, "must be recorded before", device.ErrorInvalidHandle)
		require.NoError(t, a.Record(s))
		want(a, b, "must be recorded before", device.ErrorInvalidHandle)
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		require.NoError(t, b.Record(s))
		require.NoError(t, a.Sync(testgpu.Context(t)))
		want(b, a, "must be completed before: call Sync", device.ErrorNotReady)
		want(a, b, "must be completed before: call Sync", device.ErrorNotReady)
		close(gate)
		require.NoError(t, b.Sync(testgpu.Context(t)))
		took, err := b.Elapsed(a)
		require.NoError(t, err)
		require.Positive(t, took)
		_, err = b.Elapsed(nil)
		require.ErrorContains(t, err, "no event given")
	})
}

// An event is of use with each of its options.
func TestEventOptions(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		for _, cfg := range []*stream.EventConfig{nil, {Blocking: true}, {Blocking: true, Timing: true}, {Interprocess: true}, {Interprocess: true, Blocking: true}} {
			e, err := s.Record(cfg)
			require.NoError(t, err)
			require.NoError(t, e.Sync(t.Context()))
			require.NoError(t, e.Sync(background))
			require.True(t, passed(t, e))
			require.NoError(t, e.Close())
		}
		_, err := stream.NewEvent(devs[0], &stream.EventConfig{Interprocess: true, Timing: true})
		require.ErrorIs(t, err, device.ErrorInvalidValue)
		require.ErrorContains(t, err, "leave out Timing or Interprocess")
		_, err = stream.NewEvent(nil, nil)
		require.ErrorContains(t, err, "no device given")
		_, err = (*stream.Stream)(nil).Record(nil)
		require.ErrorContains(t, err, "no stream given")
	})
}
