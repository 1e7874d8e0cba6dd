package comm_test

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// Calls that wait for operations, or use their results, come before the operations of a
// batch that is open, and leave the batch as it is.
func TestCallsBesideABatch(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g := local(t, devs)
		xs, hs := shards(t, g, 8)
		zs, _ := shards(t, g, 8)
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
			"wait for work":   func() error { return w.Wait(ctx) },
			"split": func() error {
				parts, err := g.Split(ctx, []int{0, 0}, nil)
				for _, part := range parts {
					err = errors.Join(err, part.Close())
				}
				return err
			},
			"sub":        func() error { sub, err := g.Sub(ctx, 0); return errors.Join(err, sub.Close()) },
			"all-reduce": func() error { return comm.AllReduce(g, comm.Sum, zs...) },
			"reduce-add": func() error {
				sum, err := comm.ReduceAdd(g, []tensor.Tensor{x, y}, nil)
				return errors.Join(err, sum.Close())
			},
			"gather": func() error {
				all, err := comm.Gather(g, []tensor.Tensor{x, y}, nil)
				return errors.Join(err, all.Close())
			},
		} {
			for i := range xs {
				require.NoError(t, xs[i].CopyFrom(g.Stream(i), hs[i]))
			}
			require.NoError(t, g.Batch(func(b *comm.Batch) error {
				require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
				require.NoError(t, call(), name)
				return nil
			}), name)
			require.NoError(t, g.Wait(ctx), name)
			require.Equal(t, total(hs), read(t, g, 1, xs[1]), name)
		}
		require.ErrorIs(t, g.Batch(func(b *comm.Batch) error {
			return errors.Join(comm.AllReduce(b, comm.Sum, xs...), g.Shutdown(ctx))
		}), device.ErrClosed)
	})
}

// A Batch may be used again, and one whose function has returned may not. An operation that
// is refused makes the batch fail, even if the caller forgets the error.
func TestBatch(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, hs := shards(t, g, 8)
		ys, _ := shards(t, g, 8*g.Size())
		zs, _ := shards(t, g, 8)
		unchanged := func() {
			for i := range xs {
				require.Equal(t, hs[i], read(t, g, i, xs[i]))
			}
		}
		b := g.NewBatch()
		for range 2 {
			require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
			require.ErrorIs(t, comm.AllReduce(b, comm.Sum, xs[0]), comm.ErrMismatch)
			require.ErrorIs(t, b.Enqueue(), comm.ErrMismatch)
			unchanged()
		}
		require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
		b.Reset()
		require.NoError(t, b.Enqueue())
		boom := errors.New("boom")
		require.ErrorIs(t, g.Batch(func(b *comm.Batch) error { return errors.Join(comm.AllReduce(b, comm.Sum, xs...), boom) }), boom)
		require.Panics(t, func() {
			_ = g.Batch(func(b *comm.Batch) error {
				_ = comm.AllReduce(b, comm.Sum, xs...)
				panic(boom)
			})
		})
		unchanged()
		var kept *comm.Batch
		require.NoError(t, g.Batch(func(b *comm.Batch) error { kept = b; return nil }))
		require.ErrorContains(t, comm.AllReduce(kept, comm.Sum, xs...), "the function of the batch has returned")
		require.ErrorIs(t, g.Batch(nil), comm.ErrMismatch)
		var none *comm.Batch
		require.ErrorContains(t, comm.AllReduce(none, comm.Sum, xs...), "no group given")
		require.ErrorIs(t, none.Enqueue(), comm.ErrMismatch)
		for range 3 {
			require.NoError(t, errors.Join(comm.AllGather(b, ys, xs), comm.SendRecv(b, 0, zs[0], 0, zs[0]), b.Enqueue()))
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
		require.Equal(t, slices.Concat(hs...), read(t, g, 1, ys[1]))
	})
}

// Groups and batches allocate nothing beside the virtual NCCL, which a batch of package nccl
// calls in the same way.
func TestBatchesDoNotAllocate(t *testing.T) {
	if testhost.On {
		t.Skip("with the race detector a sync.Pool drops some of its objects")
	}
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	xs, _ := shards(t, g, 8)
	to, from := xs[0].Slice(0, 4), xs[0].Slice(4, 8)
	c, s := g.Communicator(0), g.Stream(0)
	plain, b := nccl.NewBatch(), g.NewBatch()
	exchange := func() error {
		return errors.Join(nccl.Send(plain.On(c), s, to, 0), nccl.Recv(plain.On(c), s, from, 0), plain.Enqueue())
	}
	reduce := func() error {
		for i, x := range xs {
			if err := nccl.AllReduce(plain.On(g.Communicator(i)), g.Stream(i), x, x, nccl.Max); err != nil {
				return err
			}
		}
		return plain.Enqueue()
	}
	fill := func(b *comm.Batch) error { return errors.Join(comm.Send(b, 0, to), comm.Recv(b, 0, from)) }
	count := func(issue func() error) float64 {
		require.NoError(t, issue())
		require.NoError(t, g.Wait(testgpu.Context(t)))
		return testing.AllocsPerRun(100, func() { require.NoError(t, issue()) })
	}
	for name, c := range map[string]struct{ by, plain func() error }{
		"all-reduce": {func() error { return comm.AllReduce(g, comm.Max, xs...) }, reduce},
		"exchange":   {func() error { return comm.SendRecv(g, 0, to, 0, from) }, exchange},
		"function":   {func() error { return g.Batch(fill) }, exchange},
		"batch":      {func() error { return errors.Join(fill(b), b.Enqueue()) }, exchange},
	} {
		more := math.Inf(1)
		for range 10 { // the streams' goroutines allocate too, sooner or later
			more = min(more, count(c.by)-count(c.plain))
		}
		require.LessOrEqual(t, more, 0.0, name)
	}
}
