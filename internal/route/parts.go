package route

import (
	"github.com/gochorus/chorus/internal/flight"
)

// unit is the alignment of parts in bytes.
const unit = 16

// gatheredBytes is the maximum size of the elements of all ranks for which each rank reduces
// everything itself: one transfer instead of two.
const gatheredBytes = 256 << 10

// A shape describes how the ranks divide an ordered reduction into rounds and parts. It is the
// same on all ranks. All lengths count elements.
type shape struct {
	kind   flight.Kind
	ranks  int
	root   int
	size   int   // bytes of an element
	n      int   // elements of a rank's part, or of all if the ranks have no parts
	counts []int // of a ReduceScatterV
	most   int   // elements that a rank may receive in a round, together with its own
}

// A span is a range of elements.
type span struct{ from, n int }

// whole reports whether a rank that needs the result reduces all elements in one round.
func (x *shape) whole() bool {
	return (x.kind == flight.AllReduce || x.kind == flight.Reduce) && x.n*x.size*x.ranks <= min(gatheredBytes, x.most*x.size)
}

// divides reports whether the ranks divide each round: then its length is a multiple of
// all parts' alignment.
func (x *shape) divides() bool { return x.kind == flight.AllReduce || x.kind == flight.Reduce }

// align returns the number of elements to whose multiples parts are rounded.
func (x *shape) align() int { return unit / x.size }

// step returns the number of elements of a full round: of all ranks if they divide it, and
// otherwise of each rank's part.
func (x *shape) step() int {
	part := max(x.most/x.ranks/x.align(), 1) * x.align()
	if x.divides() {
		return part * x.ranks
	}
	return part
}

// width returns the maximum number of elements of a part in a round.
func (x *shape) width() int {
	if x.divides() {
		return x.step() / x.ranks
	}
	return x.step()
}

// rounds returns the number of rounds.
func (x *shape) rounds() int {
	if x.n == 0 {
		return 0
	}
	if x.whole() {
		return 1
	}
	longest := x.n
	if x.kind == flight.ReduceScatterV {
		longest = 0
		for _, n := range x.counts {
			longest = max(longest, n)
		}
	}
	return ceil(longest, x.step())
}

// round returns the elements of a round that the ranks divide.
func (x *shape) round(k int) span {
	if x.whole() {
		return span{0, x.n}
	}
	from := k * x.step()
	return span{from, min(x.step(), x.n-from)}
}

// part returns the elements of the source that a rank reduces in a round.
func (x *shape) part(k, rank int) span {
	switch x.kind {
	case flight.ReduceScatter:
		from := k * x.step()
		return span{rank*x.n + from, min(x.step(), x.n-from)}
	case flight.ReduceScatterV:
		from, before := k*x.step(), 0
		for _, n := range x.counts[:rank] {
			before += n
		}
		return span{before + from, max(min(x.step(), x.counts[rank]-from), 0)}
	}
	all := x.round(k)
	if x.whole() {
		if x.kind == flight.Reduce && rank != x.root {
			all.n = 0
		}
		return all
	}
	each := ceil(ceil(all.n, x.ranks), x.align()) * x.align()
	from := min(rank*each, all.n)
	return span{all.from + from, min(each, all.n-from)}
}

// even reports whether all ranks have parts of the same length in a round.
func (x *shape) even(k int) bool { return x.round(k).n == x.ranks*x.part(k, 0).n }

func ceil(n, by int) int { return (n + by - 1) / by }
