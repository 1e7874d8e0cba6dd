package timeline

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/timeline"
)

// tallyArrivals counts who arrives last at the collectives of each group whose ranks all have a timeline. Ranks are compared
// by how long a collective took on their streams, which does not depend on the clocks of the hosts.
func (j *Job) tallyArrivals() map[*Rank]*analyze.Tally {
	all := map[*Rank]*analyze.Tally{}
	byGroup := map[string]map[*Rank][]analyze.Arrival{}
	var order []string
	for _, r := range j.Ranks {
		all[r] = new(analyze.Tally)
		for _, s := range r.slices {
			if s.Kind != timeline.Collective || len(s.Ops) != 1 || s.Ops[0].Transfer || s.Ops[0].Peer >= 0 {
				continue // of a batch it is not known which operation waited, and not all ranks wait for a root
			}
			o := &s.Ops[0]
			if byGroup[o.Group] == nil {
				byGroup[o.Group] = map[*Rank][]analyze.Arrival{}
				order = append(order, o.Group)
			}
			byGroup[o.Group][r] = append(byGroup[o.Group][r], analyze.Arrival{Sequence: o.Sequence, Took: s.End - s.Begin})
		}
	}
	for _, id := range order {
		var members []*Rank
		var list []analyze.Arrivals
		for _, r := range j.Ranks {
			if a := byGroup[id][r]; len(a) > 0 {
				slices.SortFunc(a, func(a, b analyze.Arrival) int { return cmp.Compare(a.Sequence, b.Sequence) })
				members, list = append(members, r), append(list, analyze.Arrivals{List: a})
			}
		}
		if len(members) != j.sizes[id] {
			continue
		}
		counts, _ := analyze.CompareArrivals(list, 0)
		for i, r := range members {
			all[r].Add(counts[i])
		}
	}
	return all
}

// writeArrivals writes how often each rank arrived last, the one that held the others up the longest first.
func (s *Summary) writeArrivals(w io.Writer) error {
	list := slices.Clone(s.Ranks)
	slices.SortStableFunc(list, func(a, b RankShare) int { return cmp.Compare(b.Arrivals.HeldUp, a.Arrivals.HeldUp) })
	var b strings.Builder
	for _, r := range list {
		t := r.Arrivals
		if t.Last == 0 {
			continue
		}
		if b.Len() == 0 {
			b.WriteString("\nLast to arrive at collectives, which take the shortest time on the stream of the last rank:\n")
		}
		fmt.Fprintf(&b, "rank %d on %s: %d of %d, and the others waited %s for it, %s each time", r.Rank, r.Host, t.Last, t.Compared, round(t.HeldUp), round(t.Mean()))
		if t.Straggles() {
			b.WriteString(": it is a straggler")
		}
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
