package route

import (
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/ranks"
)

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

// staged reports whether the operation has two stages. Small ones have one.
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
func (x *reducing) exchangeInBlock(list []ranks.Move, k int) []ranks.Move {
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
		if err := f.Enqueue(x.step.op.Stream); err != nil {
			return err
		}
	}
	return nil
}

// exchangeBlocks appends the copies of the block's results to the ranks of the other blocks.
func (x *reducing) exchangeBlocks(list []ranks.Move, k int) []ranks.Move {
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
