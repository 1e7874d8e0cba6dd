package ddp

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Each setting has two turns, whose mean time is the same for all settings, and the steps after a change are not measured.
func TestPlan(t *testing.T) {
	p := plan{settings: 3, steps: 2}
	require.Equal(t, 3+2*3*3, p.end())
	var of []int
	for ended := range p.end() {
		of = append(of, p.next(ended))
	}
	require.Equal(t, []int{0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0}, of)
	at := make([]int, p.settings)
	for ended, k := range of[warmUp:] {
		at[k] += ended
	}
	require.Equal(t, at[0], at[1])
	require.Equal(t, at[0], at[2])
	require.True(t, p.complete([][]time.Duration{make([]time.Duration, 4), make([]time.Duration, 4), make([]time.Duration, 4)}))
	require.False(t, p.complete([][]time.Duration{make([]time.Duration, 4), make([]time.Duration, 4)}))
	require.False(t, p.complete([][]time.Duration{make([]time.Duration, 4), make([]time.Duration, 3), make([]time.Duration, 4)}))
}

// Single slow steps of some ranks do not change the median, whatever the order of ranks and steps.
func TestMedians(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		times := make([][][]time.Duration, 3)
		want := make([]time.Duration, 4)
		for k := range want {
			want[k] = time.Duration(1000 + r.IntN(1000))
			var all []time.Duration
			for x := range 15 {
				all = append(all, want[k]+time.Duration(x-7)*time.Duration(1+r.IntN(40)))
			}
			all[14], all[13] = time.Hour, time.Minute
			r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for rank, part := range slices.Collect(slices.Chunk(all, 5)) {
				times[rank] = append(times[rank], part)
			}
		}
		require.Equal(t, want, medians(times))
	}
}
