package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// An ExpertsConfig describes a layer of experts. It must be the same on all ranks.
type ExpertsConfig struct {
	DType     memory.DType // of the rows: memory.Float16, memory.BFloat16 or memory.Float32
	Experts   int          // of all ranks together, a multiple of Size
	TopK      int          // experts of a token, at most 32
	Hidden    int          // elements of a row, a multiple of 16 bytes
	MaxTokens int          // of a rank in a call
	// Payload is the type of the numbers that a dispatch sends: 0 or DType for the elements themselves, or memory.Float8E4M3
	// for 8-bit floats with a scale for each 32 elements, as in AllReduceQuantized. Hidden then is a multiple of 32. A combine
	// always sends the elements.
	Payload memory.DType
}

// Experts moves the tokens of all ranks to the experts that they have chosen, and the results back. The experts of a layer are
// divided among the ranks in order: with 64 experts and 2 ranks, rank 1 has the experts 32 to 63. It does what
// low_latency_dispatch and low_latency_combine of DeepEP do, or all_to_all_vdev_2d of torch's symmetric memory.
//
// Dispatch and Combine are collective. They are enqueued on the group's streams and return at once; the host waits for nothing, neither
// for the numbers of rows, and graphs can capture them and read other ids at each launch. An Experts has memory for one operation:
// operations run one after the other, also on other streams and in graphs. They allocate nothing on the device. With several
// layers of the same shape one Experts is enough.
//
// In groups with the strategies of Chorus kernels and Tuned, whose GPUs map each other's memory, Chorus kernels move the rows: a token
// goes once to each rank that has some of its experts. The flight recorder then has a Dispatch or a Combine of the
// elements of the rank's tokens, with the number of the Experts in the group. In other groups, also over several hosts, NCCL moves blocks of a fixed size. An all-gather
// sends the tokens of each rank to all ranks. An all-to-all sends MaxTokens rows back to each rank, times the smaller of
// TopK and the experts of a rank. The bits are the same. The strategy that the group has in NewExperts decides.
//
// Methods may be called by any goroutine, in the same order on all ranks.
type Experts struct {
	owner  handle.Owner
	g      *Group
	number uint32               // in the group, from 1
	layers []fabric.ExpertLayer // of the local ranks
	own    []*fabric.Rank       // by local rank; nil if NCCL moves the rows
	blocks Shards[uint8]        // that NCCL moves
	orders []gpu.Sequence       // serialize the uses of blocks
}

// ExpertRows has what a dispatch gives a local rank. A dispatch overwrites all of Counts and Routes. Of Rows it writes only
// the rows that the counts name; the other rows keep their contents.
type ExpertRows struct {
	// Rows is [experts of the rank, Size·MaxTokens, Hidden]: the rows of each expert begin at its first row, sorted by rank and
	// token. There is always room: a token is one row of an expert, also if it names the expert twice.
	Rows tensor.Tensor
	// Counts is int32 [experts of the rank]: the number of rows of each expert.
	Counts tensor.Tensor
	// Routes is int32 [Size, MaxTokens, TopK]: the ids of all ranks, with -1 for ids that name no expert and
	// for tokens that a rank has not given. Combine needs them, and they are the same on all ranks.
	Routes tensor.Tensor
}

// Close frees the three tensors once the work that was enqueued with them has completed. It does not block.
func (r *ExpertRows) Close() error {
	if r == nil {
		return nil
	}
	return errors.Join(r.Rows.Close(), r.Counts.Close(), r.Routes.Close())
}

