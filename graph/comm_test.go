package graph_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A captured collective gives exact results every time, also between the same
// collective without a graph.
func TestCapturedAllReduce(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g, err := comm.Local(ctx, devs, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, g.Close()) }()
		xs, err := comm.Make[int64](g, elems)
		require.NoError(t, err)
		defer func() { require.NoError(t, xs.Close()) }()
		reduce := func() error { return comm.AllReduce(g, comm.Sum, xs...) }
		fill := func(round int) {
			for i, x := range xs {
				in := make([]int64, elems)
				for k := range in {
					in[k] = int64(round*1000 + k*(i+1))
				}
				require.NoError(t, x.CopyFrom(g.Stream(i), in))
			}
		}
		check := func(round, times int) {
			require.NoError(t, g.Wait(ctx))
			for i, x := range xs {
				out := make([]int64, elems)
				require.NoError(t, x.CopyTo(g.Stream(i), out))
				for k := range out {
					want := int64(2*round*1000 + 3*k)
					for range times - 1 {
						want *= 2
					}
					require.Equal(t, want, out[k], "round %d, rank %d, element %d", round, i, k)
				}
			}
		}
		fill(0)
		require.NoError(t, reduce(), "the ranks connect outside of the capture")
		check(0, 1)
		x, err := graph.Capture(g.Streams(), reduce, &graph.Config{Name: "sum"})
		require.NoError(t, err)
		require.Positive(t, x.Nodes())
		launch := func() {
			// The graph begins behind the launch's stream only.
			require.NoError(t, g.Stream(0).WaitStream(g.Stream(1)))
			require.NoError(t, x.Launch(g.Stream(0)))
			require.NoError(t, g.Stream(1).WaitStream(g.Stream(0)))
		}
		for round := range 100 {
			fill(round)
			launch()
			times := 1
			if round%10 == 0 {
				require.NoError(t, reduce())
				launch()
				times = 3
			}
			check(round, times)
		}
		var use *nccl.InUseError
		require.ErrorAs(t, g.Close(), &use)
		require.Equal(t, x.String(), use.Graph)
		require.ErrorContains(t, g.Close(), "graph sum of")
		require.ErrorAs(t, g.Shutdown(ctx), &use)
		fill(7)
		launch()
		check(7, 1)
		require.NoError(t, x.Close())
	})
}

// Waiting for a group is refused in a capture, as any wait is, and leaves the
// group as it was.
func TestGroupWaitIsRefused(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g, err := comm.Local(ctx, devs, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, g.Close()) }()
		_, err = graph.Capture(g.Streams(), func() error { return g.Wait(ctx) }, nil)
		var ce *device.CaptureError
		require.ErrorAs(t, err, &ce)
		require.Equal(t, "comm: wait", ce.Op)
		require.NoError(t, g.Wait(ctx))
	})
}

// Aborting a communicator closes the graphs that use it, for those of a broken
// group could only hang.
func TestAbortClosesGraphs(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		c, b, v := single(t, devs[0])
		x, err := graph.Capture([]*stream.Stream{b.s}, func() error { return nccl.AllReduce(c, b.s, v, v, nccl.Sum) }, nil)
		require.NoError(t, err)
		require.NoError(t, x.Launch(b.s))
		var use *nccl.InUseError
		require.ErrorAs(t, c.Close(), &use)
		require.NoError(t, c.Abort())
		require.ErrorIs(t, x.Launch(b.s), device.ErrClosed)
		require.NoError(t, c.Close())
		require.NoError(t, b.s.Sync(testgpu.Context(t)))
	})
}

// An abort in the middle of a capture takes place when the capture ends.
func TestAbortDuringCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		c, b, v := single(t, devs[0])
		boom := errors.New("boom")
		_, err := graph.Capture([]*stream.Stream{b.s}, func() error {
			require.NoError(t, nccl.AllReduce(c, b.s, v, v, nccl.Sum))
			require.NoError(t, c.Abort())
			return boom
		}, nil)
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, nccl.AllReduce(c, b.s, v, v, nccl.Sum), device.ErrClosed)
		usable(b, v)
	})
}

