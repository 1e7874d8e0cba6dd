package nccl

import (
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Send enqueues the sending of src to rank peer, which receives as many
// elements (ncclSend). Sends and receives that may wait for each other belong
// into one Group.
func Send[T memory.Element](c *Communicator, s *stream.Stream, src memory.Slice[T], peer int) error {
	const name = "ncclSend"
	if err := check1(c, s, name, "source", src, peer); err != nil {
		return err
	}
	t, n := movable[T](src.Len())
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.Send(src.Raw(), n, t, int32(peer), c.handle(), s.Raw()))
}

// Recv enqueues the receiving of what rank peer sends into dst (ncclRecv).
func Recv[T memory.Element](c *Communicator, s *stream.Stream, dst memory.Slice[T], peer int) error {
	const name = "ncclRecv"
	if err := check1(c, s, name, "destination", dst, peer); err != nil {
		return err
	}
	t, n := movable[T](dst.Len())
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.Recv(dst.Raw(), n, t, int32(peer), c.handle(), s.Raw()))
}

// AllToAll enqueues the exchange of parts: part j of src goes to part i of dst
// on rank j, where i is this rank (ncclAlltoAll). dst and src have the same
// length, a multiple of Size, and do not overlap. Collective.
func AllToAll[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T]) error {
	const name = "ncclAlltoAll"
	n := dst.Len() / c.Size()
	if err := check2(c, s, name, dst, src, n*c.Size(), n*c.Size()); err != nil {
		return err
	}
	if !c.api.Has(ncclapi.FuncAlltoAll) {
		return Group(c, func() error {
			return c.eachRank(func(r int) error { return sendRecv(c, s, part(dst, r, n), part(src, r, n), r) })
		})
	}
	t, count := movable[T](n)
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.AlltoAll(src.Raw(), dst.Raw(), count, t, c.handle(), s.Raw()))
}

// Gather enqueues the concatenation of src of all ranks, by rank, into dst on
// rank root (ncclGather). dst is Size times as long as src there, and is not
// used elsewhere. Collective.
func Gather[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	const name = "ncclGather"
	if err := checkRoot(c, name, root); err != nil {
		return err
	}
	n, want := src.Len(), dst.Len()
	if c.rank == root {
		want = n * c.size
	}
	if err := check2(c, s, name, dst, src, want, n); err != nil {
		return err
	}
	if !c.api.Has(ncclapi.FuncGather) {
		return Group(c, func() error {
			if err := Send(c, s, src, root); err != nil || c.rank != root {
				return err
			}
			return c.eachRank(func(r int) error { return Recv(c, s, part(dst, r, n), r) })
		})
	}
	t, count := movable[T](n)
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.Gather(src.Raw(), dst.Raw(), count, t, int32(root), c.handle(), s.Raw()))
}

// Scatter enqueues the distribution of the parts of src on rank root to dst on
// each rank (ncclScatter). src is Size times as long as dst there, and is not
// used elsewhere. Collective.
func Scatter[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	const name = "ncclScatter"
	if err := checkRoot(c, name, root); err != nil {
		return err
	}
	n, want := dst.Len(), src.Len()
	if c.rank == root {
		want = n * c.size
	}
	if err := check2(c, s, name, dst, src, n, want); err != nil {
		return err
	}
	if !c.api.Has(ncclapi.FuncScatter) {
		return Group(c, func() error {
			if err := Recv(c, s, dst, root); err != nil || c.rank != root {
				return err
			}
			return c.eachRank(func(r int) error { return Send(c, s, part(src, r, n), r) })
		})
	}
	t, count := movable[T](n)
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return c.fail(name, c.api.Scatter(src.Raw(), dst.Raw(), count, t, int32(root), c.handle(), s.Raw()))
}

func sendRecv[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], peer int) error {
	if err := Send(c, s, src, peer); err != nil {
		return err
	}
	return Recv(c, s, dst, peer)
}

func (c *Communicator) eachRank(do func(r int) error) error {
	for r := range c.size {
		if err := do(r); err != nil {
			return err
		}
	}
	return nil
}

func part[T memory.Element](x memory.Slice[T], i, n int) memory.Slice[T] {
	return x.Slice(i*n, (i+1)*n)
}

// check1 checks the arguments of an operation with one buffer and one peer.
func check1[T memory.Element](c *Communicator, s *stream.Stream, op, what string, x memory.Slice[T], peer int) error {
	if err := checkRoot(c, op, peer); err != nil {
		return err
	}
	if err := checkCall(c, s, op); err != nil {
		return err
	}
	return checkSlice(c, op, what, x, x.Len())
}
