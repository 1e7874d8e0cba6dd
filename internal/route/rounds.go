package route

import (
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
)

// A reducing is an operation of a local rank that is executed in rounds. In each round the ranks
// exchange parts, reduce their parts, and publish the results.
type reducing struct {
	shape
	stages
	at    int // index of the operation in the batch
	x     *collective.Op
	r     *Router
	rank  int
	dtype memory.DType
	op    collective.Reduction
	by    *fabric.Factor
	base  uint64 // of the received parts
	room  uint64 // of the products of a PreMulSum
}

// newReducing describes operation i of a batch.
func (b *Batch) newReducing(i int) (x reducing, err error) {
	c := b.ops[i]
	r := b.router(c)
	x = reducing{at: i, x: c, r: r, rank: r.comm.Rank(), base: r.ordered.scratch.Ptr()}
	if x.dtype, x.op, x.by, err = r.reduction(c); err != nil {
		return x, b.failed(c, err)
	}
	bytes := r.ordered.scratch.Len() - r.comm.Size()*unit // which parts of any length may waste
	if x.by != nil {
		bytes /= 2
		x.room = x.base + uint64(r.ordered.scratch.Len()/2/unit*unit)
	}
	x.shape = shape{kind: c.Kind, ranks: r.comm.Size(), root: c.Root, size: c.DType.Size(), n: c.N, counts: c.Sends}
	x.stages, x.most = x.newStages(r.ordered, bytes)
	return x, nil
}

// slot returns the address where the elements of a rank arrive in a round.
func (x *reducing) slot(k, rank int) uint64 { return x.base + uint64(rank)*x.stride(k) }

// stride returns the distance of the slots in bytes, which have no gaps in an
// all-gather.
func (x *reducing) stride(k int) uint64 {
	if x.whole() {
		return uint64(x.part(k, x.rank).n * x.size)
	}
	return uint64(x.width() * x.size)
}

// source returns the address of the elements of this rank that a rank reduces.
func (x *reducing) source(k, rank int) uint64 {
	if x.by == nil {
		return uint64(x.x.Src.Ptr) + uint64(x.part(k, rank).from*x.size)
	}
	if x.whole() {
		return x.room
	}
	return x.room + uint64(rank*x.width()*x.size)
}

// result returns the address of this rank's results of a round, and whether it has some.
func (x *reducing) result(k int) (dst uint64, ok bool) {
	p := x.part(k, x.rank)
	switch dst := uint64(x.x.Dst.Ptr); {
	case p.n == 0:
		return 0, false
	case x.kind == collective.Reduce && x.rank != x.root:
		return x.slot(k, x.rank), true
	case x.divides():
		return dst + uint64(p.from*x.size), true
	default:
		return dst + uint64(k*x.shape.step()*x.size), true
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
		if err := fabric.Scale(x.x.Stream, x.dtype, x.source(k, rank), uint64(x.x.Src.Ptr)+uint64(p.from*x.size), p.n, *x.by); err != nil {
			return err
		}
		if x.whole() {
			return nil // all ranks reduce the same elements
		}
	}
	return nil
}