// NewExperts allocates the memory of an Experts on all ranks and loads its kernels. It waits for the other ranks, and for the group's
// streams. If the ranks give different configurations or one of them fails, all ranks return an error.
// On GPUs the kernels need NVRTC; without it the error matches errors.ErrUnsupported. Collective.
//
// With Chorus kernels, a rank needs twice Size times the larger of two sizes: of MaxTokens rows, or of the results that Experts
// describes. Otherwise it needs Size times the first, or twice Size times the second.
func NewExperts(ctx context.Context, g *Group, cfg *ExpertsConfig) (*Experts, error) {
	const op = "experts"
	if err := g.check(op); err != nil {
		return nil, err
	}
	e := &Experts{g: g, orders: make([]gpu.Sequence, len(g.members))}
	invalid := e.configure(cfg)
	given := fmt.Sprintf("%+v", cfg)
	if cfg != nil {
		given = fmt.Sprintf("%+v", *cfg)
	}
	if invalid != nil {
		given += fmt.Sprintf(" (%v)", invalid)
	}
	if err := g.checkSame(ctx, op, given, sameArguments); err != nil || invalid != nil {
		return nil, errors.Join(err, invalid)
	}
	g.issuing.Lock()
	g.experts++
	e.number = g.experts
	g.issuing.Unlock()
	var err error
	x := &e.layers[0]
	if e.own, err = g.routers.OpenExperts(ctx, x.SlotBytes(), g.exchanges()); err != nil {
		return nil, fmt.Errorf("comm: %s: %w", op, err)
	}
	failed := make([]error, len(g.members))
	for i := range g.members {
		failed[i] = e.prepare(ctx, i)
	}
	err = route.Agree(ctx, g, "comm: "+op, make([]bool, len(failed)), failed, func(all []collective.Said[bool]) error {
		for _, said := range all {
			if said.Failed != "" {
				return fmt.Errorf("comm: %s: %s", op, said.Failed) // which names the rank
			}
		}
		return nil
	})
	if own := errors.Join(failed...); own != nil {
		err = fmt.Errorf("comm: %s: %w", op, own)
	}
	if err != nil {
		return nil, errors.Join(err, e.free())
	}
	handle.Init(e, &e.owner, handle.About{Kind: "experts", On: g.Device(0)})
	return e, nil
}

// configure validates the configuration and describes the layer of each local rank.
func (e *Experts) configure(cfg *ExpertsConfig) error {
	const op = "experts"
	switch {
	case cfg == nil:
		return badArgument(op, "no configuration given")
	case cfg.Payload != 0 && cfg.Payload != cfg.DType && cfg.Payload != memory.Float8E4M3:
		return badArgument(op, "the payload is %s: want %s or %s", cfg.Payload, cfg.DType, memory.Float8E4M3)
	}
	for i := range e.g.members {
		x := fabric.ExpertLayer{
			DType: cfg.DType, Experts: cfg.Experts, TopK: cfg.TopK, Hidden: cfg.Hidden, MaxTokens: cfg.MaxTokens,
			Small: cfg.Payload == memory.Float8E4M3, Rank: e.g.members[i].comm.Rank(), Ranks: e.g.size,
		}
		if err := x.Check(); err != nil {
			return badArgument(op, "%w", err)
		}
		e.layers = append(e.layers, x)
	}
	return nil
}

// prepare loads the kernels of a local rank and allocates its memory.
func (e *Experts) prepare(ctx context.Context, i int) error {
	m, x := &e.g.members[i], &e.layers[i]
	if err := fabric.LoadExperts(m.comm.Device(), x); err != nil {
		return fmt.Errorf("rank %d: %w", x.Rank, err)
	}
	if e.own != nil {
		return nil
	}
	b, err := memory.Make[uint8](m.stream, x.Ranks*max(x.DispatchBytes(), 2*x.CombineBytes()))
	if err == nil {
		e.blocks = append(e.blocks, b)
		err = errors.Join(b.Zero(m.stream), m.stream.Sync(ctx)) // graphs may use it on other streams
	}
	if err != nil {
		return fmt.Errorf("rank %d: %w", x.Rank, err)
	}
	return nil
}

// Close frees the memory. Call it when all ranks have completed their
// operations, for example after Group.Wait, and before the group is closed.
// Close waits for this process's operations. While a graph has captured
// operations, it fails and the Experts stays open. It is idempotent and safe on
// nil.
func (e *Experts) Close() error {
	if e == nil || e.owner.Closed() {
		return nil
	}
	if err := e.free(); err != nil {
		return fmt.Errorf("comm: close experts: %w", err)
	}
	e.owner.Close()
	return nil
}

