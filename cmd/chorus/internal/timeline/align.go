package timeline

import (
	"cmp"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/timeline"
)

// align moves the times of all hosts to the clock of the first rank's host, and its origin to the
// first record. All processes of a host share a clock.
func (j *Job) align() {
	offsets := j.offsets()
	first := int64(math.MaxInt64)
	for _, r := range j.Ranks {
		r.shift(-offsets[r.boot])
		r.each(func(x *timeline.Record) { first = min(first, x.Begin) })
	}
	for _, r := range j.Ranks {
		r.shift(-first)
	}
}

func (r *Rank) shift(by int64) {
	r.each(func(x *timeline.Record) { x.Begin, x.End = x.Begin+by, x.End+by })
}

func (r *Rank) each(visit func(*timeline.Record)) {
	for _, s := range r.slices {
		visit(&s.Record)
	}
	for _, list := range [][]timeline.Record{r.host, r.ranges, r.memory} {
		for i := range list {
			visit(&list[i])
		}
	}
}

// offsets returns how far the clock of each host is ahead of the first rank's host. A collective of
// all its ranks ends on all hosts at nearly the same time, so the offset is the median difference
// of these ends. Hosts are compared with the first host, or with one that was compared before.
func (j *Job) offsets() map[string]int64 {
	known := map[string]int64{}
	if len(j.Ranks) > 0 {
		known[j.Ranks[0].boot] = 0
	}
	ends := j.ends()
	for {
		found := false
		for _, r := range j.Ranks {
			if _, ok := known[r.boot]; ok {
				continue
			}
			if by, ok := offsetTo(ends, known, r.boot); ok {
				known[r.boot], found = by, true
			}
		}
		if !found {
			return known // hosts without a common collective keep their own clock
		}
	}
}

// ends returns when each collective ended on each host.
func (j *Job) ends() map[collective]map[string]int64 {
	ends := map[collective]map[string]int64{}
	for _, r := range j.Ranks {
		for _, s := range r.slices {
			for _, o := range s.Ops {
				if o.Transfer || o.Peer >= 0 {
					continue // the ranks of these end at different times
				}
				k := collective{o.Group, o.Sequence}
				if ends[k] == nil {
					ends[k] = map[string]int64{}
				}
				ends[k][r.boot] = max(cmp.Or(ends[k][r.boot], math.MinInt64), s.End)
			}
		}
	}
	return ends
}

func offsetTo(ends map[collective]map[string]int64, known map[string]int64, host string) (int64, bool) {
	var list []int64
	for _, on := range ends {
		end, ok := on[host]
		if !ok {
			continue
		}
		for other, by := range known {
			e, ok := on[other]
			if offset := end - (e - by); ok && offset >= -mostOrigin && offset <= mostOrigin {
				list = append(list, offset)
			}
		}
	}
	if len(list) == 0 {
		return 0, false
	}
	slices.Sort(list)
	return list[len(list)/2], true
}

// A collective names a collective of a job.
type collective struct {
	group    string
	sequence uint64
}
