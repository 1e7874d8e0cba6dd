package nccl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// What waits for operations is refused where they are not enqueued yet, and the group
// goes on.
func TestGroupRefusesToWait(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		r, other := connect(t, devs)[0], connect(t, devs)[0]
		xs, _ := buffers(t, []rank{r}, 8)
		for name, call := range map[string]func() error{
			"wait":     func() error { return r.c.Wait(ctx, r.s) },
			"split":    func() error { _, err := r.c.Split(ctx, 0, 0, nil); return err },
			"shrink":   func() error { _, err := r.c.Shrink(ctx, nccl.ShrinkDefault, nil, nil); return err },
			"grow":     func() error { _, err := r.c.Grow(ctx, 2, nil, nil); return err },
			"window":   func() error { _, err := r.c.RegisterWindow(ctx, xs[0].Buffer(), 64, false); return err },
			"close":    r.c.Close,
			"shutdown": func() error { return r.c.Shutdown(ctx) },
		} {
			require.NoError(t, nccl.Group(other.c, func() error {
				require.NoError(t, nccl.AllReduce(r.c, r.s, xs[0], xs[0], nccl.Sum))
				var refused *nccl.GroupError
				err := call()
				require.ErrorAs(t, err, &refused, name)
				require.ErrorIs(t, err, nccl.ErrorInvalidUsage, name)
				return nil
			}), name)
		}
		require.NoError(t, r.c.Wait(ctx, r.s))
		require.NoError(t, nccl.Group(r.c, other.c.Close), "it has no operations in the group")
	})
}

// A buffer or a stream that was closed after the operation was issued keeps the whole
// group from NCCL.
func TestGroupOfWhatWasClosed(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 8)
		for _, what := range []string{"destination", "source", "stream"} {
			y, err := memory.Make[int64](ranks[1].s, 8)
			require.NoError(t, err)
			defer y.Close()
			s, err := stream.New(devs[1], nil)
			require.NoError(t, err)
			defer s.Close()
			dst, src, close := xs[1], xs[1], s.Close
			switch what {
			case "destination":
				dst, close = y, y.Close
			case "source":
				src, close = y, y.Close
			}
			require.ErrorIs(t, nccl.Group(ranks[0].c, func() error {
				require.NoError(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum))
				require.NoError(t, nccl.AllReduce(ranks[1].c, s, dst, src, nccl.Sum))
				return close()
			}), device.ErrClosed, what)
			got := make([]int64, 8)
			require.NoError(t, xs[0].CopyTo(ranks[0].s, got))
			require.Equal(t, in[0], got, what)
		}
		require.NoError(t, nccl.Group(ranks[0].c, func() error {
			for i, r := range ranks {
				if err := nccl.AllReduce(r.c, r.s, xs[i], xs[i], nccl.Sum); err != nil {
					return err
				}
			}
			return nil
		}), "nothing was left of the groups")
	})
}

// A capture that begins or ends within a group would miss its operations, or have
// others.
func TestGroupOfHalfACapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := connect(t, devs)[0]
		xs, in := buffers(t, []rank{r}, 8)
		double := func() error { return nccl.AllReduce(r.c, r.s, xs[0], xs[0], nccl.Sum) }

		var exec *graph.Exec
		err := nccl.Group(r.c, func() (err error) {
			exec, err = graph.Capture([]*stream.Stream{r.s}, double)
			return err
		})
		require.ErrorContains(t, err, "a capture of")
		require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
		require.NoError(t, exec.Close())

		// But a capture may have a whole group.
		exec, err = graph.Capture([]*stream.Stream{r.s}, func() error {
			return nccl.Group(r.c, double)
		})
		require.NoError(t, err)
		require.NoError(t, exec.Close())
		got := make([]int64, 8)
		require.NoError(t, xs[0].CopyTo(r.s, got))
		require.Equal(t, in[0], got)
	})
}
