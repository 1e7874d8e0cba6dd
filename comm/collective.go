package comm

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/route"
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

// AllReduce enqueues, in place, the reduction of xs over all ranks. xs has one slice for
// each local rank, all of the same length. Collective.
func AllReduce[T memory.Element](on Issuer, op Op, xs ...memory.Slice[T]) error {
	g, b := groupOf(on)
	if err := checkShards(g, "all-reduce", xs, true); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllReduce(m.on, m.stream, xs[i], xs[i], op)
	})
}

// AllGather enqueues the concatenation of src over all ranks, by rank, into each dst. dst
// is Size times as long as src. Collective.
func AllGather[T memory.Element](on Issuer, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkPair(g, "all-gather", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllGather(m.on, m.stream, dst[i], src[i])
	})
}

// ReduceScatter enqueues the reduction of src over all ranks; each rank gets its part in
// dst. src is Size times as long as dst. Collective.
func ReduceScatter[T memory.Element](on Issuer, op Op, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkPair(g, "reduce-scatter", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.ReduceScatter(m.on, m.stream, dst[i], src[i], op)
	})
}

// issue adds one operation of every local rank to a batch, or enqueues them if b is nil.
func (g *Group) issue(b *Batch, issue func(i int, m *member) error) error {
	if b != nil {
		return b.each(issue)
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	return g.enqueueAll(issue)
}

// enqueueAll enqueues one operation of every local rank, as one batch if there are several. The
// caller holds issuing.
func (g *Group) enqueueAll(issue func(i int, m *member) error) error {
	if len(g.members) == 1 && len(g.routers) == 0 {
		return g.breakIfRefused(issue(0, &g.firstDirect))
	}
	for i := range g.members {
		if err := issue(i, &g.members[i]); err != nil {
			g.batch.Reset()
			return g.breakIfRefused(err)
		}
	}
	return g.breakIfRefused(g.batch.Enqueue())
}

// breakIfRefused breaks the group if a backend refused an operation on one rank, because the
// other ranks wait for it. An argument error does not change the group. If the group has failed or
// ended since the call was validated, breakIfRefused returns why.
func (g *Group) breakIfRefused(err error) error {
	_, byNCCL := errors.AsType[*nccl.Error](err)
	_, byOther := errors.AsType[*route.Error](err)
	if byNCCL || byOther {
		return g.fail(err)
	}
	return g.causeOf(err)
}

// causeOf returns why the group has failed or ended, if it has, and otherwise the error of a refused
// operation.
func (g *Group) causeOf(refusal error) error {
	if refusal != nil {
		if end := g.err(); end != nil {
			return end
		}
	}
	return refusal
}

// checkShards validates one slice for each local rank, and makes the group's streams keep
// their memory.
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
		if err := mem.Check(op, xs[i].Buffer(), xs[i].Len(), m.comm.Device()); err != nil {
			return asBadArgument(fmt.Errorf("comm: %w (rank %d)", err, m.comm.Rank()))
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

// Send enqueues a send of x from the first local rank to rank peer, which receives the
// same number of elements. Sends and receives that could wait for each other must be
// issued in one Batch or by SendRecv. Otherwise they hang, or, if they are the first of two ranks that send to each other, NCCL
// 2.28 uses wrong addresses and the processes lose their devices.
func Send[T memory.Element](on Issuer, peer int, x memory.Slice[T]) error {
	return issueFirst(on, "send", func(m *member) error { return nccl.Send(m.on, m.stream, x, peer) })
}

// Recv enqueues a receive into x on the first local rank from rank peer.
func Recv[T memory.Element](on Issuer, peer int, x memory.Slice[T]) error {
	return issueFirst(on, "receive", func(m *member) error { return nccl.Recv(m.on, m.stream, x, peer) })
}

// SendRecv enqueues, on the first local rank and as one operation, a send of src to rank
// to and a receive into dst from rank from.
func SendRecv[T memory.Element](on Issuer, to int, src memory.Slice[T], from int, dst memory.Slice[T]) error {
	g, b := groupOf(on)
	if b == nil {
		return g.Batch(func(b *Batch) error { return SendRecv(b, to, src, from, dst) })
	}
	if err := Send(b, to, src); err != nil {
		return err
	}
	return Recv(b, from, dst)
}

// issueFirst issues an operation of the first local rank.
func issueFirst(on Issuer, op string, issue func(m *member) error) error {
	g, b := groupOf(on)
	if err := g.check(op); err != nil {
		return b.markRefused(err)
	}
	if b != nil {
		return b.first(issue)
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	return g.breakIfRefused(issue(&g.firstDirect))
}