// free closes what is open.
func (e *Experts) free() error {
	if err := e.g.routers.CloseExperts(e.own); err != nil {
		return err
	}
	for i := range e.blocks {
		l := &e.layers[i]
		err := e.orders[i].Close(fmt.Sprintf("the memory of rank %d of %d on %s", l.Rank, l.Ranks, e.g.Device(i)), func(users []*gpu.Stream) (err error) {
			for _, s := range users {
				if s.Device().Err() == nil {
					err = errors.Join(err, s.Sync())
				}
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return e.blocks.Close()
}

// exchanges returns the exchanges of the local ranks with all other ranks.
func (g *Group) exchanges() func(i int) collective.Exchange {
	table := fabric.NewTable(len(g.members))
	return func(i int) collective.Exchange {
		seat := table.Seat(i)
		return func(ctx context.Context, mine []byte) ([][]byte, error) {
			local, err := seat(ctx, mine)
			if err != nil || len(local) == g.size {
				return local, err
			}
			var all [][]byte
			var said []byte // by the first local rank to the others
			if i == 0 {
				if all, err = GatherValues(ctx, g, Gob, local...); err == nil {
					said, err = json.Marshal(all)
				}
			}
			answers, late := seat(ctx, said)
			switch {
			case err != nil || late != nil:
				return nil, errors.Join(err, late)
			case answers[0] == nil:
				return nil, errors.New("the first local rank has not heard of the others")
			}
			return all, json.Unmarshal(answers[0], &all)
		}
	}
}

// Make allocates what a dispatch gives the local ranks, on the group's streams
// and with undefined contents. The caller closes it.
func (e *Experts) Make() (rows []ExpertRows, err error) {
	if err := e.check("make rows of experts"); err != nil {
		return nil, err
	}
	for i := range e.layers {
		x, s := &e.layers[i], e.g.Stream(i)
		var r ExpertRows
		if r.Rows, err = tensor.Make(s, x.DType, x.Own(), x.Capacity(), x.Hidden); err == nil {
			if r.Counts, err = tensor.Make(s, memory.Int32, x.Own()); err == nil {
				r.Routes, err = tensor.Make(s, memory.Int32, x.Ranks, x.MaxTokens, x.TopK)
			}
		}
		if rows = append(rows, r); err != nil {
			for k := range rows {
				err = errors.Join(err, rows[k].Close())
			}
			return nil, err
		}
	}
	return rows, nil
}

func (e *Experts) check(op string) error {
	if e == nil || e.g == nil {
		return fmt.Errorf("comm: %s: no experts given", op)
	}
	if e.owner.Closed() {
		return fmt.Errorf("comm: %s: the experts on %s: %w", op, e.g.Device(0), device.ErrClosed)
	}
	return e.g.check(op)
}

// A DispatchConfig has the options of Dispatch; nil means the defaults.
type DispatchConfig struct {
	// Weights is float32 [tokens, TopK] for each local rank, or nil. If it is set, a row of an expert is multiplied by the sum of its token's
	// weights for the expert, in float32, and rounded once. So the dispatch of a gradient of Combine's result
	// is the gradient of the rows that Combine got, if it gets the same ids and weights. They are the weights of this process's tokens:
	// other processes may give none, and their tokens then are not multiplied.
	Weights []tensor.Tensor
}

// Dispatch enqueues the transfer of tokens to their experts. x is [tokens, Hidden] for each local rank, and ids is int32 [tokens, TopK].
// The number of tokens is at most MaxTokens and may differ from rank to rank, and be 0. An id is the number of an
// expert among those of all ranks. Any other number, such as -1, names no expert. dst[i] gets
// the rows of the experts of local rank i, their number and the routes; see ExpertRows. Collective.
//
// Without weights, the gradient of x is the Combine of the gradient of the rows, without weights: it adds each row of a token once.
//
// All tensors are contiguous, on the rank's device, and those of rows begin at a multiple of 16 bytes. What dst has shares no memory
// with the operands. The operands may be changed or freed once the group's stream has passed the call. If the
// group fails meanwhile, the contents of dst are undefined.
func (e *Experts) Dispatch(dst []ExpertRows, x, ids []tensor.Tensor, cfg *DispatchConfig) error {
	const op = "dispatch"
	if err := e.check(op); err != nil {
		return err
	}
	var weights []tensor.Tensor
	if cfg != nil {
		weights = cfg.Weights
	}
	n := len(e.layers)
	if len(dst) != n || len(x) != n || len(ids) != n || weights != nil && len(weights) != n {
		return badArgument(op, "%d destinations, %d tensors of tokens, %d of ids and %d of weights for %s: want one of each, or no weights", len(dst), len(x), len(ids), len(weights), plural(n, "local rank"))
	}
	list := make([]fabric.Dispatch, n)
	for i := range list {
		l, d := &e.layers[i], &list[i]
		c := operands{e: e, op: op, i: i}
		d.Tokens = c.tokens("x", x[i])
		d.X = c.in("x", x[i], l.DType, d.Tokens, l.Hidden)
		d.IDs = c.in("ids", ids[i], memory.Int32, d.Tokens, l.TopK)
		if weights != nil {
			d.Weights = c.in("weights", weights[i], memory.Float32, d.Tokens, l.TopK)
		}
		d.Rows = c.out("rows", dst[i].Rows, l.DType, l.Own(), l.Capacity(), l.Hidden)
		d.Counts = c.out("counts", dst[i].Counts, memory.Int32, l.Own())
		d.Routes = c.out("routes", dst[i].Routes, memory.Int32, l.Ranks, l.MaxTokens, l.TopK)
		if c.err != nil {
			return c.err
		}
	}
	return e.enqueue(expertsOperation{
		kind: collective.Dispatch, bytes: e.layers[0].DispatchBytes(), tokens: x,
		own: func(i int, x *collective.Op) error { return e.own[i].Dispatch(x.Stream, &e.layers[i], &list[i]) },
		pack: func(i int) error {
			l := &e.layers[i]
			return l.PackDispatch(e.g.Stream(i), &list[i], e.blocks[i].Ptr()+uint64(l.Rank*l.DispatchBytes()))
		},
		move: func(i int, m *member, bytes int) error {
			all, rank := e.blocks[i].Slice(0, e.g.size*bytes), e.layers[i].Rank
			return nccl.AllGather(m.on, m.stream, all, all.Slice(rank*bytes, (rank+1)*bytes))
		},
		receive: func(i int) error { return e.layers[i].ReceiveDispatch(e.g.Stream(i), &list[i], e.blocks[i].Ptr()) },
	})
}

// A CombineConfig has the options of Combine; nil means the defaults. They concern the tokens of this process, so other processes may have
// other options.
type CombineConfig struct {
	// Weights is float32 [tokens, TopK] for each local rank: the factors of the choices.
	Weights []tensor.Tensor
	// Rows is [tokens, TopK, Hidden] for each local rank, or nil. It gets the row of each choice, not weighted, and zeros for choices
	// that name no expert. The gradient of a weight is the product of that row with the gradient of the result.
	Rows []tensor.Tensor
}

// Combine enqueues the transfer of the experts' results to their tokens. y[i] has the shape of ExpertRows.Rows on local rank i, and in the
// place of each row that a dispatch gave the result for it; other rows are not read. routes[i] is the Routes of that dispatch. out[i]
// is [tokens, Hidden]. Usually it has as many tokens as local rank i dispatched: tokens after those get zeros, and if there are fewer, the
// results of the others are dropped. Each token gets the sum of the rows of its choices,
// times their weights, added choice by choice. The sum is in float32, with one rounding for each
// choice (fused multiply-add), and rounded to the type of the elements at the end. Choices that name no expert
// count nothing, so a token without experts gets zeros. Collective.
//
// Without weights, each row of a token counts once, also if the token names its expert twice: that is the gradient of a dispatch.
//
// The requirements for the tensors are those of Dispatch: out and cfg.Rows share no memory with the operands.
func (e *Experts) Combine(out, y, routes []tensor.Tensor, cfg *CombineConfig) error {
	const op = "combine"
	if err := e.check(op); err != nil {
		return err
	}
	if cfg == nil {
		cfg = new(CombineConfig)
	}
	n := len(e.layers)
	if len(out) != n || len(y) != n || len(routes) != n || cfg.Weights != nil && len(cfg.Weights) != n || cfg.Rows != nil && len(cfg.Rows) != n {
		return badArgument(op, "%d results, %d tensors of rows, %d of routes, %d of weights and %d for the choices' rows for %s: want one of each, or no weights and no choices' rows",
			len(out), len(y), len(routes), len(cfg.Weights), len(cfg.Rows), plural(n, "local rank"))
	}
	list := make([]fabric.Combine, n)
	for i := range list {
		l, d := &e.layers[i], &list[i]
		c := operands{e: e, op: op, i: i}
		d.Tokens = c.tokens("out", out[i])
		d.Y = c.in("y", y[i], l.DType, l.Own(), l.Capacity(), l.Hidden)
		d.Routes = c.in("routes", routes[i], memory.Int32, l.Ranks, l.MaxTokens, l.TopK)
		if cfg.Weights != nil {
			d.Weights = c.in("weights", cfg.Weights[i], memory.Float32, d.Tokens, l.TopK)
		}
		d.Out = c.out("out", out[i], l.DType, d.Tokens, l.Hidden)
		if cfg.Rows != nil {
			d.Rows = c.out("rows", cfg.Rows[i], l.DType, d.Tokens, l.TopK, l.Hidden)
		}
		if c.err != nil {
			return c.err
		}
	}
	// What is sent is in the first half of the blocks, and what is received in the second half.
	received := func(i int) memory.Slice[uint8] {
		if e.g.size == 1 {
			return e.blocks[i]
		}
		all := e.g.size * e.layers[i].CombineBytes()
		return e.blocks[i].Slice(all, 2*all)
	}
	return e.enqueue(expertsOperation{
		kind: collective.Combine, bytes: e.layers[0].CombineBytes(), tokens: out,
		own:  func(i int, x *collective.Op) error { return e.own[i].Combine(x.Stream, &e.layers[i], &list[i]) },
		pack: func(i int) error { return e.layers[i].PackCombine(e.g.Stream(i), &list[i], e.blocks[i].Ptr()) },
		move: func(i int, m *member, bytes int) error {
			return nccl.AllToAll(m.on, m.stream, received(i), e.blocks[i].Slice(0, e.g.size*bytes))
		},
		receive: func(i int) error { return e.layers[i].ReceiveCombine(e.g.Stream(i), &list[i], received(i).Ptr()) },
	})
}

// An expertsOperation is a dispatch or a combine. own enqueues the kernels of a local rank for x, which the flight recorder has.
// Otherwise pack, move and receive enqueue the steps around a transfer of blocks by NCCL.
type expertsOperation struct {
	kind          collective.Kind
	bytes         int             // of a block
	tokens        []tensor.Tensor // what the flight recorder has, by local rank
	own           func(i int, x *collective.Op) error
	pack, receive func(i int) error
	move          func(i int, m *member, bytes int) error
}

// enqueue enqueues an operation on all local ranks. If a rank fails when others may already wait for it, the group breaks.
func (e *Experts) enqueue(o expertsOperation) error {
	g := e.g
	g.issuing.Lock()
	defer g.issuing.Unlock()
	if e.own != nil {
		ops := make([]collective.Op, len(g.members))
		for i, t := range o.tokens {
			x := &ops[i]
			x.Kind, x.DType, x.Detail, x.Stream, x.Src = o.kind, t.DType(), e.number, g.Stream(i), collective.OperandAt(t.Ptr(), t.Len(), t.Buffer())
			x.Dst = x.Src
		}
		return g.breakIfRefused(g.batch.EnqueueKernels(g.comms(), ops, func(x *collective.Op) error { return o.own(int(x.Local), x) }))
	}
	for i := range g.members {
		s, q := gpu.StreamOf(g.Stream(i)), &e.orders[i]
		if err := s.Captured(q); err != nil {
			return fmt.Errorf("comm: %s: %w", o.kind.Plain(), err)
		}
		if err := q.Begin(s); err != nil {
			return fmt.Errorf("comm: %s: %w", o.kind.Plain(), err)
		}
		defer q.End()
	}
	each := func(what string, fn func(i int) error) error {
		for i := range g.members {
			if err := fn(i); err != nil {
				return fmt.Errorf("comm: %s: %s on rank %d: %w", o.kind.Plain(), what, e.layers[i].Rank, err)
			}
		}
		return nil
	}
	if err := each("pack", o.pack); err != nil {
		return g.causeOf(err)
	}
	if g.size > 1 {
		if err := g.enqueueAll(func(i int, m *member) error { return o.move(i, m, o.bytes) }); err != nil {
			return err
		}
	}
	if err := each("receive", o.receive); err != nil {
		return g.fail(err)
	}
	return nil
}

// operands validates the operands of a local rank. The first error stays.
type operands struct {
	e         *Experts
	op        string
	i         int
	err       error
	outs, ins []namedTensor
}

type namedTensor struct {
	name string
	tensor.Tensor
}

// tokens returns the size of the first dimension.
func (c *operands) tokens(name string, t tensor.Tensor) int {
	l := &c.e.layers[c.i]
	switch {
	case t.Dims() != 2:
		c.fail("%s is %v: want a tensor of two dimensions, [tokens, %d]", name, t, l.Hidden)
	case t.Size(0) > l.MaxTokens:
		c.fail("%s is %v: want at most MaxTokens rows, [%d %d]", name, t, l.MaxTokens, l.Hidden)
	default:
		return t.Size(0)
	}
	return 0
}

func (c *operands) fail(format string, args ...any) {
	if c.err == nil {
		c.err = badArgument(c.op, "on rank %d, "+format, append([]any{c.e.layers[c.i].Rank}, args...)...)
	}
}

// in returns the address of an operand that is read, and out of one that is written.
func (c *operands) in(name string, t tensor.Tensor, d memory.DType, shape ...int) uint64 {
	p := c.use(name, t, d, shape)
	c.ins = append(c.ins, namedTensor{name, t})
	return p
}

func (c *operands) out(name string, t tensor.Tensor, d memory.DType, shape ...int) uint64 {
	p := c.use(name, t, d, shape)
	for _, other := range slices.Concat(c.ins, c.outs) {
		if c.err == nil && strided.Overlaps(t, other.Tensor) {
			c.fail("%s and %s share memory: want separate tensors", other.name, name)
		}
	}
	c.outs = append(c.outs, namedTensor{name, t})
	return p
}

// use validates an operand, and returns its address once the group's stream keeps the memory.
func (c *operands) use(name string, t tensor.Tensor, d memory.DType, shape []int) uint64 {
	if c.err != nil {
		return 0
	}
	m := &c.e.g.members[c.i]
	if err := strided.Check(name, t, m.comm.Device()); err != nil {
		c.fail("%w", err)
		return 0
	}
	switch {
	case t.DType() != d || !slices.Equal(t.Shape(), shape):
		c.fail("%s is %v: want a contiguous tensor of %s, %v", name, t, d, shape)
	case !t.Contiguous():
		c.fail("%s is %v with strides %v: want a contiguous tensor: copy it before", name, t, t.Strides())
	case t.Len() == 0:
	case d == c.e.layers[c.i].DType && t.Ptr()%16 != 0:
		c.fail("%s begins at %#x: want a multiple of 16 bytes: copy it before", name, t.Ptr())
	default:
		if err := t.RecordStream(m.stream); err != nil && c.err == nil {
			c.err = err
		}
		return t.Ptr()
	}
	return 0
}
