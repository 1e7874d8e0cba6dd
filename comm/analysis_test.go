package comm_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
)

// TestVerdictOfTheRecorders has three processes, of which rank 1 does not issue the second
// all-reduce. The others find that in the recorders of all ranks.
func TestVerdictOfTheRecorders(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	gs, errs := groups.Join(t, testgpu.Context(t), devs)
	require.NoError(t, errors.Join(errs...))
	late := errors.New("an operation has not completed")
	for i, g := range gs {
		xs, err := comm.MakeFrom(g, make([]float32, 8))
		require.NoError(t, err)
		t.Cleanup(func() { _ = xs.Close() })
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		if i != 1 {
			require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		}
	}
	require.NoError(t, gs[1].Wait(testgpu.Context(t)))
	for _, rank := range []int{0, 2} {
		err := comm.Analyzed(testgpu.Context(t), gs[rank], time.Minute, late)
		require.ErrorIs(t, err, late)
		require.ErrorContains(t, err, "an operation has not completed; the flight recorders of the ranks say: Rank 1 ")
		require.ErrorContains(t, err, "has not issued collective 2 (all_reduce(8 x Float, sum))")
	}
}

// The store of a job can delete the dumps.
var _, _ comm.Deleter = (*cluster.World)(nil), (*cluster.Session)(nil)

// TestDumpsAreDeleted checks that the dumps stay while a rank may read them, and not longer.
func TestDumpsAreDeleted(t *testing.T) {
	ctx := testgpu.Context(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	boards := testgpu.Boards(ctx, len(devs))
	gs, errs := make([]*comm.Group, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, b := range boards {
		wg.Go(func() { gs[i], errs[i] = comm.Join(ctx, b, devs[i], nil) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for rank := range 2 {
		_ = comm.Analyzed(ctx, gs[rank], time.Minute, errors.New("late"))
	}
	dumps := func() (n int) {
		for rank := range gs {
			if boards[0].Has(comm.DumpKey(gs[0], rank)) {
				n++
			}
		}
		return n
	}
	require.Equal(t, 3, dumps(), "all ranks were asked")
	require.NoError(t, gs[0].Close())
	require.Equal(t, 3, dumps(), "rank 1 may read them")
	require.NoError(t, errors.Join(gs[1].Close(), gs[2].Close()))
	require.Zero(t, dumps())
}

// TestNoVerdictWithoutDifference compares ranks that have completed everything.
func TestNoVerdictWithoutDifference(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	gs, errs := groups.Join(t, testgpu.Context(t), devs)
	require.NoError(t, errors.Join(errs...))
	late := errors.New("late")
	require.Equal(t, late, comm.Analyzed(testgpu.Context(t), gs[0], time.Minute, late))
}

// TestRankWithoutAnswerIsNamed ends the wait before rank 1 could answer.
func TestRankWithoutAnswerIsNamed(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ctx := testgpu.Context(t)
	gs, errs := groups.Join(t, ctx, devs)
	require.NoError(t, errors.Join(errs...))
	require.NoError(t, gs[1].Close()) // its process ends
	xs, err := comm.MakeFrom(gs[0], make([]float32, 8))
	require.NoError(t, err)
	t.Cleanup(func() { _ = xs.Close() })
	_ = comm.AllReduce(gs[0], comm.Sum, xs...)
	require.ErrorContains(t, comm.Analyzed(ctx, gs[0], 2*time.Second, errors.New("late")), "No answer came from rank 1")
}

// TestFewRanksOfALargeGroupCompare counts them.
func TestFewRanksOfALargeGroupCompare(t *testing.T) {
	for size, want := range map[int]int{1: 1, 8: 8, 9: 9, 64: 8, 1000: 8, 1023: 9} {
		n := 0
		for rank := range size {
			if comm.Analyst(rank, size) {
				n++
			}
		}
		require.Equal(t, want, n, "%d ranks", size)
	}
}
