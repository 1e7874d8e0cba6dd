package route

import (
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/memory"
)

// A reducing is an operation of a local rank that is executed in rounds. In each round the ranks
// exchange parts, reduce their parts, and publish the results.
type reducing struct {
	shape
	stages
	at    int // index of the operation in the batch
	step  *step
	rank  int
	dtype memory.DType
	op    flight.Reduction
	by    *fabric.Factor
	base  uint64 // of the received parts
	room  uint64 // of the products of a PreMulSum
}

// newReducing describes operation i of a batch.
func (b *Batch) newReducing(i int) (x reducing, err error) {
	s := &b.plan[i]
	r, c := s.router, &s.x
	x = reducing{at: i, step: s, rank: r.comm.Rank(), base: r.ordered.scratch.Ptr()}
	if x.dtype, x.op, x.by, err = r.reduction(c); err != nil {
		return x, s.failed(err)
	}
	bytes := r.ordered.scratch.Len() - r.comm.Size()*unit // which parts of any length may waste
	if x.by != nil {
		bytes /= 2
		x.room = x.base + uint64(r.ordered.scratch.Len()/2/unit*unit)
	}
	x.shape = shape{kind: c.Kind, ranks: r.comm.Size(), root: c.Root, size: c.DType.Size(), n: c.Count, counts: b.in.At(i).Counts}
	x.stages, x.most = x.newStages(r.ordered, bytes)
	return x, nil
}

// slot returns the address where the elements of a rank arrive in a round.
func (x *reducing) slot(k, rank int) uint64 { return x.base + uint64(rank)*x.stride(k) }

// stride returns the distance of the slots in bytes. An all-gather needs them without gaps.
func (x *reducing) stride(k int) uint64 {
	if x.whole() {
		return uint64(x.part(k, x.rank).n * x.size)
	}
	return uint64(x.width() * x.size)
}

// source returns the address of the elements of this rank that a rank reduces.
func (x *reducing) source(k, rank int) uint64 {
	if x.by == nil {
		return x.step.x.Src + uint64(x.part(k, rank).from*x.size)
	}
	if x.whole() {
		return x.room
	}
	return x.room + uint64(rank*x.width()*x.size)
}

// result returns the address of this rank's results of a round, and whether it has some.
func (x *reducing) result(k int) (dst uint64, ok bool) {
	p := x.part(k, x.rank)
	switch c := &x.step.x; {
	case p.n == 0:
		return 0, false
	case x.kind == flight.Reduce && x.rank != x.root:
		return x.slot(k, x.rank), true
	case x.divides():
		return c.Dst + uint64(p.from*x.size), true
	default:
		return c.Dst + uint64(k*x.shape.step()*x.size), true
	}
}

// multiply enqueues the products of a PreMulSum.
func (x *reducing) multiply(k int) error {
	if x.by == nil {
		return nil
	}
	for rank := range x.ranks {
		p := x.part(k, rank)
		if p.n == 0 {
			continue
		}
		if err := fabric.Scale(x.step.op.Stream, x.dtype, x.source(k, rank), x.step.x.Src+uint64(p.from*x.size), p.n, *x.by); err != nil {
			return err
		}
		if x.whole() {
			return nil // all ranks reduce the same elements
		}
	}
	return nil
}

// exchange appends the copies of this rank's elements to the ranks that reduce them.
func (x *reducing) exchange(list []ranks.Move, k int) []ranks.Move {
	if x.staged() {
		return x.exchangeInBlock(list, k)
	}
	mine := x.part(k, x.rank).n * x.size
	if x.whole() && x.kind == flight.AllReduce {
		return append(list, ranks.Move{Operation: x.at, Kind: flight.AllGather, Dst: x.base, Src: x.source(k, x.rank), Bytes: mine})
	}
	for peer := range x.ranks {
		if peer == x.rank {
			continue
		}
		list = x.send(list, peer, x.source(k, peer), x.part(k, peer).n*x.size)
		list = x.receive(list, peer, x.slot(k, peer), mine)
	}
	return list
}

func (x *reducing) send(list []ranks.Move, peer int, src uint64, bytes int) []ranks.Move {
	if bytes == 0 {
		return list
	}
	return append(list, ranks.Move{Operation: x.at, Kind: flight.Send, Peer: peer, Src: src, Bytes: bytes})
}

func (x *reducing) receive(list []ranks.Move, peer int, dst uint64, bytes int) []ranks.Move {
	if bytes == 0 {
		return list
	}
	return append(list, ranks.Move{Operation: x.at, Kind: flight.Recv, Peer: peer, Dst: dst, Bytes: bytes})
}

// reduce enqueues the reduction of this rank's part.
func (x *reducing) reduce(k int) error {
	dst, ok := x.result(k)
	if !ok {
		return nil
	}
	if x.staged() {
		f := x.blocksFold(k, dst)
		return f.Enqueue(x.step.op.Stream)
	}
	f := fabric.Fold{
		DType: x.dtype, Op: x.op, Block: x.step.router.ordered.block, Ranks: x.ranks, Count: x.part(k, x.rank).n,
		Base: x.base, Stride: x.stride(k), Mine: x.rank, Own: x.source(k, x.rank), Dst: dst, All: x.ranks,
	}
	return f.Enqueue(x.step.op.Stream)
}

