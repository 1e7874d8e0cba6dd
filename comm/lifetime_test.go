package comm_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// Memory of another stream may be closed as soon as the collective is enqueued:
// it is freed when the group's stream is past it. Virtual devices report it
// otherwise.
func TestMemoryOutlivesTheCollective(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs := make([]memory.Slice[float32], 2)
		for i, d := range devs {
			s, err := stream.New(d, nil)
			require.NoError(t, err)
			defer s.Close()
			xs[i], err = memory.Make[float32](s, 1<<18)
			require.NoError(t, err)
			require.NoError(t, xs[i].Zero(s))
			require.NoError(t, g.Stream(i).WaitStream(s))
		}
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		for _, x := range xs {
			require.NoError(t, x.Close())
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
	})
}

// The same for gradients, in place and copied, and for the reducer's buckets.
func TestGradientsOutliveTheReduction(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for _, flat := range []bool{true, false} {
			g := local(t, devs)
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			defer s.Close()
			var grads, owned []memory.Slice[float32]
			if flat {
				all, parts, err := memory.MakeFlat[float32](s, 1<<16, 1<<16)
				require.NoError(t, err)
				require.NoError(t, all.Zero(s))
				grads, owned = parts, []memory.Slice[float32]{all}
			} else {
				for range 2 {
					x, err := memory.Make[float32](s, 1<<16)
					require.NoError(t, err)
					require.NoError(t, x.Zero(s))
					owned = append(owned, x)
				}
				grads = owned
			}
			red, err := comm.NewReducer(g, nil, grads)
			require.NoError(t, err)
			require.NoError(t, red.Ready(s, 1))
			if !flat {
				// In the middle of a bucket: the copy into it is still on its way.
				half, err := comm.NewReducer(g, nil, grads)
				require.NoError(t, err)
				require.NoError(t, half.Ready(s, 0))
				require.NoError(t, half.Close())
			}
			require.NoError(t, red.Ready(s, 0))
			for _, x := range owned {
				require.NoError(t, x.Close())
			}
			require.NoError(t, red.Close())
			require.NoError(t, g.Wait(testgpu.Context(t)))
			require.NoError(t, s.Sync(testgpu.Context(t)))
		}
	})
}

// NCCL refusing an operation on one rank leaves the others waiting: the group is
// broken from then on.
func TestRefusedOperationBreaksTheGroup(t *testing.T) {
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAllReduce#2=ncclInternalError"}).Devices()
	g := local(t, devs)
	xs, _ := shards(t, g, 16)
	err := comm.AllReduce(g, comm.Sum, xs...)
	require.ErrorIs(t, err, comm.ErrBroken)
	require.ErrorIs(t, err, nccl.ErrorInternal)
	require.ErrorIs(t, comm.BroadcastFrom(g, 0, xs...), comm.ErrBroken)
	require.ErrorIs(t, g.Err(), nccl.ErrorInternal)
}

func TestAnUnknownReductionBreaksNothing(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, hs := shards(t, g, 16)
		require.ErrorContains(t, comm.AllReduce(g, comm.Op(99), xs...), "not a reduction")
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		require.Equal(t, total(hs), read(t, g, 1, xs[1]))
	})
}

func TestDevicesOfTwoSystems(t *testing.T) {
	a := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	b := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	_, err := comm.Local(testgpu.Context(t), a[0], b[0])
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "two systems")
}

// Processes may join several groups; each has an id of its own.
func TestJoinTwice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, b := range boards(t.Context(), 2) {
			wg.Go(func() {
				for n := range 2 {
					g, err := comm.Join(testgpu.Context(t), b, devs[i])
					if err != nil {
						errs[i] = err
						return
					}
					x, err := comm.Make[int32](g, 4)
					if err == nil {
						err = x[0].CopyFrom(g.Stream(0), []int32{int32(n), 1, 2, 3})
					}
					if err == nil {
						err = comm.AllReduce(g, comm.Sum, x...)
					}
					got := make([]int32, 4)
					if err == nil {
						err = x[0].CopyTo(g.Stream(0), got)
					}
					if err == nil && got[0] != int32(2*n) {
						err = errors.New("the sum is wrong")
					}
					errs[i] = errors.Join(errs[i], err, x.Close(), g.Shutdown(testgpu.Context(t)))
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	})
}

func TestFinishTakesOneStreamForEachRank(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		bs := backwards(t, g, true)
		red, err := comm.NewReducer(g, nil, bs[0].grads, bs[1].grads)
		require.NoError(t, err)
		defer red.Close()
		for _, b := range bs {
			for j := range b.grads {
				require.NoError(t, red.Ready(b.s, j))
			}
		}
		require.ErrorContains(t, red.Finish(bs[0].s, bs[0].s), "want one for each local rank")
		require.NoError(t, red.Finish(bs[0].s, bs[1].s))
		require.NoError(t, g.Close())
		require.ErrorIs(t, red.Ready(bs[0].s, 0), device.ErrClosed)
	})
}

// The gaps between copied gradients are reduced too, so they must be numbers:
// the average of a poisoned gap would be none.
func TestGapsOfABucketAreNumbers(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		lists := make([][]memory.Slice[float32], 2)
		for i := range lists {
			for range 2 { // one element and a gap of three
				x, err := memory.MakeFrom(g.Stream(i), []float32{1})
				require.NoError(t, err)
				defer x.Close()
				lists[i] = append(lists[i], x)
			}
		}
		red, err := comm.NewReducer(g, nil, lists...)
		require.NoError(t, err)
		defer red.Close()
		for i := range lists {
			for _, gap := range red.Gaps(t, i) {
				require.Zero(t, gap)
			}
		}
	})
}

// Shutdown whose context has ended says so, and nothing of how the ranks end each other.
func TestShutdownGivesUp(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("enough"))
		err := g.Shutdown(ctx)
		require.ErrorContains(t, err, "enough")
		require.NotContains(t, err.Error(), "nccl")
		require.NoError(t, g.Shutdown(ctx), "it is closed")
	})
}
