package comm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// Local ranks of one color are one group, ordered by their keys, that works while its
// parent does and afterwards.
func TestSplit(t *testing.T) {
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g, err := comm.Local(ctx, devs[:4], nil)
		require.NoError(t, err)
		groups, err := g.Split(ctx, []int{5, 0, 5, comm.NoColor}, []int{1, 0, 0, 0})
		require.NoError(t, err)
		require.Same(t, groups[0], groups[2])
		require.NotSame(t, groups[0], groups[1])
		require.Nil(t, groups[3])
		require.Equal(t, 2, groups[0].Size())
		require.Equal(t, devs[2], groups[0].Device(0), "its key is lower")
		require.Equal(t, devs[0], groups[0].Device(1))
		require.Equal(t, 1, groups[1].Size())
		for _, sub := range groups[:2] {
			require.NoError(t, conform(ctx, sub))
		}
		require.NoError(t, conform(ctx, g))

		sub, err := g.Sub(ctx, 3, 1)
		require.NoError(t, err)
		require.Equal(t, []*device.Device{devs[3], devs[1]}, []*device.Device{sub.Device(0), sub.Device(1)})
		require.NoError(t, g.Shutdown(ctx))
		require.NoError(t, conform(ctx, sub))
		for _, x := range []*comm.Group{groups[0], groups[1], sub} {
			require.NoError(t, x.Shutdown(ctx))
		}
	})
}

func TestBadSplits(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, ctx := local(t, devs), testgpu.Context(t)
		for _, err := range []error{
			second(g.Split(ctx, []int{0}, nil)),
			second(g.Split(ctx, []int{0, 0}, []int{1})),
			second(g.Split(ctx, []int{0, -7}, nil)),
			second(g.Split(ctx, []int{0, math.MaxInt32 + 1}, nil)),
			second(g.Split(ctx, []int{0, 1 << 40}, nil)),
			second(g.Split(ctx, []int{0, 0}, []int{0, math.MaxInt32 + 1})),
			second(g.Split(ctx, []int{0, 0}, []int{0, math.MinInt32 - 1})),
			second(g.Sub(ctx, 0, 2)),
			second(g.Sub(ctx, 1, 1)),
			second(g.Sub(ctx, -1)),
		} {
			require.ErrorIs(t, err, comm.ErrMismatch)
		}
		widest, err := g.Split(ctx, []int{math.MaxInt32, math.MaxInt32}, []int{math.MaxInt32, math.MinInt32})
		require.NoError(t, err)
		require.Equal(t, 1, widest[0].Communicator(0).Device().Ordinal(), "the smaller key is first")
		require.NoError(t, widest[0].Close())
		none, err := g.Split(ctx, []int{comm.NoColor, comm.NoColor}, nil)
		require.NoError(t, err)
		require.Equal(t, []*comm.Group{nil, nil}, none)
		require.NoError(t, g.Barrier(ctx))
	})
}

// Ranks that want different sub-groups are all told so, and go on.
func TestSubOfListsThatDiffer(t *testing.T) {
	for _, other := range [][]int{{1, 0}, {0, 99}} {
		subOfLists(t, [][]int{{0, 1}, other, {0, 1}})
	}
}

func subOfLists(t *testing.T, lists [][]int) {
	devs, ctx := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), testgpu.Context(t)
	var wg sync.WaitGroup
	errs, ends := make([]error, 3), make([]error, 3)
	for i, b := range boards(t.Context(), 3) {
		wg.Go(func() {
			g, err := comm.Join(ctx, b, devs[i], nil)
			if err != nil {
				ends[i] = err
				return
			}
			_, errs[i] = g.Sub(ctx, lists[i]...)
			ends[i] = errors.Join(g.Barrier(ctx), g.Shutdown(ctx))
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(ends...))
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, fmt.Sprintf("comm: sub-group: rank 0 has the ranks %v and rank 1 the ranks %v", lists[0], lists[1]))
	}
}

// TestClosesOfRanksThatDiffer has all ranks close their groups as soon as they know that their arguments
// differ.
func TestClosesOfRanksThatDiffer(t *testing.T) {
	devs, ctx := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), testgpu.Context(t)
	errs := make([]error, 3)
	for range 20 {
		var wg sync.WaitGroup
		for i, b := range boards(t.Context(), 3) {
			wg.Go(func() {
				g, err := comm.Join(ctx, b, devs[i], nil)
				if errs[i] = err; err == nil {
					_, errs[i] = g.Sub(ctx, i)
					_ = g.Close() // the error of a rank that others have aborted
				}
			})
		}
		wg.Wait()
		for i, err := range errs {
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", i)
		}
	}
}

// conformSplit splits a group over processes into the even and the odd ranks, and takes
// the last and the first one out.
func conformSplit(ctx context.Context, g *comm.Group) error {
	groups, err := g.Split(ctx, []int{g.Rank() % 2}, nil)
	if err != nil {
		return err
	}
	if want := (g.Size() + 1 - g.Rank()%2) / 2; groups[0].Size() != want {
		return fmt.Errorf("split: rank %d is in a group of %d, want %d", g.Rank(), groups[0].Size(), want)
	}
	if err := conform(ctx, groups[0]); err != nil {
		return fmt.Errorf("split: %w", err)
	}
	last := g.Size() - 1
	sub, err := g.Sub(ctx, last, 0)
	if err != nil {
		return err
	}
	if (sub == nil) != (g.Rank() != last && g.Rank() != 0) {
		return fmt.Errorf("sub-group: rank %d got %v", g.Rank(), sub)
	}
	if sub != nil {
		if want := map[int]int{last: 0, 0: 1}[g.Rank()]; sub.Rank() != want {
			return fmt.Errorf("sub-group: rank %d is %d in it, want %d", g.Rank(), sub.Rank(), want)
		}
		if err := errors.Join(conform(ctx, sub), sub.Shutdown(ctx)); err != nil {
			return fmt.Errorf("sub-group: %w", err)
		}
	}
	return errors.Join(groups[0].Shutdown(ctx), g.Barrier(ctx))
}
