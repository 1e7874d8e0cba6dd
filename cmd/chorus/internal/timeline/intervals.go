package timeline

import (
	"cmp"
	"slices"
)

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