// single returns a communicator of one rank that has communicated.
func single(t *testing.T, dev *device.Device) (*nccl.Communicator, *bench, memory.Slice[float32]) {
	t.Helper()
	b := newBench(t, dev)
	v := b.make(1)
	id, err := nccl.NewUniqueID(dev)
	require.NoError(t, err)
	c, err := nccl.NewCommunicator(testgpu.Context(t), dev, id, 0, 1, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	require.NoError(t, nccl.AllReduce(c, b.s, v, v, nccl.Sum))
	require.NoError(t, b.s.Sync(testgpu.Context(t)))
	return c, b, v
}

// A graph that took over another's operations uses what they use.
func TestUpdateHoldsCommunicators(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		c, b, v := single(t, devs[0])
		d, _, _ := single(t, devs[0])
		reduce := func(c *nccl.Communicator) *graph.Exec {
			return capture(t, func() error { return nccl.AllReduce(c, b.s, v, v, nccl.Sum) }, b.s)
		}
		x, y := reduce(c), reduce(d)
		if err := x.Update(y); err != nil {
			// NCCL may make different kernels of them: then x holds nothing of y.
			require.Equal(t, "cuda", devs[0].System().Backend(), err)
			require.ErrorAs(t, err, new(*graph.UpdateError))
			require.NoError(t, y.Close())
			require.NoError(t, d.Close())
			require.NoError(t, x.Close())
			return
		}
		require.NoError(t, y.Close())
		var use *nccl.InUseError
		require.ErrorAs(t, d.Close(), &use)
		require.Equal(t, x.String(), use.Graph)
		require.NoError(t, x.Close())
		require.NoError(t, d.Close())
	})
}

// The operations of a group that is on two streams come before what follows on
// either, where there are several ranks.
func TestGroupOnTwoStreams(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		cs := communicators(t, devs)
		var main, side []*stream.Stream
		var bs []*bench
		var vs, ws []memory.Slice[float32]
		for _, dev := range devs {
			b := newBench(t, dev)
			bs, vs, ws = append(bs, b), append(vs, b.make(1)), append(ws, b.make(1))
			main, side = append(main, b.s), append(side, newStream(t, dev))
		}
		both := func() error {
			return nccl.Group(func(b *nccl.Batch) (err error) {
				for i, c := range cs {
					err = errors.Join(err, nccl.AllReduce(b.On(c), main[i], vs[i], vs[i], nccl.Sum), nccl.AllReduce(b.On(c), side[i], ws[i], ws[i], nccl.Sum))
				}
				return err
			})
		}
		require.NoError(t, both(), "the ranks connect outside of the capture")
		for i := range devs {
			require.NoError(t, errors.Join(main[i].Sync(testgpu.Context(t)), side[i].Sync(testgpu.Context(t))))
		}
		x := capture(t, func() (err error) {
			for i, b := range bs {
				err = errors.Join(err, b.launch(b.add, main[i], vs[i], 1), b.launch(b.add, side[i], ws[i], 2))
			}
			err = errors.Join(err, both())
			for i, b := range bs {
				err = errors.Join(err, b.launch(b.add, side[i], vs[i], 10), b.launch(b.add, main[i], ws[i], 20))
			}
			return err
		}, append(append([]*stream.Stream(nil), main...), side...)...)
		for range 5 {
			for i, b := range bs {
				b.fill(vs[i], 1)
				b.fill(ws[i], 2)
				require.NoError(t, main[0].WaitStream(main[i]))
			}
			require.NoError(t, x.Launch(main[0]))
			for i, b := range bs {
				require.NoError(t, main[i].WaitStream(main[0]))
				b.want(2*2+10, vs[i])
				b.want(2*4+20, ws[i])
			}
		}
	})
}

// communicators returns one communicator of all devices.
func communicators(t *testing.T, devs []*device.Device) []*nccl.Communicator {
	t.Helper()
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	cs, errs := make([]*nccl.Communicator, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, dev := range devs {
		wg.Go(func() { cs[i], errs[i] = nccl.NewCommunicator(testgpu.Context(t), dev, id, i, len(devs), nil) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() { closeTogether(t, cs) })
	return cs
}

// closeTogether closes the ranks at once: each waits for the others.
func closeTogether(t *testing.T, cs []*nccl.Communicator) {
	errs := make([]error, len(cs))
	var wg sync.WaitGroup
	for i, c := range cs {
		wg.Go(func() { errs[i] = c.Close() })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}
