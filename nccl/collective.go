package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An Op is a reduction (ncclRedOp_t).
type Op int32

// The reductions. Avg divides the sum by the number of ranks.
const (
	Sum  = Op(ncclapi.Sum)
	Prod = Op(ncclapi.Prod)
	Max  = Op(ncclapi.Max)
	Min  = Op(ncclapi.Min)
	Avg  = Op(ncclapi.Avg)
)

// String returns NCCL's name of the reduction, such as "sum".
func (o Op) String() string {
	if names := [...]string{"sum", "prod", "max", "min", "avg"}; o >= 0 && int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("op %d", int32(o))
}

// AllReduce enqueues the reduction of src over all ranks into dst on all ranks
// (ncclAllReduce). dst and src have the same length and may be the same.
// Collective.
func AllReduce[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	const name = "ncclAllReduce"
	t, err := reducible[T](name, op)
	if err != nil {
		return err
	}
	if err := check2(c, s, name, dst, src, src.Len(), src.Len()); err != nil {
		return err
	}
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.AllReduce(src.Raw(), dst.Raw(), uintptr(src.Len()), t, c.raw(op), c.handle(), s.Raw()))
}

// Reduce enqueues the reduction of src over all ranks into dst on rank root
// (ncclReduce); dst is not used elsewhere and may be the zero Slice there.
// Collective.
func Reduce[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], op Op, root int) error {
	const name = "ncclReduce"
	t, err := reducible[T](name, op)
	if err != nil {
		return err
	}
	if err := checkRoot(c, name, root); err != nil {
		return err
	}
	want := dst.Len()
	if c.rank == root {
		want = src.Len()
	}
	if err := check2(c, s, name, dst, src, want, src.Len()); err != nil {
		return err
	}
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.Reduce(src.Raw(), dst.Raw(), uintptr(src.Len()), t, c.raw(op), int32(root), c.handle(), s.Raw()))
}

// Broadcast enqueues the copy of src on rank root into dst on all ranks
// (ncclBroadcast). src is not used elsewhere and may be the zero Slice there.
// Collective.
func Broadcast[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	const name = "ncclBroadcast"
	if err := checkRoot(c, name, root); err != nil {
		return err
	}
	want := src.Len()
	if c.rank == root {
		want = dst.Len()
	}
	if err := check2(c, s, name, dst, src, dst.Len(), want); err != nil {
		return err
	}
	if c.rank != root {
		src = dst
	}
	t, n := movable[T](dst.Len())
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.Broadcast(src.Raw(), dst.Raw(), n, t, int32(root), c.handle(), s.Raw()))
}

// AllGather enqueues the concatenation of src of all ranks, by rank, into dst
// on all ranks (ncclAllGather). dst is Size times as long as src; in place, src
// is the rank's part of dst. Collective.
func AllGather[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T]) error {
	const name = "ncclAllGather"
	if err := check2(c, s, name, dst, src, src.Len()*c.Size(), src.Len()); err != nil {
		return err
	}
	t, n := movable[T](src.Len())
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.AllGather(src.Raw(), dst.Raw(), n, t, c.handle(), s.Raw()))
}

// ReduceScatter enqueues the reduction of src over all ranks, of which each
// rank gets its part into dst (ncclReduceScatter). src is Size times as long as
// dst; in place, dst is the rank's part of src. Collective.
func ReduceScatter[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	const name = "ncclReduceScatter"
	t, err := reducible[T](name, op)
	if err != nil {
		return err
	}
	if err := check2(c, s, name, dst, src, dst.Len(), dst.Len()*c.Size()); err != nil {
		return err
	}
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.ReduceScatter(src.Raw(), dst.Raw(), uintptr(dst.Len()), t, c.raw(op), c.handle(), s.Raw()))
}

// raw is the reduction as NCCL gets it. The mean of a single rank is its sum: NCCL
// 2.28 refuses the one of 8-bit floats, and spoils the last of an odd number of
// 16-bit ones.
func (c *Communicator) raw(op Op) ncclapi.RedOp {
	if op == Avg && c.size == 1 {
		op = Sum
	}
	return ncclapi.RedOp(op)
}

// enter locks c for a call into NCCL. The check must come after the lock: Abort
// frees the communicator once no call is inside.
func (c *Communicator) enter(op string) error {
	c.mu.Lock()
	if c.owner.Closed() {
		c.mu.Unlock()
		return c.closed(op)
	}
	return nil
}

// handle is the communicator for a call that has entered.
func (c *Communicator) handle() ncclapi.Comm { return *c.h }

// check2 checks the arguments of an operation with two buffers before anything
// is enqueued.
func check2[T memory.Element](c *Communicator, s *stream.Stream, op string, dst, src memory.Slice[T], wantDst, wantSrc int) error {
	if err := checkCall(c, s, op); err != nil {
		return err
	}
	if err := checkSlice(c, op, "destination", dst, wantDst); err != nil {
		return err
	}
	return checkSlice(c, op, "source", src, wantSrc)
}

func checkCall(c *Communicator, s *stream.Stream, op string) error {
	if c == nil || c.owner.Closed() {
		return c.closed(op)
	}
	if err := s.Check(op, c.dev); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	return s.Captured(c)
}

func checkSlice[T memory.Element](c *Communicator, op, what string, x memory.Slice[T], want int) error {
	if x.Len() != want {
		return fmt.Errorf("nccl: %s on rank %d of %d: the %s has %d elements: want %d", op, c.rank, c.size, what, x.Len(), want)
	}
	if err := x.Check(op, c.dev); err != nil {
		return fmt.Errorf("nccl: %w (the %s on rank %d of %d)", err, what, c.rank, c.size)
	}
	return nil
}

func checkRoot(c *Communicator, op string, root int) error {
	if c == nil {
		return c.closed(op)
	}
	if root < 0 || root >= c.size {
		return fmt.Errorf("nccl: %s on rank %d of %d: rank %d does not exist", op, c.rank, c.size, root)
	}
	return nil
}
