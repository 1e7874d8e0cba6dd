package analyze

import (
	"cmp"
	"slices"
	"time"
)

// An Arrival is a rank's part of a collective.
type Arrival struct {
	Sequence uint64 // of the collective in its group
	Called   int64  // nanoseconds on the clock of the rank's host; 0 if not known
	Took     int64  // nanoseconds on the rank's stream; 0 if not known
}

// Arrivals has the arrivals of a rank in ascending order. Ranks with the same Clock, unless it is "", share it.
type Arrivals struct {
	Clock string
	List  []Arrival
}

// A Tally counts how often a rank arrived last.
type Tally struct {
	Compared  uint64        `json:"compared"`   // collectives
	OnStreams uint64        `json:"on_streams"` // of these, the ones compared by times on the streams of devices
	Last      uint64        `json:"last"`       // how often the rank arrived last
	HeldUp    time.Duration `json:"held_up_ns"` // how much earlier the collectives would have begun without it: up to the rank before it
}

// Add adds the counts of another period.
func (t *Tally) Add(o Tally) {
	t.Compared, t.OnStreams, t.Last, t.HeldUp = t.Compared+o.Compared, t.OnStreams+o.OnStreams, t.Last+o.Last, t.HeldUp+o.HeldUp
}

// CompareArrivals compares when the ranks of a group arrive at its collectives,
// to find the rank that the others wait for. It compares all collectives after
// the given one that every rank has, and returns the tally of each rank and the
// last collective that it compared. It ignores a collective whose times are not
// comparable.
//
// There are two methods. A collective of all ranks ends at about the same moment everywhere, so the rank that arrives last is the
// one on whose stream it took the shortest time. This needs no common clock, and holds between hosts. Where the times
// on the streams are not known, the times of the calls are compared, but only of ranks that share a clock: a call may come
// long before the work on the device.
func CompareArrivals(ranks []Arrivals, after uint64) (tallies []Tally, last uint64) {
	tallies, last = make([]Tally, len(ranks)), after
	if len(ranks) < 2 {
		return tallies, last
	}
	shared := ranks[0].Clock != "" && !slices.ContainsFunc(ranks, func(r Arrivals) bool { return r.Clock != ranks[0].Clock })
	row := make([]Arrival, len(ranks))
	for _, first := range ranks[0].List {
		if first.Sequence <= last || !gatherArrivals(ranks, first.Sequence, row) {
			continue
		}
		rank, by, onStreams, ok := latest(row, shared)
		if !ok {
			continue
		}
		last = first.Sequence
		for i := range tallies {
			tallies[i].Compared++
			if onStreams {
				tallies[i].OnStreams++
			}
		}
		tallies[rank].Last++
		tallies[rank].HeldUp += by
	}
	return tallies, last
}

// gatherArrivals sets row to the arrivals of all ranks at a collective.
func gatherArrivals(ranks []Arrivals, sequence uint64, row []Arrival) bool {
	for i := range ranks {
		k, found := slices.BinarySearchFunc(ranks[i].List, sequence, func(a Arrival, s uint64) int { return cmp.Compare(a.Sequence, s) })
		if !found {
			return false
		}
		row[i] = ranks[i].List[k]
	}
	return true
}

// latest returns the rank that arrived last, and how long after the rank before
// it, unless both arrived at the same time.
func latest(row []Arrival, shared bool) (rank int, by time.Duration, onStreams, ok bool) {
	at := func(i int) int64 { return -row[i].Took }
	onStreams = !slices.ContainsFunc(row, func(a Arrival) bool { return a.Took <= 0 })
	if !onStreams {
		if !shared || slices.ContainsFunc(row, func(a Arrival) bool { return a.Called <= 0 }) {
			return 0, 0, false, false
		}
		at = func(i int) int64 { return row[i].Called }
	}
	before := -1
	for i := 1; i < len(row); i++ {
		switch {
		case at(i) > at(rank):
			rank, before = i, rank
		case before < 0 || at(i) > at(before):
			before = i
		}
	}
	by = time.Duration(at(rank) - at(before))
	return rank, by, onStreams, by > 0
}

const (
	minCompared = 8
	// minHeldUp is the shortest mean time for which a rank is named. Ranks of a healthy group differ by some microseconds.
	minHeldUp = time.Millisecond
)

// Straggles reports whether the rank holds the others up again and again: it came last nine times out of ten, and a
// millisecond or more after the others on average. With two ranks of equal speed, eight collectives are enough
// for one in 128 groups to look so by chance, if the times differed by as much as a millisecond.
func (t Tally) Straggles() bool {
	return t.Compared >= minCompared && t.Last*10 >= t.Compared*9 && t.Mean() >= minHeldUp
}

// Mean returns how long the others waited each time that the rank came last.
func (t Tally) Mean() time.Duration {
	if t.Last == 0 {
		return 0
	}
	return t.HeldUp / time.Duration(t.Last)
}

// Evidence says by which times the collectives were compared.
func (t Tally) Evidence() string {
	switch t.OnStreams {
	case t.Compared:
		return "by the times on the streams: the rank that arrives last waits least"
	case 0:
		return "by the times of the calls on one host: work on the device may come later"
	}
	return "by the times on the streams, or of the calls on one host"
}
