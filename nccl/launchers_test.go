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
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A group of one operation for each rank goes to NCCL from as many threads: the fault
// plan fails every group of NCCL's own.
func TestGroupsWithoutNCCLs(t *testing.T) {
	rounds := testhost.Rounds(10, 30)
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
				order := r.Perm(n)
				require.NoError(t, grouped(ranks, func(at int, k rank) error {
					i := order[at]
					k = ranks[i].in(k.batch)
					switch kind {
					case 0:
						return nccl.AllReduce(k.on(), k.s, xs[i], xs[i], nccl.Max)
					case 1:
						return nccl.Broadcast(k.on(), k.s, xs[i], xs[i], root)
					}
					return nccl.Reduce(k.on(), k.s, xs[i], xs[i], nccl.Sum, root)
				}))
				apply(kind, root, in)
				require.Equal(t, in, contents(t, ranks, xs), "kind %d", kind)
			}
			for _, k := range ranks {
				require.NoError(t, k.c.Wait(testgpu.Context(t), k.s))
				require.EqualValues(t, rounds, k.c.Progress().Completed.Record)
			}
			// More than one for a rank, and a capture, are NCCL's affair.
			all := func(times int) error {
				return grouped(ranks, func(i int, k rank) (err error) {
					for part := range times {
						x := xs[i].Slice(part*24/times, (part+1)*24/times)
						err = errors.Join(err, nccl.AllReduce(k.on(), k.s, x, x, nccl.Sum))
					}
					return err
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
func TestLaunchPollTime(t *testing.T) {
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
		require.NoError(t, grouped(one, func(i int, k rank) error {
			return errors.Join(nccl.AllReduce(k.on(), k.s, xs[i], xs[i], nccl.Sum), nccl.AllReduce(k.batch.On(other[i].c), k.s, xs[i], xs[i], nccl.Sum))
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
	require.NoError(t, reduceAll(ranks, xs, nccl.Sum))
	require.ErrorIs(t, reduceAll(ranks, xs, nccl.Sum), nccl.ErrorSystem)
	for _, k := range ranks {
		until(t, func() bool { return k.c.Err() != nil })
		require.ErrorIs(t, k.c.Err(), nccl.ErrorSystem)
	}
}

// TestDevComm checks arguments and versions. Virtual devices refuse the rest with a reason.
func TestDevComm(t *testing.T) {
	for version, want := range map[string]string{"2.27.3": "NCCL 2.28.3", "2.28.9": "NCCL 2.29.2", "2.29.2": "", newest: ""} {
		t.Run(version, func(t *testing.T) {
			ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: version}))
			c := ranks[0].c
			_, err := c.NewDevComm(testgpu.Context(t), &nccl.DevCommConfig{Bytes: 248, LSABarriers: 16})
			if want != "" {
				var u *device.UnsupportedError
				require.ErrorAs(t, err, &u)
				require.Equal(t, want, u.Need)
				return
			}
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
			require.ErrorContains(t, err, "virtual devices run Go functions in place of CUDA kernels")
			for _, cfg := range []*nccl.DevCommConfig{nil, {}, {Bytes: 5000}, {Bytes: 248, Barriers: -1}, {Bytes: 248, LLA2ASlots: 1 << 21}} {
				_, err := c.NewDevComm(testgpu.Context(t), cfg)
				require.ErrorContains(t, err, "nccl: ncclDevCommCreate on rank 0 of 2: ")
			}
			require.NoError(t, c.Err())
			require.NoError(t, (*nccl.DevComm)(nil).Close())
		})
	}
}

// TestIntParameter reads a number, and logs all parameters.
func TestIntParameter(t *testing.T) {
	t.Setenv("NCCL_ALGO", "ring")
	t.Setenv("NCCL_PROTO", "0x12")
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})[0]
	v, err := nccl.IntParameter(dev, "NCCL_PROTO")
	require.NoError(t, err)
	require.Equal(t, int64(18), v)
	for _, key := range []string{"NCCL_ALGO", "NCCL_MISSPELT"} {
		_, err = nccl.IntParameter(dev, key)
		require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	}
	require.NoError(t, nccl.LogParameters(dev))
	old := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: "2.28.3"})[0]
	_, err = nccl.IntParameter(old, "NCCL_PROTO")
	require.ErrorIs(t, errors.Join(err, nccl.LogParameters(old)), errors.ErrUnsupported)
}
