package analyze

import (
	"cmp"
	"fmt"
	"slices"
)

// A flow is an arrow between slices of two ranks.
type flow struct {
	name, id        string
	from, to        *slice
	leaves, arrives int64
}

// flows connects the ranks of each collective: from the rank that arrived last, which all others
// waited for, to the others; and each send with its receive.
func (j *Timeline) flows() (list []flow) {
	groups := map[collective][]*slice{}
	var order []collective
	for _, r := range j.Ranks {
		for _, s := range r.slices {
			for _, o := range s.Ops {
				k := collective{o.Group, o.Sequence}
				if o.Transfer || slices.Contains(groups[k], s) {
					continue
				}
				if groups[k] == nil {
					order = append(order, k)
				}
				groups[k] = append(groups[k], s)
			}
		}
	}
	for _, k := range order {
		last := slices.MaxFunc(groups[k], func(a, b *slice) int { return cmp.Compare(a.Begin, b.Begin) })
		for _, s := range groups[k] {
			if s.rank != last.rank {
				list = addFlow(list, "collective", fmt.Sprintf("%s/%d/%d", k.group, k.sequence, s.rank.Number), last, s)
			}
		}
	}
	return j.transfers(list)
}

// A transfer names the nth send of a rank of a group to another.
type transfer struct {
	group    string
	from, to int
	number   int
}

// transfers adds the flows from sends to receives.
func (j *Timeline) transfers(list []flow) []flow {
	sends, receives := map[transfer]*slice{}, map[transfer]*slice{}
	var order []transfer
	for _, r := range j.Ranks {
		count := map[transfer]int{}
		for _, s := range r.slices {
			for _, o := range s.Ops {
				if !o.Transfer {
					continue
				}
				k, at := transfer{group: o.Group, from: o.Rank, to: o.Peer}, sends
				if o.Name == "ncclRecv" {
					k.from, k.to, at = o.Peer, o.Rank, receives
				}
				plain := k
				k.number = count[plain]
				count[plain]++
				if at[k] = s; o.Name != "ncclRecv" {
					order = append(order, k)
				}
			}
		}
	}
	for _, k := range order {
		if to := receives[k]; to != nil && to.rank != sends[k].rank {
			list = addFlow(list, "transfer", fmt.Sprintf("%s/%d>%d/%d", k.group, k.from, k.to, k.number), sends[k], to)
		}
	}
	return list
}

// addFlow adds a flow that ends within the target and not before its source. Slices without a
// duration, and ranks whose clocks differ too much for that, have none.
func addFlow(list []flow, name, id string, from, to *slice) []flow {
	f := flow{name: name, id: id, from: from, to: to, leaves: from.Begin}
	earliest := max(to.Begin, f.leaves)
	if f.arrives = earliest + (to.End-earliest)/2; from.End <= from.Begin || f.arrives >= to.End {
		return list
	}
	return append(list, f)
}

// An interval is [from, to).
type interval struct{ from, to int64 }

// A set is intervals in ascending order that neither touch nor overlap.
type set []interval

// unite returns the union of intervals in any order.
func unite(list []interval) set {
	list = slices.DeleteFunc(slices.Clone(list), func(x interval) bool { return x.to <= x.from })
	slices.SortFunc(list, func(a, b interval) int { return cmp.Compare(a.from, b.from) })
	var out set
	for _, x := range list {
		if n := len(out); n > 0 && x.from <= out[n-1].to {
			out[n-1].to = max(out[n-1].to, x.to)
		} else {
			out = append(out, x)
		}
	}
	return out
}

// intersect returns what both sets have.
func (a set) intersect(b set) (out set) {
	for len(a) > 0 && len(b) > 0 {
		if x := (interval{max(a[0].from, b[0].from), min(a[0].to, b[0].to)}); x.from < x.to {
			out = append(out, x)
		}
		if a[0].to < b[0].to {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

// subtract returns what a has and b does not have.
func (a set) subtract(b set) (out set) {
	for _, x := range a {
		for len(b) > 0 && b[0].to <= x.from {
			b = b[1:]
		}
		for _, y := range b {
			if y.from >= x.to {
				break
			}
			if y.from > x.from {
				out = append(out, interval{x.from, y.from})
			}
			x.from = max(x.from, y.to)
		}
		if x.from < x.to {
			out = append(out, x)
		}
	}
	return out
}

// length returns the total length.
func (a set) length() (sum int64) {
	for _, x := range a {
		sum += x.to - x.from
	}
	return sum
}

// longest returns the length of the longest interval.
func (a set) longest() (most int64) {
	for _, x := range a {
		most = max(most, x.to-x.from)
	}
	return most
}