// publish appends the copies of the results to the ranks that need them.
func (x *reducing) publish(list []ranks.Move, k int) []ranks.Move {
	if x.whole() || !x.divides() {
		return list
	}
	src, _ := x.result(k)
	mine, dst := x.part(k, x.rank).n*x.size, x.step.x.Dst
	if x.kind == flight.AllReduce && x.even(k) {
		return append(list, ranks.Move{Operation: x.at, Kind: flight.AllGather, Dst: dst + uint64(x.round(k).from*x.size), Src: src, Bytes: mine})
	}
	for peer := range x.ranks {
		if peer == x.rank {
			continue
		}
		if x.kind == flight.AllReduce || peer == x.root {
			list = x.send(list, peer, src, mine)
		}
		if p := x.part(k, peer); x.kind == flight.AllReduce || x.rank == x.root {
			list = x.receive(list, peer, dst+uint64(p.from*x.size), p.n*x.size)
		}
	}
	return list
}

// executeOrdered executes the ordered operations, the first ones of all local ranks together,
// then the second ones, and so on. It reports whether the batch has further operations. After an
// error the rest of the batch is not enqueued.
func (b *Batch) executeOrdered() (more bool) {
	for turn := 0; ; turn++ {
		list := b.turn(turn)
		if len(list) == 0 {
			return len(b.plan) > b.orderedSteps()
		}
		if err := b.reduceTogether(list); err != nil {
			for ; len(list) > 0; turn++ {
				for _, i := range list {
					b.errs[i] = err
				}
				list = b.turn(turn + 1)
			}
			b.failRest(err)
			return false
		}
	}
}

// turn returns the indexes of the n-th ordered operation of each local rank.
func (b *Batch) turn(n int) []int {
	clear(b.tallies)
	list := b.turns[:0]
	for i := range b.plan {
		if s := &b.plan[i]; s.op.Service == ranks.Ordered {
			if t := &b.tallies[s.router.local]; t.operations == n {
				list = append(list, i)
			}
			b.tallies[s.router.local].operations++
		}
	}
	b.turns = list
	return list
}

// orderedSteps returns the number of ordered operations.
func (b *Batch) orderedSteps() (n int) {
	for i := range b.plan {
		if b.plan[i].op.Service == ranks.Ordered {
			n++
		}
	}
	return n
}

// reduceTogether executes one ordered operation of each of several local ranks.
func (b *Batch) reduceTogether(list []int) error {
	b.reducing = b.reducing[:0]
	for _, i := range list {
		x, err := b.newReducing(i)
		if err != nil {
			return err
		}
		b.reducing = append(b.reducing, x)
	}
	xs := b.reducing
	begun, err := begin(xs)
	b.moved = false
	rounds := 0
	for i := range xs {
		rounds = max(rounds, xs[i].rounds())
	}
	for k := 0; k < rounds && err == nil; k++ {
		err = b.round(xs, k)
	}
	if err != nil && b.moved {
		err = &ranks.PartialError{Err: err}
	}
	for i := range xs[:begun] {
		xs[i].step.router.ordered.order.End()
	}
	clear(xs) // keeps no memory of the caller
	return err
}

// begin reserves the memory of the routers for their operations. It returns the number of
// operations before the first error; the caller must end these.
func begin(xs []reducing) (n int, err error) {
	for ; n < len(xs); n++ {
		o, s := xs[n].step.router.ordered, gpu.StreamOf(xs[n].step.op.Stream)
		err := s.Captured(&o.order)
		if err == nil {
			err = o.order.Begin(s)
		}
		if err != nil {
			return n, xs[n].step.failed(err)
		}
	}
	return n, nil
}

// round enqueues a round of operations.
func (b *Batch) round(xs []reducing, k int) error {
	b.moves = b.moves[:0]
	for i := range xs {
		if k >= xs[i].rounds() {
			continue
		}
		if err := xs[i].multiply(k); err != nil {
			return xs[i].step.failed(err)
		}
		b.moves = xs[i].exchange(b.moves, k)
	}
	if err := b.move(xs); err != nil {
		return err
	}
	for i := range xs {
		if k >= xs[i].rounds() || !xs[i].staged() {
			continue
		}
		if err := xs[i].reduceBlock(k); err != nil {
			return xs[i].step.failed(err)
		}
		b.moves = xs[i].exchangeBlocks(b.moves, k)
	}
	if err := b.move(xs); err != nil {
		return err
	}
	for i := range xs {
		if k >= xs[i].rounds() {
			continue
		}
		if err := xs[i].reduce(k); err != nil {
			return xs[i].step.failed(err)
		}
		b.moves = xs[i].publish(b.moves, k)
	}
	return b.move(xs)
}

// move lets NCCL enqueue the copies.
func (b *Batch) move(xs []reducing) error {
	if len(b.moves) == 0 {
		return nil
	}
	err := b.in.Move(b.moves)
	b.moves = b.moves[:0]
	b.moved = b.moved || err == nil
	return xs[0].step.failed(err)
}
