package comm_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// Within a group of NCCL, of which nothing is enqueued yet, nothing waits for operations
// or uses their results; the group goes on.
func TestNCCLGroupRefusesToWait(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g := local(t, devs)
		xs, hs := shards(t, g, 8)
		grads, _ := shards(t, g, 4)
		r, err := comm.NewReducer(g, nil, []memory.Slice[float32]{grads[0]}, []memory.Slice[float32]{grads[1]})
		require.NoError(t, err)
		defer r.Close()
		sh, err := comm.NewSharder[float32](g, nil, 5)
		require.NoError(t, err)
		defer sh.Close()
		x, err := tensor.Make(g.Stream(0), memory.Float32, 4)
		require.NoError(t, err)
		defer x.Close()
		y, err := tensor.Make(g.Stream(1), memory.Float32, 4)
		require.NoError(t, err)
		defer y.Close()
		w, err := comm.Start(g, func() error { return nil })
		require.NoError(t, err)
		defer w.Close()
		one := 1
		for name, call := range map[string]func() error{
			"wait":            func() error { return g.Wait(ctx) },
			"barrier":         func() error { return g.Barrier(ctx) },
			"broadcast value": func() error { return comm.BroadcastValue(ctx, g, 0, &one, nil) },
			"gather values":   func() error { _, err := comm.GatherValues(ctx, g, nil, 1, 2); return err },
			"start":           func() error { _, err := comm.Start(g, func() error { return nil }); return err },
			"wait for work":   func() error { return w.Wait(ctx) },
			"split":           func() error { _, err := g.Split(ctx, []int{0, 0}, nil); return err },
			"sub":             func() error { _, err := g.Sub(ctx, 0); return err },
			"close":           g.Close,
			"shutdown":        func() error { return g.Shutdown(ctx) },
			"broadcast":       func() error { _, err := comm.Broadcast(g, x, nil); return err },
			"coalesced":       func() error { _, err := comm.BroadcastCoalesced(g, []tensor.Tensor{x}, nil); return err },
			"reduce-add":      func() error { _, err := comm.ReduceAdd(g, []tensor.Tensor{x, y}, nil); return err },
			"scatter":         func() error { _, err := comm.Scatter(g, x, nil); return err },
			"gather":          func() error { _, err := comm.Gather(g, []tensor.Tensor{x, y}, nil); return err },
			"reducer ready":   func() error { return r.Ready(g.Stream(0), 0) },
			"reducer finish":  func() error { return r.Finish(g.Streams()...) },
			"sharder ready":   func() error { return sh.Ready(g.Stream(0), 0) },
			"sharder finish":  func() error { return sh.Finish(g.Streams()...) },
			"sharder gather":  func() error { return sh.AllGather(g.Streams()...) },
		} {
			for i := range xs {
				require.NoError(t, xs[i].CopyFrom(g.Stream(i), hs[i]))
			}
			require.NoError(t, nccl.Group(g.Communicator(0), func() error {
				require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
				var refused *nccl.GroupError
				require.ErrorAs(t, call(), &refused, name)
				return nil
			}), name)
			require.NoError(t, g.Wait(ctx), name)
			require.Equal(t, total(hs), read(t, g, 1, xs[1]), name)
		}
		// Without operations in the group, only its end may be waited for.
		require.Error(t, nccl.Group(g.Communicator(0), func() error { return g.Shutdown(ctx) }))
		require.NoError(t, g.Barrier(ctx), "the group is as it was")
	})
}
