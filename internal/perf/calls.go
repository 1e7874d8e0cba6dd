package perf

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A call is an operation with everything it is given.
type call struct {
	c      *nccl.Communicator
	s      *stream.Stream
	kind   kind
	op     nccl.Op
	root   int
	layout layout
	dst    memory.Slice[uint8] // of layout.recv elements
	src    memory.Slice[uint8] // of layout.send elements
}

// makers make the calls of an element type ready to be issued again and again.
var makers = map[memory.DType]func(call) (func() error, error){
	memory.Int8: ready[int8], memory.Uint8: ready[uint8], memory.Int32: ready[int32], memory.Uint32: ready[uint32],
	memory.Int64: ready[int64], memory.Uint64: ready[uint64], memory.Float16T: ready[memory.Float16],
	memory.BFloat16T: ready[memory.BFloat16], memory.Float32: ready[float32], memory.Float64: ready[float64],
	memory.Float8E4M3T: ready[memory.Float8E4M3], memory.Float8E5M2T: ready[memory.Float8E5M2],
}

func ready[T memory.Element](x call) (func() error, error) {
	size := memory.DTypeOf[T]().Size()
	dst, err := memory.View[T](x.dst.Buffer(), x.dst.Offset(), x.dst.Len()/size)
	if err != nil {
		return nil, err
	}
	src, err := memory.View[T](x.src.Buffer(), x.src.Offset(), x.src.Len()/size)
	if err != nil {
		return nil, err
	}
	c, s, rank, n := x.c, x.s, x.c.Rank(), x.c.Size()
	if x.root != rank {
		switch x.kind {
		case gather, reduce:
			dst = memory.Slice[T]{}
		case broadcast, scatter:
			src = memory.Slice[T]{}
		}
	}
	switch x.kind {
	case allReduce:
		return func() error { return nccl.AllReduce(c, s, dst, src, x.op) }, nil
	case allGather:
		return func() error { return nccl.AllGather(c, s, dst, src) }, nil
	case reduceScatter:
		return func() error { return nccl.ReduceScatter(c, s, dst, src, x.op) }, nil
	case broadcast:
		return func() error { return nccl.Broadcast(c, s, dst, src, x.root) }, nil
	case reduce:
		return func() error { return nccl.Reduce(c, s, dst, src, x.op, x.root) }, nil
	case allToAll:
		return func() error { return nccl.AllToAll(c, s, dst, src) }, nil
	case allToAllV:
		out, in := counts(x.layout.param, n, rank)
		return func() error { return nccl.AllToAllV(c, s, dst, in, src, out) }, nil
	case gather:
		return func() error { return nccl.Gather(c, s, dst, src, x.root) }, nil
	case scatter:
		return func() error { return nccl.Scatter(c, s, dst, src, x.root) }, nil
	case hypercube:
		return hypercubeOf(c, s, dst, src, x.layout.param), nil
	}
	return func() error { return exchange(c, s, src, (rank+1)%n, dst, (rank+n-1)%n) }, nil
}

// counts are how many elements a rank sends to each one and gets from it.
func counts(part, n, rank int) (out, in []int) {
	for r := range n {
		out, in = append(out, uneven(part, n, rank, r)), append(in, uneven(part, n, r, rank))
	}
	return out, in
}

// exchange sends to a rank and receives from one at the same time.
func exchange[T memory.Element](c *nccl.Communicator, s *stream.Stream, src memory.Slice[T], to int, dst memory.Slice[T], from int) error {
	return nccl.Group(c, func() error {
		if err := nccl.Send(c, s, src, to); err != nil {
			return err
		}
		return nccl.Recv(c, s, dst, from)
	})
}

// hypercubeOf is an all-gather for powers of two: in each step a rank exchanges all
// that it has with one, and has twice as much.
func hypercubeOf[T memory.Element](c *nccl.Communicator, s *stream.Stream, dst, src memory.Slice[T], part int) func() error {
	rank, n := c.Rank(), c.Size()
	own := dst.Slice(rank*part, (rank+1)*part)
	return func() error {
		if own.Ptr() != src.Ptr() {
			if err := memory.Copy(s, own, src); err != nil {
				return err
			}
		}
		for step := 1; step < n; step *= 2 {
			have := rank &^ (step - 1)
			get := have ^ step
			err := exchange(c, s, dst.Slice(have*part, (have+step)*part), rank^step, dst.Slice(get*part, (get+step)*part), rank^step)
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// pieces are what a rank's destination has after the call.
func (o *Operation) pieces(l layout, rank, n, root int) (list []piece) {
	switch o.kind {
	case allReduce:
		return []piece{{n: l.recv, ranks: n}}
	case reduceScatter:
		return []piece{{n: l.recv, from: rank * l.param, ranks: n}}
	case reduce:
		if rank == root {
			list = []piece{{n: l.recv, ranks: n}}
		}
		return list
	case broadcast:
		return []piece{{n: l.recv, first: root, ranks: 1}}
	case scatter:
		return []piece{{n: l.recv, from: rank * l.param, first: root, ranks: 1}}
	case sendRecv:
		return []piece{{n: l.recv, first: (rank + n - 1) % n, ranks: 1}}
	case gather:
		if rank != root {
			return nil
		}
	}
	at := 0
	for r := range n {
		p := piece{at: at, n: l.param, first: r, ranks: 1}
		switch o.kind {
		case allToAll:
			p.from = rank * l.param
		case allToAllV:
			p.n = uneven(l.param, n, r, rank)
			for q := range rank {
				p.from += uneven(l.param, n, r, q)
			}
		}
		list, at = append(list, p), at+p.n
	}
	return list
}

// places returns where the buffers of a rank begin in the one that an operation
// works in, in elements.
func (o *Operation) places(l layout, rank int) (dst, src int) {
	switch o.kind {
	case allGather, gather, hypercube:
		return 0, rank * l.send
	case reduceScatter, scatter:
		return rank * l.recv, 0
	}
	return 0, 0
}
