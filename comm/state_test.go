package comm_test

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
)

var _ comm.Rendezvous = (*cluster.World)(nil)

// A trained is the state of one rank in a test.
type trained struct {
	version int64
	name    string
	weights []float32
	tokens  []int32
}

// sync2 runs SyncState on two ranks and returns what they have afterwards.
func sync2(t *testing.T, ranks [2]trained) (after [2]trained, from [2]int, errs [2]error) {
	t.Helper()
	errs = both(t, func(ctx context.Context, rank int, g *comm.Group) (err error) {
		x := ranks[rank]
		w, err := memory.MakeFrom(g.Stream(0), x.weights)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.Close()) }()
		k, err := memory.MakeFrom(g.Stream(0), x.tokens)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, k.Close()) }()
		if from[rank], err = comm.SyncState(ctx, g, x.version, &x.name, w.AsBytes(), k.AsBytes()); err != nil {
			return err
		}
		x.weights, x.tokens = make([]float32, w.Len()), make([]int32, k.Len())
		after[rank] = x
		return errors.Join(w.CopyTo(g.Stream(0), x.weights), k.CopyTo(g.Stream(0), x.tokens))
	})
	return after, from, errs
}

func TestSyncState(t *testing.T) {
	large := make([]float32, 3<<20) // more than one piece of a checksum
	for i := range large {
		large[i] = float32(i%1000) - 500
	}
	for _, tc := range []struct {
		versions [2]int64
		from     int
		copies   bool
	}{
		{[2]int64{3, -1}, 0, true},
		{[2]int64{-1, 0}, 1, true},
		{[2]int64{3, 4}, 1, true},
		{[2]int64{5, 5}, 0, false},
		{[2]int64{-1, -7}, -1, false},
	} {
		t.Run(fmt.Sprint(tc.versions), func(t *testing.T) {
			before := [2]trained{
				{tc.versions[0], "zero", append([]float32{1}, large...), []int32{1, 2}},
				{tc.versions[1], "one", append([]float32{2}, large...), []int32{3, 4}},
			}
			after, from, errs := sync2(t, before)
			require.NoError(t, errors.Join(errs[:]...))
			require.Equal(t, [2]int{tc.from, tc.from}, from)
			for r := range 2 {
				want := before[r]
				if tc.copies {
					want = before[tc.from]
				}
				require.Equal(t, want.name, after[r].name)
				require.Equal(t, want.tokens, after[r].tokens)
				require.True(t, slices.Equal(want.weights, after[r].weights), "rank %d has other weights", r)
			}
		})
	}
}

func TestSyncStateRefusals(t *testing.T) {
	_, _, errs := sync2(t, [2]trained{{weights: make([]float32, 3), tokens: make([]int32, 1)}, {weights: make([]float32, 4), tokens: make([]int32, 1)}})
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "rank 0 has parts of [12 4] bytes, and rank 1 of [16 4] bytes")
	}
	both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		_, err := comm.SyncState[int](ctx, g, 0, nil)
		require.ErrorContains(t, err, "v is nil")
		return nil
	})
}

// A copy with one wrong bit is found.
func TestChecksums(t *testing.T) {
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) (err error) {
		bytes := make([]byte, 20<<20)
		bytes[17<<20] = byte(rank) << 3
		x, err := memory.MakeFrom(g.Stream(0), bytes)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, x.Close()) }()
		sum, err := g.Checksum(x)
		require.Equal(t, crc32.Checksum(bytes, crc32.MakeTable(crc32.Castagnoli)), sum)
		return err
	})
	require.NoError(t, errors.Join(errs[:]...))
	require.NoError(t, comm.CompareSums([][]uint32{{1, 2}, {1, 2}}, 1, 2))
	for _, bad := range [][]uint32{{1, 3}, {1}, nil} {
		var e *comm.StateError
		require.ErrorAs(t, comm.CompareSums([][]uint32{{1, 2}, {1, 2}, bad}, 0, 2), &e)
		require.Equal(t, 2, e.Rank)
		require.Equal(t, 0, e.From)
	}
}