// exchange appends the copies of this rank's elements to the ranks that reduce them.
func (x *reducing) exchange(list []collective.Move, k int) []collective.Move {
	if x.staged() {
		return x.exchangeInBlock(list, k)
	}
	mine := x.part(k, x.rank).n * x.size
	if x.whole() && x.kind == collective.AllReduce {
		return append(list, collective.Move{Operation: x.at, Kind: collective.AllGather, Dst: x.base, Src: x.source(k, x.rank), Bytes: mine})
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

func (x *reducing) send(list []collective.Move, peer int, src uint64, bytes int) []collective.Move {
	if bytes == 0 {
		return list
	}
	return append(list, collective.Move{Operation: x.at, Kind: collective.Send, Peer: peer, Src: src, Bytes: bytes})
}

func (x *reducing) receive(list []collective.Move, peer int, dst uint64, bytes int) []collective.Move {
	if bytes == 0 {
		return list
	}
	return append(list, collective.Move{Operation: x.at, Kind: collective.Recv, Peer: peer, Dst: dst, Bytes: bytes})
}

// reduce enqueues the reduction of this rank's part.
func (x *reducing) reduce(k int) error {
	dst, ok := x.result(k)
	if !ok {
		return nil
	}
	if x.staged() {
		f := x.blocksFold(k, dst)
		return f.Enqueue(x.x.Stream)
	}
	f := fabric.Fold{
		DType: x.dtype, Op: x.op, Block: x.r.ordered.block, Ranks: x.ranks, Count: x.part(k, x.rank).n,
		Base: x.base, Stride: x.stride(k), Mine: x.rank, Own: x.source(k, x.rank), Dst: dst, All: x.ranks,
	}
	return f.Enqueue(x.x.Stream)
}

// publish appends the copies of the results to the ranks that need them.
func (x *reducing) publish(list []collective.Move, k int) []collective.Move {
	if x.whole() || !x.divides() {
		return list
	}
	src, _ := x.result(k)
	mine, dst := x.part(k, x.rank).n*x.size, uint64(x.x.Dst.Ptr)
	if x.kind == collective.AllReduce && x.even(k) {
		return append(list, collective.Move{Operation: x.at, Kind: collective.AllGather, Dst: dst + uint64(x.round(k).from*x.size), Src: src, Bytes: mine})
	}
	for peer := range x.ranks {
		if peer == x.rank {
			continue
		}
		if x.kind == collective.AllReduce || peer == x.root {
			list = x.send(list, peer, src, mine)
		}
		if p := x.part(k, peer); x.kind == collective.AllReduce || x.rank == x.root {
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
			return len(b.ops) > b.orderedSteps()
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
	for i, x := range b.ops {
		if x.Service == collective.Ordered {
			if t := &b.tallies[x.Local]; t.operations == n {
				list = append(list, i)
			}
			b.tallies[x.Local].operations++
		}
	}
	b.turns = list
	return list
}

// orderedSteps returns the number of ordered operations.
func (b *Batch) orderedSteps() (n int) {
	for _, x := range b.ops {
		if x.Service == collective.Ordered {
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
	begun, err := b.begin(xs)
	b.moved = false
	rounds := 0
	for i := range xs {
		rounds = max(rounds, xs[i].rounds())
	}
	for k := 0; k < rounds && err == nil; k++ {
		err = b.round(xs, k)
	}
	if err != nil && b.moved {
		err = &collective.PartialError{Err: err}
	}
	for i := range xs[:begun] {
		xs[i].r.ordered.order.End()
	}
	clear(xs) // keeps no memory of the caller
	return err
}

// begin reserves the memory of the routers for their operations. It returns the number of
// operations before the first error; the caller must end these.
func (b *Batch) begin(xs []reducing) (n int, err error) {
	for ; n < len(xs); n++ {
		o, s := xs[n].r.ordered, gpu.StreamOf(xs[n].x.Stream)
		err := s.Captured(&o.order)
		if err == nil {
			err = o.order.Begin(s)
		}
		if err != nil {
			return n, b.failed(xs[n].x, err)
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
			return b.failed(xs[i].x, err)
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
			return b.failed(xs[i].x, err)
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
			return b.failed(xs[i].x, err)
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
	return b.failed(xs[0].x, err)
}

// unit is the alignment of parts in bytes.
const unit = 16

// gatheredBytes is the maximum size of the elements of all ranks for which each rank reduces
// everything itself: one transfer instead of two.
const gatheredBytes = 256 << 10

// A shape describes how the ranks divide an ordered reduction into rounds and parts. It is the
// same on all ranks. All lengths count elements.
type shape struct {
	kind   collective.Kind
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
	return (x.kind == collective.AllReduce || x.kind == collective.Reduce) && x.n*x.size*x.ranks <= min(gatheredBytes, x.most*x.size)
}

// divides reports whether the ranks divide each round: then its length is a multiple of
// all parts' alignment.
func (x *shape) divides() bool { return x.kind == collective.AllReduce || x.kind == collective.Reduce }

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
	if x.kind == collective.ReduceScatterV {
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
	case collective.ReduceScatter:
		from := k * x.step()
		return span{rank*x.n + from, min(x.step(), x.n-from)}
	case collective.ReduceScatterV:
		from, before := k*x.step(), 0
		for _, n := range x.counts[:rank] {
			before += n
		}
		return span{before + from, max(min(x.step(), x.counts[rank]-from), 0)}
	}
	all := x.round(k)
	if x.whole() {
		if x.kind == collective.Reduce && rank != x.root {
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

// Reductions in two stages, for ranks on several hosts whose blocks are within the hosts. Rank j of
// a block first reduces the elements of its block: its own part and the parts of the j-th ranks
// of the other blocks. Then each rank gets the results of its part from these ranks, and reduces
// them. The results of blocks are not rounded, so two stages compute the same bits as one. Between
// hosts, each rank sends the results of its block instead of the elements of all ranks.

// stages describes the two stages. There are none if blocks is 0.
type stages struct {
	block  int // number of ranks in a block
	blocks int // number of blocks
	acc    int // bytes of a result of a block
}

// newStages returns the stages of an operation with so many bytes of memory, if it has two, and
// the number of elements that a rank may receive in a round.
func (x *reducing) newStages(o *ordered, bytes int) (s stages, most int) {
	if !o.staged || x.ranks%o.block != 0 || o.block == 1 || o.block == x.ranks {
		return s, bytes / x.size
	}
	s = stages{block: o.block, blocks: x.ranks / o.block, acc: fabric.AccBytes(x.dtype)}
	return s, bytes / (x.ranks*x.size + 2*s.blocks*s.acc) * x.ranks
}

// staged reports whether the operation has two stages. Small operations have
// one.
func (x *reducing) staged() bool { return x.blocks > 0 && !x.whole() }

// blockSlot returns the address where the elements of the i-th rank of the block arrive, of the part
// that this rank reduces for block b.
func (x *reducing) blockSlot(i, b int) uint64 {
	return x.base + uint64((i*x.blocks+b)*x.width()*x.size)
}

// own returns the address of the result that this rank reduces for block b, and arrived the
// address of the result that it receives from block b.
func (x *reducing) own(b int) uint64     { return x.results() + uint64(b*x.width()*x.acc) }
func (x *reducing) arrived(b int) uint64 { return x.own(x.blocks + b) }

// results returns the address of the results of blocks, behind the slots.
func (x *reducing) results() uint64 { return x.blockSlot(x.stages.block, 0) }

// place returns the block of this rank, and its index there.
func (x *reducing) place() (block, index int) {
	return x.rank / x.stages.block, x.rank % x.stages.block
}

// exchangeInBlock appends the copies of this rank's elements to the other ranks of its block.
func (x *reducing) exchangeInBlock(list []collective.Move, k int) []collective.Move {
	mine, index := x.place()
	for i := range x.stages.block {
		if i == index {
			continue
		}
		for b := range x.blocks {
			peer, theirs := mine*x.stages.block+i, b*x.stages.block+i
			list = x.send(list, peer, x.source(k, theirs), x.part(k, theirs).n*x.size)
			list = x.receive(list, peer, x.blockSlot(i, b), x.part(k, b*x.stages.block+index).n*x.size)
		}
	}
	return list
}

// reduceBlock enqueues the reductions of the elements of this rank's block.
func (x *reducing) reduceBlock(k int) error {
	_, index := x.place()
	for b := range x.blocks {
		part := b*x.stages.block + index
		n := x.part(k, part).n
		if n == 0 {
			continue
		}
		f := fabric.Fold{
			DType: x.dtype, Op: x.op, Block: x.stages.block, Ranks: x.stages.block, Count: n, Base: x.blockSlot(0, b), Stride: x.blockSlot(1, 0) - x.base,
			Mine: index, Own: x.source(k, part), Dst: x.own(b), Stage: fabric.BlockStage, All: x.ranks,
		}
		if err := f.Enqueue(x.x.Stream); err != nil {
			return err
		}
	}
	return nil
}

// exchangeBlocks appends the copies of the block's results to the ranks of the other blocks.
func (x *reducing) exchangeBlocks(list []collective.Move, k int) []collective.Move {
	mine, index := x.place()
	for b := range x.blocks {
		if b == mine {
			continue
		}
		peer := b*x.stages.block + index
		list = x.send(list, peer, x.own(b), x.part(k, peer).n*x.acc)
		list = x.receive(list, peer, x.arrived(b), x.part(k, x.rank).n*x.acc)
	}
	return list
}

// blocksFold returns the reduction of the results of all blocks.
func (x *reducing) blocksFold(k int, dst uint64) fabric.Fold {
	mine, _ := x.place()
	return fabric.Fold{
		DType: x.dtype, Op: x.op, Block: x.blocks, Ranks: x.blocks, Count: x.part(k, x.rank).n, Base: x.arrived(0), Stride: x.own(1) - x.own(0),
		Mine: mine, Own: x.own(mine), Dst: dst, Stage: fabric.BlocksStage, All: x.ranks,
	}
}
