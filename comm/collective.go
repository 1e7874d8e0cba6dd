package comm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
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

// Make allocates n elements on each local rank, ordered by the group's
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

// AllGather enqueues the concatenation of src over all ranks, by rank, into
// each dst, which must be Size times as long as src. Collective.
func AllGather[T memory.Element](on Issuer, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkPair(g, "all-gather", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllGather(m.on, m.stream, dst[i], src[i])
	})
}

// ReduceScatter enqueues the reduction of src, which must be Size times as long
// as dst, over all ranks; each rank gets its part in dst. Collective.
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

// enqueueAll enqueues one operation of every local rank, as one batch if there
// are several, and breaks the group if a backend refuses one. The caller holds
// issuing.
func (g *Group) enqueueAll(issue func(i int, m *member) error) error {
	if len(g.members) == 1 && len(g.routers) == 0 {
		return g.breakIfRefused(ofOperation(issue(0, &g.firstDirect)))
	}
	for i := range g.members {
		if err := issue(i, &g.members[i]); err != nil {
			g.batch.Reset()
			return g.breakIfRefused(ofOperation(err))
		}
	}
	return g.breakIfRefused(ofOperation(g.batch.Enqueue()))
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

// ofOperation returns the error of package nccl for an operation, which matches ErrMismatch if its
// arguments were refused: a rank that does not exist, lengths, or a reduction. All other reasons
// have types, or match nccl.ErrorInvalidUsage.
func ofOperation(err error) error {
	if err == nil || errors.Is(err, ErrMismatch) {
		return err
	}
	_, capture := errors.AsType[*device.CaptureError](err)
	_, driver := errors.AsType[*device.Error](err)
	_, status := errors.AsType[device.Status](err) // of a capture that has failed
	_, unsupported := errors.AsType[*device.UnsupportedError](err)
	_, noMemory := errors.AsType[*memory.OutOfMemoryError](err)
	_, byNCCL := errors.AsType[*nccl.Error](err)
	_, byOther := errors.AsType[*route.Error](err)
	if capture || driver || status || unsupported || noMemory || byNCCL || byOther ||
		errors.Is(err, nccl.ErrorInvalidUsage) || errors.Is(err, device.ErrClosed) || errors.Is(err, nccl.ErrRevoked) || errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return asBadArgument(err)
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
		if err := inside.CheckBuffer(op, xs[i].Buffer(), xs[i].Len(), m.comm.Device()); err != nil {
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
	return g.breakIfRefused(ofOperation(issue(&g.firstDirect)))
}

// An Issuer accepts collectives: a *Group enqueues each collective at once, and a *Batch
// collects them.
type Issuer interface {
	issuer() (*Group, *Batch)
}

func (g *Group) issuer() (*Group, *Batch) { return g, nil }

func (b *Batch) issuer() (*Group, *Batch) {
	if b == nil {
		return nil, nil
	}
	return b.g, b
}

// groupOf returns the group, and the batch that its operations belong to, or nil.
func groupOf(on Issuer) (*Group, *Batch) {
	if on == nil {
		return nil, nil
	}
	return on.issuer()
}

// A Batch collects collectives, sends and receives of a group that start together. It is
// an nccl.Batch with the same rules: its operations run concurrently, and if an operation
// is refused when it is added, the whole batch fails. If a backend refuses a part of a batch
// after another part was enqueued, the group is broken. One goroutine uses a Batch at a
// time.
type Batch struct {
	g        *Group
	batch    *route.Batch
	members  []member  // of g; their operations go into batch
	refused  error     // the first operation that was refused
	stagings []staging // of tensors that are not contiguous
	ended    bool      // Group.Batch has returned
}

// NewBatch returns an empty Batch of g, which a loop can reuse to allocate
// nothing.
func (g *Group) NewBatch() *Batch {
	if g == nil {
		return &Batch{batch: route.Routers(nil).NewBatch()}
	}
	b := g.routers.NewBatch()
	return &Batch{g: g, batch: b, members: withIssuer(g.members, b)}
}

// withIssuer returns copies of the members whose operations go into a batch.
func withIssuer(members []member, b *route.Batch) []member {
	list := make([]member, len(members))
	for i, m := range members {
		m.on = b.On(m.comm)
		list[i] = m
	}
	return list
}

// Batch runs fn and enqueues the operations that fn has added to the batch. It does
// not enqueue any operation if fn returns an error or panics, or if an operation was refused.
//
//	err := g.Batch(func(b *comm.Batch) error {
//		if err := comm.Send(b, next, x); err != nil {
//			return err
//		}
//		return comm.Recv(b, previous, y)
//	})
//
// The batch ends with fn: do not retain it.
func (g *Group) Batch(fn func(b *Batch) error) error {
	const op = "batch"
	if err := g.check(op); err != nil {
		return err
	}
	if fn == nil {
		return badArgument(op, "no function given")
	}
	b, _ := g.batches.Get().(*Batch)
	if b == nil {
		b = g.NewBatch()
	}
	b.ended = false
	b.Reset()
	defer func() { // also if fn panics
		b.Reset()
		b.ended = true
		g.batches.Put(b)
	}()
	if err := fn(b); err != nil {
		return err
	}
	return b.Enqueue()
}

// Enqueue enqueues all operations, or none if one was refused, and empties the batch.
func (b *Batch) Enqueue() error {
	if b == nil || b.batch == nil {
		return badArgument("enqueue", "no batch given: make one by Group.NewBatch")
	}
	defer b.Reset()
	if b.refused != nil {
		return b.refused
	}
	if err := b.g.check("enqueue"); err != nil {
		return err
	}
	b.g.issuing.Lock()
	defer b.g.issuing.Unlock()
	if err := b.copyIn(); err != nil {
		return err
	}
	if err := b.g.breakIfRefused(ofOperation(b.batch.Enqueue())); err != nil {
		return err
	}
	return b.copyOut()
}

// SetTimeout sets the timeout of the batch's operations until Enqueue or Reset (the timeout
// argument of torch.distributed). 0 means the group's timeout; a negative value means none.
// Operations with different timeouts belong in different batches.
func (b *Batch) SetTimeout(d time.Duration) {
	if b != nil && b.batch != nil {
		b.batch.SetTimeout(d)
	}
}

// SetDeterministic selects deterministic reductions for the batch until Enqueue
// or Reset, in a group whose Config.Deterministic has OnRequest: see Order. All
// ranks must call it for the same batches. It changes nothing in other
// deterministic groups. Without Config.Deterministic it returns an error that
// matches ErrMismatch, and the batch fails.
func (b *Batch) SetDeterministic() error {
	const op = "set deterministic"
	switch {
	case b == nil || b.g == nil:
		return badArgument(op, "no batch of a group given")
	case b.ended:
		return b.markRefused(errBatchEnded)
	case b.g.Deterministic() == nil:
		return b.markRefused(badArgument(op, "the group has no order of reductions: set Config.Deterministic to &comm.Order{OnRequest: true}"))
	}
	b.batch.ReduceInOrder()
	return nil
}

// Reset removes the operations, the timeout and the effect of SetDeterministic.
func (b *Batch) Reset() {
	if b == nil || b.batch == nil {
		return
	}
	b.batch.Reset()
	b.freeStagings()
	b.refused = nil
}

// markRefused records that an operation was refused, so that the batch fails,
// and returns err. b may be nil.
func (b *Batch) markRefused(err error) error {
	if b != nil && b.refused == nil {
		b.refused = err
	}
	return err
}

// each adds one operation of every local rank.
func (b *Batch) each(issue func(i int, m *member) error) error {
	return b.add(len(b.members), issue)
}

// first adds one operation of the first local rank.
func (b *Batch) first(issue func(m *member) error) error {
	return b.add(1, func(_ int, m *member) error { return issue(m) })
}

// add adds one operation of each of the first n local ranks.
func (b *Batch) add(n int, issue func(i int, m *member) error) error {
	if b.ended {
		return b.markRefused(errBatchEnded)
	}
	for i := range n {
		if err := issue(i, &b.members[i]); err != nil {
			return b.markRefused(b.g.causeOf(ofOperation(err)))
		}
	}
	return nil
}

var errBatchEnded = fmt.Errorf("comm: the function of the batch has returned: use NewBatch: %w", ErrMismatch)

// Barrier returns when all ranks have called it and all operations that were already
// enqueued on the group's streams have completed (torch.distributed.barrier). It ends
// early under the same conditions as Wait. Collective.
func (g *Group) Barrier(ctx context.Context) error {
	if err := g.check("barrier"); err != nil {
		return err
	}
	for i := range g.members {
		if err := gpu.StreamOf(g.members[i].stream).RefuseWait("comm: barrier"); err != nil {
			return err
		}
	}
	return unanswered("comm: barrier", gpu.Guard(ctx, func() (err error) {
		xs, err := Make[uint8](g, 1)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, xs.Close()) }()
		if err := AllReduce(g, Max, xs...); err != nil {
			return err
		}
		return g.wait(ctx)
	}))
}

