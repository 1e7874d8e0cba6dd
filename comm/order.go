package comm

import (
	"fmt"

	"github.com/gochorus/chorus/internal/route"
)

// An Order makes the reductions of a group deterministic (Config.Deterministic), and is the order
// of their additions. The same inputs then give the same bits. The following do not matter:
//   - the length of the call, and the position of an element in it
//   - the strategy, the tuning, and NCCL's version and settings
//   - the number of processes and hosts
//   - whether the call is eager or in a graph, alone or in a batch
//
// PyTorch and NCCL do not have this option.
//
// The guarantee is for AllReduce, ReduceScatter, ReduceScatterV and ReduceTo, also of tensors
// and lists of tensors, and for packages that use them, such as ddp and optim. Operations that
// the caller issues through Communicator have no guarantee.
//
// The contract for each element is:
//   - The elements of ranks 0 to Block-1 are combined in rank order: first ranks 0 and 1, then
//     the result and rank 2. So are the elements of each further Block ranks; the last block may
//     be shorter. Then the results of the blocks are combined in their order.
//   - Float16, bfloat16 and the 8-bit floats are converted to float32 first. All these
//     combinations, and Avg's division by Size, compute in float32. Other types compute in
//     their own type; integers wrap around, and Avg divides them toward zero.
//   - The result is rounded to the element type once, at the end, to nearest even. It is not
//     rounded between blocks or hosts. 8-bit floats that are too large become NaN (e4m3) or
//     infinity (e5m2), as in torch.
//   - Max and Min of a number and a NaN are the number.
//   - A PreMulSum multiplies each rank's element by that rank's factor, and rounds the product to
//     the element type, before the sum.
//   - The payload and the sign of a NaN are not guaranteed.
//
// If a program needs the guarantee for some calls only, it sets OnRequest and issues these calls in
// batches with Batch.SetDeterministic. All others are then as fast as without an Order.
//
// Chorus kernels execute all-reduces of any length, and other reductions of up to 64 KiB for each
// rank, if there is one block and the strategy has Chorus kernels, as OwnKernels and Tuned do. These
// kernels take about as long as NCCL's reductions without an order. Each rank then uses up
// to 128 MiB of device memory for them. NCCL copies the elements of all other reductions in rounds to
// the rank that reduces them, and a kernel there reduces them. Reductions in a batch with several
// collectives of a rank belong to these. Each rank uses 64 MiB of device memory for that. Both count as
// allocated.
//
// Over several hosts with one block, every rank receives its part from every other rank: n ranks
// on each host send about n times the bytes of NCCL's reductions to the other hosts. If each host
// has a whole number of blocks of two or more ranks, the ranks first reduce within the blocks. They
// send only the results to other hosts; those of 16-bit floats are float32. Groups of Split do
// not do that.
type Order struct {
	// Block is the number of ranks in a block. 0 means one block of all ranks: then the order is
	// the rank order, and groups of the same size agree, however their ranks are divided among
	// hosts. Set it to the number of ranks of a host for the order "within each host, then by
	// host". Groups of the same size with the same Block agree too: with 4, one host of 8 ranks and
	// two hosts of 4 ranks.
	Block int
	// OnRequest limits the guarantee to the batches for which Batch.SetDeterministic was called.
	OnRequest bool
}

func (o *Order) check(op string) error {
	if o != nil && o.Block < 0 {
		return badArgument(op, "Deterministic.Block is %d: want 0 for one block, or the number of ranks in a block", o.Block)
	}
	return nil
}

// order returns the order of the configuration, or nil. hosts has the host of each rank; nil means
// one host.
func (c *Config) order(hosts []int) *route.Order {
	if c == nil || c.Deterministic == nil {
		return nil
	}
	block := c.Deterministic.Block
	return &route.Order{Block: block, Hosts: blocksWithinHosts(hosts, block), OnRequest: c.Deterministic.OnRequest}
}

// blocksWithinHosts reports whether there are several hosts, and the ranks of each block are on
// one of them.
func blocksWithinHosts(hosts []int, block int) bool {
	several := false
	for rank, host := range hosts {
		if several = several || host != hosts[0]; block > 0 && host != hosts[rank/block*block] {
			return false
		}
	}
	return several && block > 0
}

// orderName describes the order to other ranks.
func (c *Config) orderName() string {
	if c == nil || c.Deterministic == nil {
		return "none"
	}
	name := fmt.Sprintf("blocks of %d ranks", c.Deterministic.Block)
	if c.Deterministic.OnRequest {
		name += " on request"
	}
	return name
}

// Deterministic returns the order of the group's reductions, or nil if they are not
// deterministic.
func (g *Group) Deterministic() *Order {
	if g == nil || g.cfg == nil || g.cfg.Deterministic == nil {
		return nil
	}
	o := *g.cfg.Deterministic
	return &o
}

// alwaysInOrder reports whether all reductions of the group are deterministic.
func (g *Group) alwaysInOrder() bool {
	o := g.Deterministic()
	return o != nil && !o.OnRequest
}
