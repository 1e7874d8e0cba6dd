package nccl

import (
	"cmp"
	"fmt"
	"github.com/gochorus/chorus/internal/flight"
	"slices"
	"strings"
)

// A transferEnd is one side of a transfer in a group: a send of a rank to another one, or the
// receive.
type transferEnd struct {
	o        *operation
	from, to int
	receives bool
	n        int // in elements
}

// match compares the sends of the group with its receives, if both are in the group. With
// a mismatch NCCL would hang or write past the end of a buffer.
func (g *group) match() error {
	for i := range g.ops {
		g.addEnds(&g.ops[i])
	}
	if len(g.transferEnds) == 0 {
		return nil
	}
	// Group the ends by pair of ranks, sends first, in the order they were issued.
	slices.SortStableFunc(g.transferEnds, func(a, b transferEnd) int {
		if c := comparePairs(a, b); c != 0 {
			return c
		}
		return cmp.Compare(side(a), side(b))
	})
	for rest := g.transferEnds; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(e transferEnd) bool { return comparePairs(e, rest[0]) != 0 })
		if n < 0 {
			n = len(rest)
		}
		if err := matchPair(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// addEnds records the ends of an operation whose other ends may be in the group. In a
// group of a single rank these are only its transfers to itself.
func (g *group) addEnds(o *operation) {
	me := o.comm.rank
	switch {
	case o.Kind == flight.AllToAllV:
		g.addEndsOfAll(o)
	case !flight.Kinds[o.Kind].Peer || len(g.comms) == 1 && o.Root != me:
	case o.Kind == flight.Send:
		g.transferEnds = append(g.transferEnds, transferEnd{o: o, from: me, to: o.Root, n: o.N})
	default:
		g.transferEnds = append(g.transferEnds, transferEnd{o: o, from: o.Root, to: me, n: o.N, receives: true})
	}
}

// addEndsOfAll is addEnds for an operation with a transfer to each rank.
func (g *group) addEndsOfAll(o *operation) {
	me := o.comm.rank
	for rank := range o.comm.size {
		if len(g.comms) > 1 || rank == me {
			g.transferEnds = append(g.transferEnds, transferEnd{o: o, from: me, to: rank, n: o.sends[rank]},
				transferEnd{o: o, from: rank, to: me, n: o.recvs[rank], receives: true})
		}
	}
}

// comparePairs compares the communicator, sender and receiver of two transfers.
func comparePairs(a, b transferEnd) int {
	if a.o.comm.clique != b.o.comm.clique {
		return strings.Compare(a.o.comm.clique.key, b.o.comm.clique.key)
	}
	return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
}

func side(e transferEnd) int {
	if e.receives {
		return 1
	}
	return 0
}

// matchPair compares the ends between one pair of ranks. If one side has more ends, the
// others are issued outside of the group, which a transfer of a rank to itself does not
// allow.
func matchPair(ends []transferEnd) error {
	n := slices.IndexFunc(ends, func(e transferEnd) bool { return e.receives })
	if n < 0 {
		n = len(ends)
	}
	sends, recvs := ends[:n], ends[n:]
	if len(sends) != len(recvs) {
		if e := ends[0]; e.from == e.to {
			return e.o.errSelfTransfer()
		}
		return nil
	}
	for i, s := range sends {
		r := recvs[i]
		if s.o.wire == r.o.wire && s.n*s.o.unit == r.n*r.o.unit {
			continue
		}
		return fmt.Errorf("nccl: %s on rank %d of %d: it sends %d elements of %s to rank %d, which receives %d of %s in the same group: want as many of the same type: %w",
			s.o.Kind, s.from, s.o.comm.size, s.n, s.o.DType, s.to, r.n, r.o.DType, ErrorInvalidUsage)
	}
	return nil
}

// errSelfTransfer returns the error of a transfer of a rank to itself that has only one end.
func (o *operation) errSelfTransfer() error {
	return fmt.Errorf("nccl: %s on rank %d of %d: it is its own peer: issue the send and the receive within one Group: %w",
		o.Kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
}
