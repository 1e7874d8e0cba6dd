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
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Memory of another stream may be closed as soon as the collective is enqueued:
// it is freed when the group's stream is past it. Virtual devices report it
// otherwise.
func TestMemoryOutlivesTheCollective(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs := make([]memory.Slice[float32], 2)
		for i, d := range devs {
			s := streamtest.NewStream(t, d)
			var err error
			xs[i], err = memory.Make[float32](s, 1<<18)
			require.NoError(t, errors.Join(err, xs[i].Zero(s), g.Stream(i).WaitStream(s)))
		}
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		for _, x := range xs {
			require.NoError(t, x.Close())
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
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
	_, err := comm.Local(testgpu.Context(t), []*device.Device{a[0], b[0]}, nil)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "two systems")
}

// Processes may join several groups; each has an id of its own.
func TestJoinTwice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx, bs := testgpu.Context(t), exchanges(t.Context(), 2)
		for range 2 {
			require.NoError(t, errors.Join(atOnce(2, func(i int) error {
				g, err := comm.Join(ctx, bs[i], devs[i], nil)
				if err != nil {
					return err
				}
				return errors.Join(conformAllReduce(ctx, g, 4), g.Shutdown(ctx))
			})...))
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
		require.ErrorIs(t, g.Shutdown(ctx), device.ErrClosed, "another one is no success")
	})
}
