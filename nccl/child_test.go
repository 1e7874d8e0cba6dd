package nccl_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// derive makes a communicator from each of some ranks, at once, and ends them with the
// test.
func derive(t *testing.T, ranks []rank, make1 func(i int, r rank) (*nccl.Communicator, error)) []rank {
	t.Helper()
	out := make([]rank, len(ranks))
	each(t, ranks, func(i int) (err error) {
		out[i].s = ranks[i].s
		out[i].c, err = make1(i, ranks[i])
		return err
	})
	t.Cleanup(func() {
		for _, r := range out {
			require.NoError(t, r.c.Close())
		}
	})
	return out
}

// total checks an all-reduce over ranks whose elements are all the same.
func total(t *testing.T, ranks []rank) {
	t.Helper()
	xs := make([]memory.Slice[int32], len(ranks))
	want := int32(0)
	for i, r := range ranks {
		xs[i] = made(t, r.s, int32(1<<i))
		want += 1 << i
	}
	require.NoError(t, reduceAll(ranks, xs, nccl.Sum))
	requireAll(t, ranks, xs, []int32{want})
}

func TestSplit(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 5})
	ranks := connectWith(t, devs, &nccl.Config{Name: "all", Timeout: time.Minute})
	parts := derive(t, ranks, func(i int, r rank) (*nccl.Communicator, error) {
		if i == 4 {
			return r.c.Split(testgpu.Context(t), -1, 0, nil)
		}
		return r.c.Split(testgpu.Context(t), i%2, -i, nil) // in reverse order
	})
	require.Nil(t, parts[4].c)
	for i, want := range []int{1, 1, 0, 0} {
		require.Equal(t, []int{want, 2}, []int{parts[i].c.Rank(), parts[i].c.Size()}, "rank %d", i)
	}
	total(t, []rank{parts[0], parts[2]})
	total(t, ranks)
	// The parent may end before its children.
	for _, r := range ranks {
		require.NoError(t, r.c.Close())
	}
	total(t, []rank{parts[1], parts[3]})
	_, err := ranks[0].c.Split(testgpu.Context(t), 0, 0, nil)
	require.ErrorIs(t, err, device.ErrClosed)
	alone := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))[0].c
	for _, wide := range [][2]int{{1 << 40, 0}, {0, 1 << 31}, {0, -1<<31 - 1}} {
		_, err := alone.Split(testgpu.Context(t), wide[0], wide[1], nil)
		require.ErrorContains(t, err, "a key of 32 bits")
	}
	_, err = (*nccl.Communicator)(nil).Split(testgpu.Context(t), 0, 0, nil)
	require.ErrorContains(t, err, "no communicator given")
}

func TestSplitOnGPUs(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		total(t, ranks)
		total(t, derive(t, ranks, func(i int, r rank) (*nccl.Communicator, error) {
			return r.c.Split(testgpu.Context(t), 7, 0, &nccl.Config{SplitShare: new(true)})
		}))
		total(t, ranks)
	})
}

// The children of a communicator have names of their own in traces, also where nobody
// gave them one.
func TestChildrenHaveNames(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	ranks := connectWith(t, devs, &nccl.Config{Name: "all"})
	split := func(from []rank, cfg *nccl.Config) []rank {
		return derive(t, from, func(i int, r rank) (*nccl.Communicator, error) {
			return r.c.Split(testgpu.Context(t), r.c.Rank()%2, 0, cfg)
		})
	}
	halves := split(ranks, nil)
	named := split(ranks, &nccl.Config{Name: "mine"})
	for of, want := range map[*nccl.Communicator]string{
		halves[0].c: "all-split1.0", halves[3].c: "all-split1.1", named[0].c: "mine",
		split([]rank{halves[1], halves[3]}, &nccl.Config{})[1].c: "all-split1.1-split1.1",
	} {
		var b bytes.Buffer
		require.NoError(t, of.DumpTrace(&b))
		require.Contains(t, b.String(), fmt.Sprintf("%q", want))
	}
}

// A split that other ranks never come to ends with its context.
func TestSplitEndsWithContext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connect(t, devs)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := ranks[1].c.Split(ctx, 0, 0, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "ncclCommSplit: rank 1 of 2")
}

func TestShrink(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		total(t, ranks)
		_, err := ranks[0].c.Shrink(testgpu.Context(t), nccl.ShrinkDefault, []int{0}, nil)
		require.ErrorContains(t, err, "rank 0 cannot be excluded")
		_, err = ranks[0].c.Shrink(testgpu.Context(t), nccl.ShrinkDefault, []int{3}, nil)
		require.ErrorContains(t, err, "rank 3 cannot be excluded")
		left := []rank{ranks[0], ranks[2]}
		smaller := derive(t, left, func(i int, r rank) (*nccl.Communicator, error) {
			return r.c.Shrink(testgpu.Context(t), nccl.ShrinkDefault, []int{1}, nil)
		})
		require.Equal(t, []int{1, 2}, []int{smaller[1].c.Rank(), smaller[1].c.Size()})
		total(t, smaller)
	})
}

// The survivors of a rank that never came go on without it.
func TestShrinkAfterAFailure(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	ranks := connectWith(t, devs, &nccl.Config{Recoverable: true})
	xs, _ := buffers(t, ranks, 8)
	total(t, ranks)
	setTimeout(t, ranks, soon)
	require.NoError(t, reduceAll(ranks[:2], xs, nccl.Sum)) // in a group, because soon may be over at a second call
	for _, r := range ranks[:2] {
		require.ErrorIs(t, r.c.Wait(testgpu.Context(t), r.s), nccl.ErrorTimeout)
		_, err := r.c.Split(testgpu.Context(t), 0, 0, nil)
		require.ErrorIs(t, err, nccl.ErrorTimeout)
	}
	total(t, derive(t, ranks[:2], func(i int, r rank) (*nccl.Communicator, error) {
		return r.c.Shrink(testgpu.Context(t), nccl.ShrinkAbort, []int{2}, &nccl.Config{Timeout: time.Minute})
	}))
}