// The collectives with a root: one rank reads or writes a slice that the other ranks do
// not use. On the other ranks that slice may be the zero Slice, and if the root is not
// local the whole list may be nil.

// BroadcastFrom enqueues, in place, the copy of rank root's slice to all ranks
// (ncclBcast). Collective.
func BroadcastFrom[T memory.Element](on Issuer, root int, xs ...memory.Slice[T]) error {
	g, b := groupOf(on)
	if err := checkShards(g, "broadcast", xs, true); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Broadcast(m.on, m.stream, xs[i], xs[i], root)
	})
}

// ReduceTo enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce). Collective.
func ReduceTo[T memory.Element](on Issuer, root int, op Op, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkRooted(g, "reduce", root, src, dst); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Reduce(m.on, m.stream, dst.at(i), src[i], op, root)
	})
}

// GatherTo enqueues the concatenation of src over all ranks, by rank, into dst on
// rank root, which is Size times as long (ncclGather). Collective.
func GatherTo[T memory.Element](on Issuer, root int, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkRooted(g, "gather", root, src, dst); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Gather(m.on, m.stream, dst.at(i), src[i], root)
	})
}

// ScatterFrom enqueues a copy of each rank's part of src on rank root into that rank's
// dst. src is Size times as long as dst (ncclScatter). Collective.
func ScatterFrom[T memory.Element](on Issuer, root int, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkRooted(g, "scatter", root, dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.Scatter(m.on, m.stream, dst[i], src.at(i), root)
	})
}

// at returns the slice of local rank i; the list may be nil.
func (xs Shards[T]) at(i int) memory.Slice[T] {
	if xs == nil {
		return memory.Slice[T]{}
	}
	return xs[i]
}

// checkRooted validates the slices that all ranks use, and the list that only the root
// uses.
func checkRooted[T memory.Element](g *Group, op string, root int, all, roots Shards[T]) error {
	if err := checkShards(g, op, all, true); err != nil {
		return err
	}
	if roots == nil && !g.hasRank(root) {
		return nil
	}
	return checkShards(g, op, roots, false)
}

// hasRank reports whether a rank is local.
func (g *Group) hasRank(rank int) bool {
	for i := range g.members {
		if g.members[i].comm.Rank() == rank {
			return true
		}
	}
	return false
}
