package nccl

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// An end is one side of a transfer of a group: what a rank sends to another, or
// receives from it.
type end struct {
	o        *operation
	from, to int
	receives bool
	n        int // in elements
}

// match compares the sends of the group with its receives, where both are in it. NCCL
// would hang or write past the end of a buffer.
func (g *group) match() error {
	for i := range g.ops {
		g.collect(&g.ops[i])
	}
	if len(g.ends) == 0 {
		return nil
	}
	// Those of one way come together, sends first, in the order in which they were issued.
	slices.SortStableFunc(g.ends, func(a, b end) int {
		if c := way(a, b); c != 0 {
			return c
		}
		return cmp.Compare(side(a), side(b))
	})
	for rest := g.ends; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(e end) bool { return way(e, rest[0]) != 0 })
		if n < 0 {
			n = len(rest)
		}
		if err := matchWay(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// collect notes the ends of an operation that may have their other ends in the group: of
// a single rank those of what it sends itself.
func (g *group) collect(o *operation) {
	me := o.comm.rank
	switch {
	case o.kind == allToAllV:
		g.collectAll(o)
	case !kinds[o.kind].peer || len(g.comms) == 1 && o.root != me:
	case o.kind == send:
		g.ends = append(g.ends, end{o: o, from: me, to: o.root, n: o.n})
	default:
		g.ends = append(g.ends, end{o: o, from: o.root, to: me, n: o.n, receives: true})
	}
}

// collectAll is collect for a transfer with each rank.
func (g *group) collectAll(o *operation) {
	me := o.comm.rank
	for rank := range o.comm.size {
		if len(g.comms) > 1 || rank == me {
			g.ends = append(g.ends, end{o: o, from: me, to: rank, n: o.sends[rank]},
				end{o: o, from: rank, to: me, n: o.recvs[rank], receives: true})
		}
	}
}

// way compares from which rank to which, of which communicator, transfers go.
func way(a, b end) int {
	if a.o.comm.clique != b.o.comm.clique {
		return strings.Compare(a.o.comm.clique.key, b.o.comm.clique.key)
	}
	return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
}

func side(e end) int {
	if e.receives {
		return 1
	}
	return 0
}

// matchWay compares the ends of one way. Where there are more of one side, the others
// are issued elsewhere, which a rank cannot do for itself.
func matchWay(ends []end) error {
	n := slices.IndexFunc(ends, func(e end) bool { return e.receives })
	if n < 0 {
		n = len(ends)
	}
	sends, recvs := ends[:n], ends[n:]
	if len(sends) != len(recvs) {
		if e := ends[0]; e.from == e.to {
			return e.o.alone()
		}
		return nil
	}
	for i, s := range sends {
		r := recvs[i]
		if s.o.wire == r.o.wire && s.n*s.o.unit == r.n*r.o.unit {
			continue
		}
		return fmt.Errorf("nccl: %s on rank %d of %d: it sends %d elements of %s to rank %d, which receives %d of %s in the same group: want as many of the same type: %w",
			s.o.kind, s.from, s.o.comm.size, s.n, s.o.dtype, s.to, r.n, r.o.dtype, ErrorInvalidUsage)
	}
	return nil
}

// alone is the error of a transfer of a rank with itself that has one end only.
func (o *operation) alone() error {
	return fmt.Errorf("nccl: %s on rank %d of %d: it is its own peer: issue the send and the receive within one Group: %w",
		o.kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
}