// A first operation waits in NCCL for the other ranks, and only an abort ends that.
func TestShrinkAfterABlockedCall(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: limit(devs), Recoverable: true})
		xs, _ := buffers(t, ranks, 8)
		require.ErrorIs(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum), nccl.ErrorTimeout)
		require.ErrorContains(t, ranks[0].c.Err(), "has not returned from NCCL after")
		require.ErrorContains(t, ranks[0].c.Err(), "): rank 1 ("+devs[1].String()+") has not issued it, the last operation is none")
		_, err := ranks[0].c.Shrink(testgpu.Context(t), nccl.ShrinkAbort, []int{1}, nil)
		require.ErrorIs(t, err, nccl.ErrorTimeout)
	})
}

// Without Recoverable there is nothing left to shrink.
func TestShrinkOfAnAborted(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connectWith(t, devs, &nccl.Config{Timeout: soon})
	xs, _ := buffers(t, ranks, 8)
	require.ErrorIs(t, issueAlone(t, ranks[0], xs[0]), nccl.ErrorTimeout)
	_, err := ranks[0].c.Shrink(testgpu.Context(t), nccl.ShrinkAbort, []int{1}, nil)
	require.ErrorIs(t, err, nccl.ErrorTimeout)
}

const newest = "2.32.3"

func TestRevoke(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	xs, _ := buffers(t, ranks, 8)
	total(t, ranks)
	require.NoError(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum)) // hangs
	for i, r := range ranks {
		require.NoError(t, r.c.Revoke())
		require.NoError(t, r.s.Sync(testgpu.Context(t)), "rank %d", i)
		require.ErrorIs(t, nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum), nccl.ErrRevoked)
		require.ErrorIs(t, r.c.Revoke(), nccl.ErrRevoked)
		require.ErrorIs(t, r.c.Err(), nccl.ErrRevoked)
	}
	total(t, derive(t, ranks, func(i int, r rank) (*nccl.Communicator, error) {
		return r.c.Split(testgpu.Context(t), 0, 0, nil)
	}))
}

func TestGrow(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4, VirtualNCCL: newest})
	old := connect(t, devs[:2])
	total(t, old)
	id, err := old[1].c.GrowID()
	require.NoError(t, err)
	_, err = old[0].c.Grow(testgpu.Context(t), 2, nil, nil)
	require.ErrorContains(t, err, "to 2 ranks: want more")
	others := connect(t, devs[2:]) // for their streams
	all := derive(t, append(old[:2:2], others...), func(i int, r rank) (*nccl.Communicator, error) {
		switch i {
		case 0:
			return r.c.Grow(testgpu.Context(t), 4, nil, nil)
		case 1:
			return r.c.Grow(testgpu.Context(t), 4, &id, nil)
		}
		return nccl.JoinGrown(testgpu.Context(t), devs[i], id, i, 4, nil)
	})
	for i, r := range all {
		require.Equal(t, []int{i, 4}, []int{r.c.Rank(), r.c.Size()})
	}
	total(t, all)
	_, err = nccl.JoinGrown(testgpu.Context(t), devs[3], id, 4, 4, nil)
	require.ErrorContains(t, err, "rank 4 of 4")
}

func TestSuspend(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})
	r := connect(t, devs)[0]
	xs, _ := buffers(t, []rank{r}, 4)
	stats, err := r.c.MemoryStats()
	require.NoError(t, err)
	require.Equal(t, stats.Total, stats.Persistent+stats.Suspend)
	require.NotZero(t, stats.Suspend)
	require.NoError(t, r.c.Suspend())
	stats, err = r.c.MemoryStats()
	require.NoError(t, err)
	require.True(t, stats.Suspended)
	require.ErrorIs(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum), nccl.ErrorInvalidUsage)
	require.ErrorIs(t, r.c.Suspend(), nccl.ErrorInvalidUsage)
	require.NoError(t, r.c.Resume())
	total(t, []rank{r})
}

func TestNewCommunicators(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		list, err := nccl.NewCommunicators(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		for i, c := range list {
			require.Equal(t, []any{i, len(devs), devs[i]}, []any{c.Rank(), c.Size(), c.Device()})
			defer c.Close()
		}
		_, err = nccl.NewCommunicators(testgpu.Context(t), []*device.Device{devs[0], devs[0]}, nil)
		require.ErrorContains(t, err, "Duplicate GPU")
		_, err = nccl.NewCommunicators(testgpu.Context(t), nil, nil)
		require.ErrorContains(t, err, "no device given")
	})
}

func TestSeveralIDs(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ids := make([]nccl.UniqueID, 2)
		for i, d := range devs {
			var err error
			ids[i], err = nccl.NewUniqueID(d)
			require.NoError(t, err)
		}
		streams := connect(t, devs)
		total(t, derive(t, streams, func(i int, r rank) (*nccl.Communicator, error) {
			return nccl.NewScalable(testgpu.Context(t), devs[i], ids, i, 2, nil)
		}))
		_, err := nccl.NewScalable(testgpu.Context(t), devs[0], nil, 0, 2, nil)
		require.ErrorContains(t, err, "0 ids for 2 ranks: want 1 to 2")
		_, err = nccl.NewScalable(testgpu.Context(t), devs[0], append(ids, ids...), 0, 2, nil)
		require.ErrorContains(t, err, "4 ids for 2 ranks")
	})
}
