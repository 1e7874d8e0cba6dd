package nccl_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/tsan"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A group of one operation for each rank goes to NCCL from as many threads: the fault
// plan fails every group of NCCL's own.
func TestGroupsWithoutNCCLs(t *testing.T) {
	rounds := tsan.Rounds(10, 30)
	for n := 2; n <= 4; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n, Faults: "ncclGroupStart#*=ncclInternalError"})
			ranks := connect(t, devs)
			xs, in := buffers(t, ranks, 24)
			nccl.WakeLaunchers(t, 2*n)
			r := rand.New(rand.NewPCG(7, uint64(n)))
			for range rounds {
				root := r.IntN(n)
				kind := r.IntN(3)
				require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
					for _, i := range r.Perm(n) { // in any order
						var err error
						switch k := ranks[i]; kind {
						case 0:
							err = nccl.AllReduce(b.On(k.c), k.s, xs[i], xs[i], nccl.Max)
						case 1:
							err = nccl.Broadcast(b.On(k.c), k.s, xs[i], xs[i], root)
						default:
							err = nccl.Reduce(b.On(k.c), k.s, xs[i], xs[i], nccl.Sum, root)
						}
						if err != nil {
							return err
						}
					}
					return nil
				}))
				apply(kind, root, in)
				for i, k := range ranks {
					got := make([]int64, 24)
					require.NoError(t, xs[i].CopyTo(k.s, got))
					require.Equal(t, in[i], got, "rank %d of kind %d", i, kind)
				}
			}
			for _, k := range ranks {
				require.NoError(t, k.c.Wait(testgpu.Context(t), k.s))
				require.EqualValues(t, rounds, k.c.Progress().Completed.Record)
			}
			// More than one for a rank, and a capture, are NCCL's affair.
			all := func(times int) error {
				return nccl.Group(func(b *nccl.Batch) error {
					for i, k := range ranks {
						for part := range times {
							x := xs[i].Slice(part*24/times, (part+1)*24/times)
							if err := nccl.AllReduce(b.On(k.c), k.s, x, x, nccl.Sum); err != nil {
								return err
							}
						}
					}
					return nil
				})
			}
			require.NoError(t, all(1))
			require.ErrorIs(t, all(2), nccl.ErrorInternal)
			var streams []*stream.Stream
			for _, k := range ranks {
				streams = append(streams, k.s)
			}
			_, err := graph.Capture(streams, func() error { return all(1) }, nil)
			require.ErrorIs(t, err, nccl.ErrorInternal)
		})
	}
}

// apply does to the values what an operation does to the buffers.
func apply(kind, root int, in [][]int64) {
	out := make([]int64, len(in[0]))
	copy(out, in[root])
	for j := range out {
		for i := range in {
			switch {
			case kind == 0:
				out[j] = max(out[j], in[i][j])
			case kind == 2 && i != root:
				out[j] += in[i][j]
			}
		}
	}
	for i := range in {
		if kind != 2 || i == root {
			copy(in[i], out)
		}
	}
}

// A duration that is none is refused.
func TestLaunchPatience(t *testing.T) {
	t.Setenv("CHORUS_LAUNCH_PATIENCE", "long")
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	id, err := nccl.NewUniqueID(dev)
	require.NoError(t, err)
	_, err = nccl.NewCommunicator(testgpu.Context(t), dev, id, 0, 1, nil)
	require.ErrorContains(t, err, `CHORUS_LAUNCH_PATIENCE="long": want a duration`)
}

// What two communicators of the same devices have in a group gets to all streams in the
// same order.
func TestLaunchersKeepTheOrder(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	one, other := connect(t, devs), connect(t, devs)
	xs, _ := buffers(t, one, 8)
	nccl.WakeLaunchers(t, 4)
	for range 100 {
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
			for i := range devs {
				for _, k := range []rank{one[i], other[i]} {
					if err := nccl.AllReduce(b.On(k.c), one[i].s, xs[i], xs[i], nccl.Sum); err != nil {
						return err
					}
				}
			}
			return nil
		}))
	}
	for i, k := range one {
		require.NoError(t, k.s.Sync(testgpu.Context(t)))
		require.NoError(t, errors.Join(k.c.Err(), other[i].c.Err()))
	}
}

// What NCCL refuses for one rank fails the communicators that wait for it.
func TestLaunchersTellOfAFailure(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: "ncclGroupStart#*=ncclInternalError,ncclAllReduce#5=ncclSystemError"})
	ranks := connect(t, devs)
	xs, _ := buffers(t, ranks, 8)
	nccl.WakeLaunchers(t, 3)
	all := func() error {
		return nccl.Group(func(b *nccl.Batch) error {
			for i, k := range ranks {
				if err := nccl.AllReduce(b.On(k.c), k.s, xs[i], xs[i], nccl.Sum); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, all())
	err := all()
	require.ErrorIs(t, err, nccl.ErrorSystem)
	for _, k := range ranks {
		until(t, func() bool { return k.c.Err() != nil })
		require.ErrorIs(t, k.c.Err(), nccl.ErrorSystem)
	}
}
