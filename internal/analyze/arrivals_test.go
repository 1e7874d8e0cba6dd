package analyze_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/analyze"
)

// group simulates collectives of ranks whose calls are scattered by noise, and of which one is late.
// Each host's clock has an offset of its own.
func group(r *rand.Rand, hosts []string, steps int, noise, late time.Duration, guilty int, streams bool) []analyze.Arrivals {
	offsets := map[string]int64{}
	ranks := make([]analyze.Arrivals, len(hosts))
	for i, h := range hosts {
		if offsets[h] == 0 {
			offsets[h] = 1 + r.Int64N(1e15)
		}
		ranks[i].Clock = h
	}
	at := int64(0)
	for s := range steps {
		arrive, end := make([]int64, len(hosts)), int64(0)
		for i := range hosts {
			arrive[i] = at + 10e6 + r.Int64N(int64(noise))
			if i == guilty {
				arrive[i] += int64(late)
			}
			end = max(end, arrive[i]+20e3)
		}
		for i, h := range hosts {
			a := analyze.Arrival{Sequence: uint64(s + 1), Called: arrive[i] + offsets[h]}
			if streams {
				a.Took = end - arrive[i]
			}
			ranks[i].List = append(ranks[i].List, a)
		}
		at = end
	}
	return ranks
}

// The late rank is named within 100 steps, on one host and between hosts, and no rank is named without one.
func TestCompare(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, hosts := range [][]string{{"a", "a"}, {"a", "b"}, {"a", "a", "a", "a", "a", "a", "a", "a"}, {"a", "a", "b", "b", "c", "c"}} {
		guilty := r.IntN(len(hosts))
		for _, streams := range []bool{false, true} {
			list := group(r, hosts, 100, 200*time.Microsecond, 5*time.Millisecond, guilty, streams)
			tallies, last := analyze.CompareArrivals(list, 0)
			if !streams && hosts[0] != hosts[len(hosts)-1] {
				require.Zero(t, tallies[0].Compared, "the clocks of hosts are not comparable")
				require.Zero(t, last)
				continue
			}
			require.Equal(t, uint64(100), last)
			for i, x := range tallies {
				require.Equal(t, i == guilty, x.Straggles(), "rank %d of %v: %+v", i, hosts, x)
			}
			require.Equal(t, uint64(100), tallies[guilty].Last)
			require.InDelta(t, 5e6, tallies[guilty].Mean(), 200e3)
			again, _ := analyze.CompareArrivals(list, 90)
			require.Equal(t, uint64(10), again[guilty].Compared, "collectives are compared once")
			again[guilty].Add(tallies[guilty])
			require.Equal(t, uint64(110), again[guilty].Last)

			healthy, _ := analyze.CompareArrivals(group(r, hosts, 100, 200*time.Microsecond, 0, guilty, streams), 0)
			for _, x := range healthy {
				require.False(t, x.Straggles(), "%+v", x)
			}
		}
	}
}

func TestCompareOnlyWhatAllHave(t *testing.T) {
	list := func(clock string, a ...analyze.Arrival) analyze.Arrivals {
		return analyze.Arrivals{Clock: clock, List: a}
	}
	at := func(s uint64, called, took int64) analyze.Arrival {
		return analyze.Arrival{Sequence: s, Called: called, Took: took}
	}
	tallies, last := analyze.CompareArrivals([]analyze.Arrivals{
		list("a", at(3, 10, 0), at(5, 20, 7), at(6, 30, 9)),
		list("a", at(4, 11, 0), at(5, 21, 8), at(6, 30, 9), at(7, 40, 1)),
	}, 0)
	require.Equal(t, uint64(5), last, "equal times have no last rank")
	require.Equal(t, []analyze.Tally{{Compared: 1, OnStreams: 1, Last: 1, HeldUp: 1}, {Compared: 1, OnStreams: 1}}, tallies)
	tallies, _ = analyze.CompareArrivals([]analyze.Arrivals{list("", at(1, 1, 0)), list("", at(1, 2, 0))}, 0)
	require.Zero(t, tallies[0].Compared, "clocks without names are not shared")
	tallies, _ = analyze.CompareArrivals([]analyze.Arrivals{list("a", at(1, 1, 1))}, 0)
	require.Equal(t, []analyze.Tally{{}}, tallies, "a single rank waits for none")
}

func TestEvidence(t *testing.T) {
	require.Contains(t, analyze.Tally{Compared: 2, OnStreams: 2}.Evidence(), "waits least")
	require.Contains(t, analyze.Tally{Compared: 2}.Evidence(), "calls on one host: work on the device may come later")
	require.Contains(t, analyze.Tally{Compared: 2, OnStreams: 1}.Evidence(), "or of the calls")
	require.Zero(t, analyze.Tally{}.Mean())
}
