package nccl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Each rank scales by a factor of its own, from the host and from the device, which
// is read when the operation runs.
func TestPreMulSum(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs := make([]memory.Slice[float32], 2)
		factors := make([]memory.Slice[float32], 2)
		sums := make([][2]*nccl.PreMulSum, 2)
		for i, r := range ranks {
			var err error
			xs[i], err = memory.MakeFrom(r.s, []float32{1, 2, float32(4 + i)})
			require.NoError(t, err)
			defer xs[i].Close()
			factors[i], err = memory.MakeFrom(r.s, []float32{100})
			require.NoError(t, err)
			defer factors[i].Close()
			sums[i][0], err = nccl.NewPreMulSum(r.c, float32(0.5)*float32(i+1))
			require.NoError(t, err)
			sums[i][1], err = nccl.NewPreMulSumFrom(r.c, factors[i])
			require.NoError(t, err)
			require.NoError(t, factors[i].CopyFrom(r.s, []float32{2}))
		}
		for k, want := range [][]float32{{1.5, 3, 2 + 5}, {6, 12, 28}} {
			require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
				for i, r := range ranks {
					if err := nccl.AllReduce(b.On(r.c), r.s, xs[i], xs[i], sums[i][k].Op()); err != nil {
						return err
					}
				}
				return nil
			}))
			for i, r := range ranks {
				got := make([]float32, 3)
				require.NoError(t, xs[i].CopyTo(r.s, got))
				require.Equal(t, want, got, "rank %d, sum %d", i, k)
			}
		}
		r, op := ranks[0], sums[0][0].Op()
		ints, _ := buffers(t, ranks, 2)
		require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, ints[0], ints[0], op), "is a reduction of float32 and not of int64")
		for i := range ranks {
			require.NoError(t, sums[i][0].Close())
			require.NoError(t, sums[i][0].Close())
		}
		require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], op), "is not a reduction of this communicator")
		_, err := nccl.NewPreMulSum(r.c, true)
		require.ErrorContains(t, err, "cannot multiply bool")
		_, err = nccl.NewPreMulSumFrom(r.c, xs[0])
		require.ErrorContains(t, err, "has 3 elements: want 1")
		_, err = nccl.NewPreMulSumFrom(r.c, factors[1])
		require.ErrorContains(t, err, "the buffer is of")
		_, err = nccl.NewPreMulSum[float32](nil, 2)
		require.ErrorContains(t, err, "no communicator given")
		// The second one is closed by its communicator.
		each(t, devs, func(i int) error { return ranks[i].c.Close() })
		for i := range ranks {
			require.NoError(t, sums[i][1].Close())
		}
		_, err = nccl.NewPreMulSum(r.c, float32(1))
		require.ErrorIs(t, err, device.ErrClosed)
	})
}

func TestReductionsOfSomeTypes(t *testing.T) {
	ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: "2.23.4"}))
	r := ranks[0]
	f8, err := memory.Make[memory.Float8E4M3Bits](r.s, 4)
	require.NoError(t, err)
	defer f8.Close()
	b, err := memory.Make[bool](r.s, 4)
	require.NoError(t, err)
	defer b.Close()
	var missing *device.UnsupportedError
	err = nccl.AllReduce(r.on(), r.s, f8, f8, nccl.Sum)
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, err, "ncclAllReduce on rank 0 of 1 of float8_e4m3fn needs NCCL 2.24.3; this machine has NCCL 2.23.4")
	_, err = nccl.NewPreMulSum(r.c, memory.Float8E4M3Bits(0))
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, b, b, nccl.Avg), "bools have no average")
	require.NoError(t, nccl.Broadcast(r.on(), r.s, f8, f8, 0))
	_, err = nccl.NewCommunicator(testgpu.Context(t), r.c.Device(), nccl.UniqueID{}, 0, 1, &nccl.Config{TrafficClass: new(1)})
	require.ErrorContains(t, err, "needs NCCL 2.26.2; this machine has NCCL 2.23.4")
}
