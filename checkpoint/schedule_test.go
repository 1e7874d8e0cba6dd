package checkpoint

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// placedTensors places float32 tensors of 100 x 700 elements that lie side by side in a
// file.
func placedTensors(t *testing.T, ranks int, plan ...Placement) []*placed {
	t.Helper()
	var list []*placed
	for i, p := range plan {
		x := &placed{info: Info{Name: fmt.Sprint(i), DType: memory.Float32, Shape: []int{100, 700}}, off: int64(i * 280_000), from: 4, to: memory.Float32}
		var err error
		x.cut, err = p.resolve(x.info.Shape, ranks)
		require.NoError(t, err)
		x.flat = x.cut.flat()
		list = append(list, x)
	}
	_, err := layOut(list, ranks)
	require.NoError(t, err)
	return list
}

// sum counts what a schedule reads and sends.
func (s *schedule) sum() (direct, inRounds, sends, staged int, bytes int64) {
	for _, list := range s.direct {
		direct += len(list)
		bytes += list.bytes()
	}
	for _, r := range s.rounds {
		sends += len(r.sends)
		for _, w := range r.ranks {
			inRounds += len(w.reads)
			bytes += w.reads.bytes()
			staged = max(staged, w.staged)
		}
	}
	return direct, inRounds, sends, staged, bytes
}

// TestScheduleIsFrugal: what one rank needs is read straight to it; what all need, in
// one part by each, whatever lies between in the file; and each byte once.
func TestScheduleIsFrugal(t *testing.T) {
	allOrNothing := Slice(1, func(rank, _, size int) Range { return Range{0, size * (rank % 2)} })
	pair := Slice(0, func(rank, _, size int) Range { return Range{0, size * (1 - rank/2)} })
	oneHas := Slice(1, func(rank, _, size int) Range { return Range{0, size * (rank / 3)} })
	for what, tc := range map[string]struct {
		plan                         []Placement
		direct, inRounds, sends, all int
	}{
		"sharded":              {[]Placement{Shard(0), Shard(0)}, 8, 0, 0, 2},
		"owned":                {[]Placement{Own(3), Own(0), Own(3)}, 3, 0, 0, 3},
		"replicated":           {[]Placement{Replicate(), Replicate(), Replicate()}, 0, 6, 12, 3},
		"replicated between":   {[]Placement{Replicate(), Shard(0), Replicate(), Own(1), Replicate()}, 5, 6, 12, 5},
		"cut, all on one rank": {[]Placement{oneHas}, 1, 0, 0, 1},
		"cut, all or nothing":  {[]Placement{allOrNothing}, 0, 2, 2, 1},
		"cut":                  {[]Placement{Shard(1)}, 0, 4, 12, 1},
		"two have":             {[]Placement{pair, pair}, 0, 2, 2, 2},
		"others' between":      {[]Placement{pair, Own(3), pair}, 1, 2, 2, 3},
		"as much between":      {[]Placement{pair, Shard(0), pair}, 4, 4, 4, 3},
		"more of one between":  {[]Placement{pair, Own(1), pair}, 1, 4, 4, 3},
		"skipped by all":       {[]Placement{Slice(0, func(_, _, _ int) Range { return Range{} })}, 0, 0, 0, 0},
	} {
		s := newSchedule(placedTensors(t, 4, tc.plan...), 4, defaultRound, true)
		direct, inRounds, sends, _, bytes := s.sum()
		require.Equal(t, []int{tc.direct, tc.inRounds, tc.sends, tc.all * 280_000}, []int{direct, inRounds, sends, int(bytes)}, what)
		require.LessOrEqual(t, len(s.rounds), 1, what)
	}
}

// TestRoundsOfAnySize: the smallest and the largest rounds move the same bytes, and a
// rank no more in each than was asked for, and one row.
func TestRoundsOfAnySize(t *testing.T) {
	const row = 2800
	for _, budget := range []int{1, 511, 512, 2000, row, 100_000, math.MaxInt - 511, math.MaxInt} {
		s := newSchedule(placedTensors(t, 4, Replicate(), Shard(1), Replicate()), 4, budget, true)
		_, inRounds, _, staged, bytes := s.sum()
		require.EqualValues(t, 3*280_000, bytes, "rounds of %d bytes", budget)
		for _, r := range s.rounds {
			for _, w := range r.ranks {
				require.LessOrEqual(t, int(w.reads.bytes())-row, budget)
			}
		}
		if budget > 1<<20 {
			require.Len(t, s.rounds, 1)
			require.LessOrEqual(t, inRounds, 3*4, "rounds of %d bytes", budget)
		} else {
			require.LessOrEqual(t, staged, 2*(budget+row)+4*slotAlign)
		}
	}
}

// TestGap finds what no rank has.
func TestGap(t *testing.T) {
	for _, tc := range []struct {
		ranges []Range
		index  int
		is     bool
	}{
		{[]Range{{0, 10}, {0, 10}}, 10, false},
		{[]Range{{5, 5}, {0, 5}}, 10, false},
		{[]Range{{0, 9}, {2, 3}, {9, 1}}, 10, false},
		{[]Range{{0, 4}, {3, 0}, {7, 0}, {4, 6}}, 10, false},
		{[]Range{{2, 0}, {0, 10}, {0, 0}}, 10, false},
		{[]Range{{0, 4}, {5, 5}}, 4, true},
		{[]Range{{1, 9}}, 0, true},
		{[]Range{{0, 9}}, 9, true},
		{[]Range{{0, 0}}, 0, true},
	} {
		c := division{width: 10, ranges: tc.ranges}
		index, is := c.gap()
		require.Equal(t, []any{tc.index, tc.is}, []any{index, is}, tc.ranges)
	}
}

// TestBatchesAreFrugal: small tensors that ranks have parts of are read by one rank in
// one go, each once, and sent once to each of the others; those that nobody gets are not.
func TestBatchesAreFrugal(t *testing.T) {
	nobody := Slice(0, func(_, _, _ int) Range { return Range{} })
	var list []*placed
	for i := range 50 {
		x := &placed{info: Info{Name: fmt.Sprint(i), DType: memory.BFloat16, Shape: []int{4, 5}}, off: int64(i * 40), from: 2, to: memory.BFloat16}
		var err error
		x.cut, err = []Placement{Shard(0), Own(2), Shard(1), nobody, Own(0)}[i%5].resolve(x.info.Shape, 4)
		require.NoError(t, err)
		x.flat = x.cut.flat()
		list = append(list, x)
	}
	_, err := layOut(list, 4)
	require.NoError(t, err)
	s := newSchedule(list, 4, defaultRound, true)
	direct, inRounds, sends, _, bytes := s.sum()
	require.Equal(t, []int{0, 40, 3, 40 * 40}, []int{direct, inRounds, sends, int(bytes)})
	saves := newSchedule(list, 4, defaultRound, false)
	_, _, _, _, bytes = saves.sum()
	require.EqualValues(t, 40*40, bytes, "what is saved goes straight to the file, or by rows")
}
