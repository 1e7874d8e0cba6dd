package comm_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
)

// closes counts its Closes.
type closes struct{ n int }

func (c *closes) Close() error { c.n++; return nil }

// A Work is done when its operations are, and closes what it owns once.
func TestWork(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, hs := shards(t, g, 1000)
		open := streamtest.Hold(t, g.Stream(1))
		owned := &closes{}
		w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) }, owned)
		require.NoError(t, err)
		done, err := w.Done()
		require.NoError(t, err)
		require.False(t, done)
		ctx, cancel := context.WithCancel(testgpu.Context(t))
		cancel()
		require.ErrorIs(t, w.Wait(ctx), context.Canceled)
		require.Zero(t, owned.n, "the operations still run")

		s := streamtest.NewStream(t, devs[0])
		require.NoError(t, w.WaitOn(s))
		idle, err := s.Query()
		require.NoError(t, err)
		require.False(t, idle, "the stream waits")
		open()
		require.NoError(t, w.Wait(testgpu.Context(t)))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Equal(t, 1, owned.n)
		require.NoError(t, w.Close())
		require.Equal(t, 1, owned.n)
		require.Equal(t, total(hs), read(t, g, 0, xs[0]))
		done, err = w.Done()
		require.NoError(t, err)
		require.True(t, done, "what was waited for stays done")
		require.NoError(t, w.Wait(testgpu.Context(t)))
		require.NoError(t, w.WaitOn(s))

		w, err = comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) })
		require.NoError(t, err)
		require.NoError(t, w.Close())
		_, err = w.Done()
		require.ErrorIs(t, err, device.ErrClosed)
		require.ErrorIs(t, w.Wait(testgpu.Context(t)), device.ErrClosed)
		require.ErrorIs(t, w.WaitOn(s), device.ErrClosed)
	})
}

// What a Work owns goes also where there is no work.
func TestWorkThatFails(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		owned := &closes{}
		oops := errors.New("oops")
		_, err := comm.Start(g, func() error { return oops }, owned)
		require.ErrorIs(t, err, oops)
		require.Equal(t, 1, owned.n)

		open := streamtest.Hold(t, g.Stream(0))
		defer open()
		xs, _ := shards(t, g, 8)
		w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) }, owned)
		require.NoError(t, err)
		require.NoError(t, w.Close(), "the operations go on")
		require.Equal(t, 2, owned.n)
	})
}

// Nothing is owned by nil, there is no work without a function, and what is owned goes
// also when the function panics.
func TestWorkOfNothing(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	w, err := comm.Start(g, func() error { return nil }, nil)
	require.NoError(t, err)
	require.NoError(t, w.Wait(testgpu.Context(t)))

	owned := &closes{}
	_, err = comm.Start(g, nil, owned)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.Equal(t, 1, owned.n)
	require.PanicsWithValue(t, "oops", func() { _, _ = comm.Start(g, func() error { panic("oops") }, owned) })
	require.Equal(t, 2, owned.n)
}

// Any goroutine may ask for a Work and wait for it while others do.
func TestWorkOfManyGoroutines(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, _ := shards(t, g, 100)
		s := streamtest.NewStream(t, devs[0])
		for range 200 {
			w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Max, xs...) })
			require.NoError(t, err)
			calls := []func() error{
				func() error { _, err := w.Done(); return err },
				func() error { return w.WaitOn(s) },
				func() error { return w.Wait(testgpu.Context(t)) },
				func() error { return w.Wait(testgpu.Context(t)) },
			}
			for _, err := range atOnce(len(calls), func(i int) error { return calls[i]() }) {
				if err != nil { // it came when another one had waited
					require.ErrorIs(t, err, device.ErrClosed)
				}
			}
		}
		require.NoError(t, s.Sync(testgpu.Context(t)))
	})
}
