package monitor

import (
	"fmt"
	"time"

	"github.com/gochorus/chorus/internal/analyze"
)

// tallies count who arrives last in each group of a job, over all states that were read.
type tallies struct {
	epoch, restarts int
	groups          map[string]*groupTally
}

type groupTally struct {
	last  uint64 // the last collective that was compared
	ranks map[int]*analyze.Tally
}

// add compares the arrivals of a state that is newer than all before it, and sets the counts of its ranks.
func (t *tallies) add(j *Job) {
	if t.groups == nil || t.epoch != j.Epoch || t.restarts != j.Restarts {
		*t = tallies{j.Epoch, j.Restarts, map[string]*groupTally{}}
	}
	all := map[string][]*Member{}
	j.members(func(_ *Rank, m *Member) { all[m.ID] = append(all[m.ID], m) })
	for id := range t.groups {
		if all[id] == nil {
			delete(t.groups, id) // it has ended
		}
	}
	for id, list := range all {
		g := t.groups[id]
		if g == nil {
			g = &groupTally{ranks: map[int]*analyze.Tally{}}
			t.groups[id] = g
		}
		g.add(list)
	}
	j.findStragglers()
}

// add compares the members of a group, if all ranks have answered.
func (g *groupTally) add(list []*Member) {
	for _, m := range list {
		if g.ranks[m.Rank] == nil {
			g.ranks[m.Rank] = new(analyze.Tally)
		}
	}
	if len(list) == list[0].Size {
		var counts []analyze.Tally
		ranks := make([]analyze.Arrivals, len(list))
		for i, m := range list {
			ranks[i].Clock = m.Clock
			for _, a := range m.Group.Arrivals {
				ranks[i].List = append(ranks[i].List, analyze.Arrival{Sequence: uint64(a[0]), Called: a[1], Took: a[2]})
			}
		}
		counts, g.last = analyze.CompareArrivals(ranks, g.last)
		for i, m := range list {
			g.ranks[m.Rank].Add(counts[i])
		}
	}
	for _, m := range list {
		m.Tally, m.Group.Arrivals, m.Clock = *g.ranks[m.Rank], nil, ""
	}
}

// findStragglers names the ranks that the others wait for again and again.
func (j *Job) findStragglers() {
	j.members(func(r *Rank, m *Member) {
		if t := m.Tally; t.Straggles() {
			j.Findings = append(j.Findings, fmt.Sprintf("rank %d (host %s, process %d) arrives last in %s: in %d of %d collectives that were compared, %s after the others on average (%s)",
				r.Rank, r.Host, r.PID, m.title(), t.Last, t.Compared, milliseconds(t.Mean()), t.Evidence()))
		}
	})
}

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }
