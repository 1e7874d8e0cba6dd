package perf

import (
	"context"
	"errors"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
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

// issue returns an issue of one operation, which the group's strategy executes.
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
	return func(b *nccl.Batch) error { return exchangeOf(b, c, s, src, (rank+1)%n, dst, (rank+n-1)%n) }
}

// counts returns the numbers of elements that a rank sends to and receives from each rank.
func counts(part, n, rank int) (out, in []int) {
	for r := range n {
		out, in = append(out, uneven(part, n, rank, r)), append(in, uneven(part, n, r, rank))
	}
	return out, in
}

// exchangeOf sends to one rank and receives from another at the same time.
func exchangeOf[T memory.Element](b *nccl.Batch, c *nccl.Communicator, s *stream.Stream, src memory.Slice[T], to int, dst memory.Slice[T], from int) error {
	if b == nil {
		return nccl.Group(func(b *nccl.Batch) error { return exchangeOf(b, c, s, src, to, dst, from) })
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
			err := exchangeOf(b, c, s, dst.Slice(have*part, (have+step)*part), rank^step, dst.Slice(get*part, (get+step)*part), rank^step)
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// pieces describes the expected content of a rank's destination after the call.
func (o *operation) pieces(l layout, rank, n, root int) (list []piece) {
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
func (o *operation) offsets(l layout, rank int) (dst, src int) {
	switch o.kind {
	case allGather, gather, hypercube:
		return 0, rank * l.send
	case reduceScatter, scatter:
		return rank * l.recv, 0
	}
	return 0, 0
}

// A localState is the state that the ranks of this process share.
type localState struct {
	barrier    barrier
	localCalls [][]issue    // the calls of each local rank, if one rank issues for all
	batch      *route.Batch // for these calls
	batchErr   error        // of the last operation that one rank issued for all
}

// batched returns calls that issue the corresponding calls of all local ranks in one batch,
// once all local ranks have reached them.
func (r *rank) batched(ctx context.Context, calls []issue) []func() error {
	r.localCalls[r.local] = calls
	list := make([]func() error, len(calls))
	for k := range calls {
		list[k] = func() error {
			return r.onFirst(ctx, func() error { return r.issueAll(k) })
		}
	}
	return list
}

// unbatched returns calls that issue the calls of this rank only.
func unbatched(calls []issue) []func() error {
	list := make([]func() error, len(calls))
	for k, call := range calls {
		list[k] = func() error { return call(nil) }
	}
	return list
}

// onFirst runs fn on the first local rank when all local ranks have called onFirst, and
// returns its error to all callers.
func (r *rank) onFirst(ctx context.Context, fn func() error) error {
	n := r.group.Locals()
	r.barrier.wait(ctx, n)
	if r.local == 0 && ctx.Err() == nil {
		r.batchErr = fn()
	}
	r.barrier.wait(ctx, n)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.batchErr
}

// issueAll issues call k of all local ranks in one batch.
func (r *rank) issueAll(k int) error {
	b := r.batch
	defer b.Reset()
	for _, calls := range r.localCalls {
		if err := calls[k](b.Batch); err != nil {
			return err
		}
	}
	return b.Enqueue()
}

// A replay is a graph with all iterations of a plan, of one rank or of all local ranks.
type replay struct {
	rank *rank
	exec *graph.Exec
	all  bool
}

// capture captures the calls of the rank, or of all local ranks if p.together is set.
func (r *rank) capture(ctx context.Context, p *Plan, calls []func() error) (*replay, error) {
	iterate := func(issue func(k int) error) func() error {
		return func() error {
			for i := range p.Iterations {
				if err := issue(i % len(calls)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	x := &replay{rank: r, all: p.together}
	if !x.all {
		var err error
		x.exec, err = graph.Capture([]*stream.Stream{r.s}, iterate(func(k int) error { return calls[k]() }), nil)
		return x, err
	}
	err := r.onFirst(ctx, func() (err error) {
		x.exec, err = graph.Capture(r.group.Streams(), iterate(r.issueAll), nil)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, x.close())
	}
	return x, nil
}

// launch launches the graph on the stream of the rank, or on the streams of all local ranks.
func (x *replay) launch(ctx context.Context) error {
	s := x.rank.s
	if !x.all {
		return x.exec.Launch(s)
	}
	return x.rank.onFirst(ctx, func() error {
		all := x.rank.group.Streams()
		if err := gpu.Join(s, all); err != nil {
			return err
		}
		if err := x.exec.Launch(s); err != nil {
			return err
		}
		return gpu.Fork(s, all)
	})
}

func (x *replay) close() error { return x.exec.Close() } // only the first rank has the graph of all local ranks
