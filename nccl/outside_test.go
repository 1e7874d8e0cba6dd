package nccl_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// Calls that wait for operations wait for those that are enqueued: a batch that is open
// keeps none of them back, and goes on.
func TestWaitsBesideABatch(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		r, other := connect(t, devs)[0], connect(t, devs)[0]
		xs, in := buffers(t, []rank{r}, 8)
		for name, call := range map[string]func() error{
			"wait": func() error { return r.c.Wait(ctx, r.s) },
			"split": func() error {
				c, err := r.c.Split(ctx, 0, 0, nil)
				return errors.Join(err, c.Close())
			},
			"group": func() error { return reduceAll([]rank{r}, xs, nccl.Sum) },
		} {
			require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
				require.NoError(t, nccl.AllReduce(b.On(r.c), r.s, xs[0], xs[0], nccl.Sum))
				return call()
			}), name)
		}
		require.NoError(t, r.c.Wait(ctx, r.s))
		for name, end := range map[string]func(*nccl.Communicator) error{
			"close": (*nccl.Communicator).Close, "shutdown": func(c *nccl.Communicator) error { return c.Shutdown(ctx) },
		} {
			third := connect(t, devs)[0]
			require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error {
				err := errors.Join(nccl.AllReduce(b.On(third.c), r.s, xs[0], xs[0], nccl.Sum), nccl.AllReduce(b.On(r.c), r.s, xs[0], xs[0], nccl.Sum))
				return errors.Join(err, end(third.c))
			}), device.ErrClosed, name)
		}
		require.NoError(t, nccl.Group(func(*nccl.Batch) error { return other.c.Close() }), "it has no operations in the batch")
		require.Equal(t, in[0], read(t, r.s, xs[0]))
	})
}

// A Batch may be used again, and one whose function has returned may not.
func TestBatchIsUsedAgain(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 8)
		b := nccl.NewBatch()
		require.NoError(t, b.Enqueue(), "an empty one")
		ends := []nccl.Issuer{b.On(ranks[0].c), b.On(ranks[1].c)}
		issue := func(short int) (err error) {
			for i, r := range ranks {
				err = errors.Join(err, nccl.AllReduce(ends[i], r.s, xs[i].Slice(short, 8), xs[i], nccl.Max))
			}
			return err
		}
		require.Error(t, issue(1))
		require.ErrorContains(t, b.Enqueue(), "rank 0 of 2", "though the caller forgot the error")
		require.Equal(t, in, contents(t, ranks, xs))
		for range 3 {
			require.NoError(t, errors.Join(issue(0), b.Enqueue()))
		}
		require.NoError(t, b.Enqueue(), "it was emptied")
		require.EqualValues(t, 3, ranks[0].c.Progress().Issued.Collective)
		var kept *nccl.Batch
		var end nccl.Issuer
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error { kept, end = b, b.On(ranks[0].c); return nil }))
		x := xs[0]
		require.ErrorContains(t, nccl.AllReduce(end, ranks[0].s, x, x, nccl.Max), "no communicator given")
		require.ErrorContains(t, nccl.AllReduce(kept.On(ranks[0].c), ranks[0].s, x, x, nccl.Max), "the function of the batch has returned")
	})
}

// A buffer or a stream that was closed after the operation was issued keeps the whole
// group from NCCL.
func TestGroupOfWhatWasClosed(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 8)
		for _, what := range []string{"destination", "source", "stream"} {
			y, s := room[int64](t, ranks[1].s, 8), streamtest.NewStream(t, devs[1])
			dst, src, close := xs[1], xs[1], s.Close
			switch what {
			case "destination":
				dst, close = y, y.Close
			case "source":
				src, close = y, y.Close
			}
			require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error {
				require.NoError(t, nccl.AllReduce(b.On(ranks[0].c), ranks[0].s, xs[0], xs[0], nccl.Sum))
				require.NoError(t, nccl.AllReduce(b.On(ranks[1].c), s, dst, src, nccl.Sum))
				return close()
			}), device.ErrClosed, what)
			require.Equal(t, in[0], read(t, ranks[0].s, xs[0]), what)
		}
		require.NoError(t, reduceAll(ranks, xs, nccl.Sum), "nothing was left of the groups")
	})
}

// A capture that begins or ends within a group would miss its operations, or have
// others.
func TestGroupOfHalfACapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := connect(t, devs)[0]
		xs, in := buffers(t, []rank{r}, 8)
		double := func(b *nccl.Batch) error { return nccl.AllReduce(b.On(r.c), r.s, xs[0], xs[0], nccl.Sum) }

		var exec *graph.Exec
		err := nccl.Group(func(b *nccl.Batch) (err error) {
			exec, err = graph.Capture([]*stream.Stream{r.s}, func() error { return double(b) }, nil)
			return err
		})
		require.ErrorContains(t, err, "a capture of")
		require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
		require.NoError(t, exec.Close())

		// But a capture may have a whole group.
		exec, err = graph.Capture([]*stream.Stream{r.s}, func() error {
			return nccl.Group(double)
		}, nil)
		require.NoError(t, err)
		require.NoError(t, exec.Close())
		require.Equal(t, in[0], read(t, r.s, xs[0]))
	})
}
