package comm

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Op is a reduction.
type Op = nccl.Op

// The reductions. Avg divides the sum by the number of ranks.
const (
	Sum  = nccl.Sum
	Prod = nccl.Prod
	Max  = nccl.Max
	Min  = nccl.Min
	Avg  = nccl.Avg
)

// Shards is one slice for each local rank of a group.
type Shards[T memory.Element] []memory.Slice[T]

// Make allocates n elements on each local rank, in the order of the group's
// streams.
func Make[T memory.Element](g *Group, n int) (Shards[T], error) {
	if err := g.check("make"); err != nil {
		return nil, err
	}
	xs := make(Shards[T], len(g.members))
	for i := range g.members {
		var err error
		if xs[i], err = memory.Make[T](g.members[i].stream, n); err != nil {
			return nil, errors.Join(err, xs.Close())
		}
	}
	return xs, nil
}

// Close frees the slices.
func (xs Shards[T]) Close() error {
	var errs []error
	for _, x := range xs {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

// AllReduce enqueues, in place, the reduction of xs over all ranks: one slice
// for each local rank, all of one length. Collective.
func AllReduce[T memory.Element](g *Group, op Op, xs ...memory.Slice[T]) error {
	if err := checkShards(g, "all-reduce", xs, true); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.AllReduce(m.comm, m.stream, xs[i], xs[i], op)
	})
}

// AllGather enqueues the concatenation of src over all ranks, by rank, into each
// dst, which is Size times as long. Collective.
func AllGather[T memory.Element](g *Group, dst, src Shards[T]) error {
	if err := checkPair(g, "all-gather", dst, src); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.AllGather(m.comm, m.stream, dst[i], src[i])
	})
}

// ReduceScatter enqueues the reduction of src over all ranks, of which each rank
// gets its part into dst; src is Size times as long. Collective.
func ReduceScatter[T memory.Element](g *Group, op Op, dst, src Shards[T]) error {
	if err := checkPair(g, "reduce-scatter", dst, src); err != nil {
		return err
	}
	return g.each(func(i int, m *member) error {
		return nccl.ReduceScatter(m.comm, m.stream, dst[i], src[i], op)
	})
}

// each issues one operation on every local rank, within one NCCL group if there
// are several.
func (g *Group) each(issue func(i int, m *member) error) error {
	g.issuing.Lock()
	defer g.issuing.Unlock()
	return g.inTurn(issue)
}

// inTurn is each for what has taken issuing.
func (g *Group) inTurn(issue func(i int, m *member) error) error {
	var err error
	if len(g.members) == 1 {
		err = issue(0, &g.members[0])
	} else {
		err = nccl.Group(g.members[0].comm, func() error {
			for i := range g.members {
				if err := issue(i, &g.members[i]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.settle(err)
}

// settle breaks the group when NCCL refused an operation on one rank, because
// the others wait for it. An argument error leaves the group as it is.
func (g *Group) settle(err error) error {
	if _, refused := errors.AsType[*nccl.Error](err); refused {
		return g.fail(err)
	}
	return err
}

// checkShards checks one slice for each local rank, and that the group's streams
// keep their memory.
func checkShards[T memory.Element](g *Group, op string, xs []memory.Slice[T], sameLen bool) error {
	if err := g.check(op); err != nil {
		return err
	}
	if len(xs) != len(g.members) {
		return fmt.Errorf("comm: %s: %d slices for %d local ranks: %w", op, len(xs), len(g.members), ErrMismatch)
	}
	for i := range xs {
		m := &g.members[i]
		if sameLen && xs[i].Len() != xs[0].Len() {
			return fmt.Errorf("comm: %s: rank %d has %d elements, rank %d has %d: %w",
				op, m.comm.Rank(), xs[i].Len(), g.Rank(), xs[0].Len(), ErrMismatch)
		}
		if err := xs[i].Check(op, m.comm.Device()); err != nil {
			return unfit(fmt.Errorf("comm: %w (rank %d)", err, m.comm.Rank()))
		}
		if err := xs[i].RecordStream(m.stream); err != nil {
			return err
		}
	}
	return nil
}

func checkPair[T memory.Element](g *Group, op string, dst, src Shards[T]) error {
	if err := checkShards(g, op, dst, true); err != nil {
		return err
	}
	return checkShards(g, op, src, true)
}

// Send enqueues the sending of x from the first local rank to rank peer, which
// receives as many elements. Sends and receives that may wait for each other
// are issued together by SendRecv.
func Send[T memory.Element](g *Group, peer int, x memory.Slice[T]) error {
	return g.first("send", func(m *member) error { return nccl.Send(m.comm, m.stream, x, peer) })
}

// Recv enqueues the receiving of x on the first local rank from rank peer.
func Recv[T memory.Element](g *Group, peer int, x memory.Slice[T]) error {
	return g.first("receive", func(m *member) error { return nccl.Recv(m.comm, m.stream, x, peer) })
}

// SendRecv enqueues the sending of src to rank to and the receiving of dst from
// rank from, on the first local rank, as one operation.
func SendRecv[T memory.Element](g *Group, to int, src memory.Slice[T], from int, dst memory.Slice[T]) error {
	return g.first("send and receive", func(m *member) error {
		return nccl.Group(m.comm, func() error {
			if err := nccl.Send(m.comm, m.stream, src, to); err != nil {
				return err
			}
			return nccl.Recv(m.comm, m.stream, dst, from)
		})
	})
}

// first issues an operation of one rank.
func (g *Group) first(op string, issue func(m *member) error) error {
	if err := g.check(op); err != nil {
		return err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	return g.settle(issue(&g.members[0]))
}
