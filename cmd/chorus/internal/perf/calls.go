package perf

import (
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A call is an operation with its arguments.
type call struct {
	batch  *route.Batch // of the group: for a call alone
	c      *nccl.Communicator
	s      *stream.Stream
	kind   kind
	op     nccl.Op
	root   int
	layout layout
	dst    memory.Slice[uint8] // layout.recv elements
	src    memory.Slice[uint8] // layout.send elements
}

// An issue adds an operation to a batch, or enqueues it if b is nil.
type issue func(b *nccl.Batch) error

// issue returns an issue of one operation. The group's strategy executes the operation.
func (x *call) issue(add func(on nccl.Issuer) error) issue {
	return func(b *nccl.Batch) error {
		if b != nil {
			return add(b.On(x.c))
		}
		if err := add(x.batch.On(x.c)); err != nil {
			x.batch.Reset()
			return err
		}
		return x.batch.Enqueue()
	}
}

// newIssues bind the arguments of a call, by element type. The result can be issued repeatedly.
var newIssues = map[memory.DType]func(call) (issue, error){
	memory.Int8: newIssue[int8], memory.Uint8: newIssue[uint8], memory.Int32: newIssue[int32], memory.Uint32: newIssue[uint32],
	memory.Int64: newIssue[int64], memory.Uint64: newIssue[uint64], memory.Float16: newIssue[memory.Float16Bits],
	memory.BFloat16: newIssue[memory.BFloat16Bits], memory.Float32: newIssue[float32], memory.Float64: newIssue[float64],
	memory.Float8E4M3: newIssue[memory.Float8E4M3Bits], memory.Float8E5M2: newIssue[memory.Float8E5M2Bits],
}

func newIssue[T memory.Element](x call) (issue, error) {
	size := memory.DTypeOf[T]().Size()
	dst, err := memory.View[T](x.dst.Buffer(), x.dst.Offset(), x.dst.Len()/size)
	if err != nil {
		return nil, err
	}
	src, err := memory.View[T](x.src.Buffer(), x.src.Offset(), x.src.Len()/size)
	if err != nil {
		return nil, err
	}
	if x.root != x.c.Rank() {
		switch x.kind {
		case gather, reduce:
			dst = memory.Slice[T]{}
		case broadcast, scatter:
			src = memory.Slice[T]{}
		}
	}
	return bind(x, dst, src), nil
}

// bind binds the buffers of an operation.
func bind[T memory.Element](x call, dst, src memory.Slice[T]) issue {
	c, s, rank, n := x.c, x.s, x.c.Rank(), x.c.Size()
	switch x.kind {
	case allReduce:
		return x.issue(func(on nccl.Issuer) error { return nccl.AllReduce(on, s, dst, src, x.op) })
	case allGather:
		return x.issue(func(on nccl.Issuer) error { return nccl.AllGather(on, s, dst, src) })
	case reduceScatter:
		return x.issue(func(on nccl.Issuer) error { return nccl.ReduceScatter(on, s, dst, src, x.op) })
	case broadcast:
		return x.issue(func(on nccl.Issuer) error { return nccl.Broadcast(on, s, dst, src, x.root) })
	case reduce:
		return x.issue(func(on nccl.Issuer) error { return nccl.Reduce(on, s, dst, src, x.op, x.root) })
	case allToAll:
		return x.issue(func(on nccl.Issuer) error { return nccl.AllToAll(on, s, dst, src) })
	case allToAllV:
		out, in := counts(x.layout.param, n, rank)
		return x.issue(func(on nccl.Issuer) error { return nccl.AllToAllV(on, s, dst, in, src, out) })
	case gather:
		return x.issue(func(on nccl.Issuer) error { return nccl.Gather(on, s, dst, src, x.root) })
	case scatter:
		return x.issue(func(on nccl.Issuer) error { return nccl.Scatter(on, s, dst, src, x.root) })
	case hypercube:
		return hypercubeOf(c, s, dst, src, x.layout.param)
	}
	return func(b *nccl.Batch) error { return exchange(b, c, s, src, (rank+1)%n, dst, (rank+n-1)%n) }
}

// counts returns the numbers of elements that a rank sends to and receives from each rank.
func counts(part, n, rank int) (out, in []int) {
	for r := range n {
		out, in = append(out, uneven(part, n, rank, r)), append(in, uneven(part, n, r, rank))
	}
	return out, in
}

// exchange sends to one rank and receives from another at the same time.
func exchange[T memory.Element](b *nccl.Batch, c *nccl.Communicator, s *stream.Stream, src memory.Slice[T], to int, dst memory.Slice[T], from int) error {
	if b == nil {
		return nccl.Group(func(b *nccl.Batch) error { return exchange(b, c, s, src, to, dst, from) })
	}
	if err := nccl.Send(b.On(c), s, src, to); err != nil {
		return err
	}
	return nccl.Recv(b.On(c), s, dst, from)
}

// hypercubeOf is an all-gather for powers of two: in each step a rank exchanges
// all its data with one peer, which doubles its data.
func hypercubeOf[T memory.Element](c *nccl.Communicator, s *stream.Stream, dst, src memory.Slice[T], part int) issue {
	rank, n := c.Rank(), c.Size()
	own := dst.Slice(rank*part, (rank+1)*part)
	return func(b *nccl.Batch) error {
		if own.Ptr() != src.Ptr() {
			if err := memory.Copy(s, own, src); err != nil {
				return err
			}
		}
		for step := 1; step < n; step *= 2 {
			have := rank &^ (step - 1)
			get := have ^ step
			err := exchange(b, c, s, dst.Slice(have*part, (have+step)*part), rank^step, dst.Slice(get*part, (get+step)*part), rank^step)
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// pieces describes the expected content of a rank's destination after the call.
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

// offsets returns the offsets, in elements, of a rank's buffers within the single
// buffer of an in-place operation.
func (o *Operation) offsets(l layout, rank int) (dst, src int) {
	switch o.kind {
	case allGather, gather, hypercube:
		return 0, rank * l.send
	case reduceScatter, scatter:
		return rank * l.recv, 0
	}
	return 0, 0
}
