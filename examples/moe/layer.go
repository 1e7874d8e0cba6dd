package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The layer: y = Σ gate·relu(x·up)·down over the chosen experts of a token.
const (
	tokens  = 64 // of a step, on all ranks together
	width   = 16 // elements of a token
	hidden  = 32 // elements between the products of an expert
	experts = 8
	choices = 2
	rate    = 4.0 // learning rate, for the mean over the tokens
)

// train returns the loss of each step.
func train(ctx context.Context, g *comm.Group, steps int) (losses []float64, err error) {
	if experts%g.Size() != 0 {
		return nil, fmt.Errorf("%d experts for %d ranks: want a number of ranks that divides them", experts, g.Size())
	}
	l := &layer{g: g}
	for i := range g.Locals() {
		l.ranks = append(l.ranks, newRank(g.Stream(i), g.Rank()+i, g.Size()))
	}
	defer func() {
		for _, r := range l.ranks {
			err = errors.Join(err, r.close(&r.step), r.close(&r.kept))
		}
	}()
	for range steps {
		loss, err := l.train(ctx)
		if err != nil {
			return nil, err
		}
		losses = append(losses, loss)
	}
	return losses, nil
}

// data returns the tokens of all ranks, what the layer is to make of them, and its first
// parameters.
func data() (x, want, router, up, down []float32) {
	r := rand.New(rand.NewPCG(1, 2))
	draw := func(n int, scale float64) (list []float32) {
		for range n {
			list = append(list, float32(scale*r.NormFloat64()))
		}
		return list
	}
	x = draw(tokens*width, 1)
	for i := range x { // a function that differs from region to region
		t := i / width * width
		if x[t] > 0 {
			want = append(want, x[t+(i+1)%width])
		} else {
			want = append(want, -x[t+(i+2)%width])
		}
	}
	return x, want, draw(width*experts, 0.5), draw(experts*width*hidden, 0.25), draw(experts*hidden*width, 0.2)
}

// A layer has the local ranks of a group.
type layer struct {
	g     *comm.Group
	ranks []*rank
}

// A rank has the parameters of a rank and the tensors of a step. An error of an operation is
// kept, and the operations after it do nothing.
type rank struct {
	s                *stream.Stream
	own              int           // experts
	x, want          tensor.Tensor // [tokens of this rank, width]
	router, up, down tensor.Tensor // [width experts], [own width hidden], [own hidden width]
	err              error
	kept, step       []tensor.Tensor // to close at the end, and after the step

	// The routes of the step. A slot is a choice of a token; the slots of a rank are sorted by their experts.
	gates, gate0, gate1          tensor.Tensor // of each slot [tokens·choices], and of each choice [tokens]
	slots, token, score          tensor.Tensor // the slot, the token, and the place among the scores of each sent row
	sorted, back                 tensor.Tensor // the order by experts of received rows, and the inverse
	counts, sends, recvs, groups []int         // rows for each expert, to and from each rank, and of each own expert
	inputs, hiddens, made        tensor.Tensor // rows of the experts
	rows, sent, received         tensor.Tensor // what a phase works on, and an exchange
	loss, dscores, drouter       tensor.Tensor
}

func newRank(s *stream.Stream, index, size int) *rank {
	r := &rank{s: s, own: experts / size}
	x, want, router, up, down := data()
	mine := func(all []float32, shape ...int) tensor.Tensor {
		n := len(all) / size
		return r.upload(all[index*n:(index+1)*n], shape...)
	}
	r.x, r.want = mine(x, tokens/size, width), mine(want, tokens/size, width)
	r.router = r.upload(router, width, experts)
	r.up, r.down = mine(up, r.own, width, hidden), mine(down, r.own, hidden, width)
	r.kept, r.step = r.step, nil
	return r
}

// train runs one step: forward, backward and the update. It returns the loss before the
// update. Only the exchange of counts waits for the devices, and the loss.
func (l *layer) train(ctx context.Context) (float64, error) {
	counts := make([][]int, len(l.ranks))
	for i, r := range l.ranks {
		r.route()
		counts[i] = r.counts
	}
	if err := l.errors(); err != nil {
		return 0, err
	}
	from, err := comm.ExchangeCounts(ctx, l.g, counts)
	if err != nil {
		return 0, err
	}
	for i, r := range l.ranks {
		r.plan(from[i])
		r.rows = r.selected(r.x, r.token)
	}
	l.toExperts((*rank).forward)
	l.fromExperts((*rank).combine)
	l.toExperts((*rank).backward)
	l.fromExperts((*rank).finish)
	if err := l.errors(); err != nil {
		return 0, err
	}
	var sums []tensor.Tensor
	for _, r := range l.ranks {
		sums = append(sums, r.drouter)
	}
	if err := comm.OfTensors(l.g).AllReduce(comm.Sum, sums...); err != nil {
		return 0, err
	}
	for i, r := range l.ranks {
		sums[i] = r.loss
	}
	if err := comm.OfTensors(l.g).AllReduce(comm.Sum, sums...); err != nil {
		return 0, err
	}
	loss := make([]float32, 1)
	for _, r := range l.ranks {
		r.do(func() error { return tensor.Add(r.s, r.router, r.router, r.drouter) })
		r.download(loss, r.loss)
		r.do(func() error { return r.close(&r.step) })
	}
	return float64(loss[0]), l.errors()
}

// toExperts sends rows to the experts, and calls fn with the received rows in their order by experts.
func (l *layer) toExperts(fn func(*rank)) {
	for _, r := range l.ranks {
		r.sent, r.received = r.rows, r.make(r.sorted.Len(), width)
	}
	l.exchange(false)
	for _, r := range l.ranks {
		r.rows = r.selected(r.received, r.sorted)
		fn(r)
	}
}

// fromExperts sends the rows that the experts made back, and calls fn with them.
func (l *layer) fromExperts(fn func(*rank)) {
	for _, r := range l.ranks {
		r.sent, r.received = r.selected(r.made, r.back), r.make(r.token.Len(), width)
	}
	l.exchange(true)
	for _, r := range l.ranks {
		r.rows = r.received
		fn(r)
	}
}

func (l *layer) exchange(back bool) {
	if l.errors() != nil {
		return
	}
	var dst, src []tensor.Tensor
	var recvs, sends [][]int
	for _, r := range l.ranks {
		dst, src, recvs, sends = append(dst, r.received), append(src, r.sent), append(recvs, r.recvs), append(sends, r.sends)
	}
	if back {
		recvs, sends = sends, recvs
	}
	err := comm.OfTensors(l.g).AllToAllV(dst, recvs, src, sends)
	l.ranks[0].do(func() error { return err })
}

func (l *layer) errors() error {
	for _, r := range l.ranks {
		if r.err != nil {
			return r.err
		}
	}
	return nil
}

// route scores the experts for each token and chooses two. Their gates are the softmax of the two
// scores.
func (r *rank) route() {
	n := r.x.Size(0)
	scores, best, chosen := r.make(n, experts), r.make(n, choices), r.makeOf(memory.Int32, n, choices)
	r.product(scores, r.x, r.router, 1, 0)
	r.do(func() error { return tensor.TopK(r.s, best, chosen, scores) })
	r.gate0, r.gate1, r.gates = r.make(n), r.make(n), r.make(n, choices)
	a, b := r.make(n), r.make(n)
	r.copy(a, r.column(best, 0))
	r.copy(b, r.column(best, 1))
	r.each(gate, r.gate0, a, b)
	r.each(gate, r.gate1, b, a)
	r.copy(r.column(r.gates, 0), r.gate0)
	r.copy(r.column(r.gates, 1), r.gate1)
	list := make([]int32, n*choices)
	r.download(list, chosen)
	// The slots by their experts; those of an expert are sorted by their tokens.
	r.counts = make([]int, experts)
	var slots, token, score []int32
	for e := range int32(experts) {
		for slot, expert := range list {
			if expert == e && r.err == nil {
				r.counts[e]++
				slots, token, score = append(slots, int32(slot)), append(token, int32(slot/choices)), append(score, int32(slot/choices*experts)+e)
			}
		}
	}
	r.slots, r.token, r.score = r.upload32(slots), r.upload32(token), r.upload32(score)
}

// plan finds the order of the received rows by experts. from has the rows from each rank for
// each own expert.
func (r *rank) plan(from []int) {
	size := experts / r.own
	r.sends, r.recvs, r.groups = make([]int, size), make([]int, size), make([]int, r.own)
	starts, at := make([]int, len(from)), 0
	for k, n := range from {
		starts[k] = at
		at += n
		r.recvs[k/r.own] += n
		r.groups[k%r.own] += n
		r.sends[k/r.own] += r.counts[k]
	}
	var sorted []int32
	back := make([]int32, at)
	for e := range r.own {
		for peer := range size {
			k := peer*r.own + e
			for i := range from[k] {
				back[starts[k]+i] = int32(len(sorted))
				sorted = append(sorted, int32(starts[k]+i))
			}
		}
	}
	r.sorted, r.back = r.upload32(sorted), r.upload32(back)
}

// forward computes the experts.
func (r *rank) forward() {
	n := r.rows.Size(0)
	r.hiddens, r.made = r.make(n, hidden), r.make(n, width)
	inputs := r.rows
	r.do(func() error {
		return tensor.GroupedMatMul(r.s, r.hiddens, inputs, r.up, r.groups, &tensor.MatMulConfig{Epilogue: tensor.ReLU})
	})
	r.do(func() error { return tensor.GroupedMatMul(r.s, r.made, r.hiddens, r.down, r.groups, nil) })
	r.inputs = inputs
}

// combine computes the output and the loss of the tokens, and the gradients of the rows and of the
// scores.
func (r *rank) combine() {
	n, slots := r.x.Size(0), r.token.Len()
	y, diff := r.zeros(n, width), r.make(n, width)
	weights := r.selected(r.view(r.gates, n*choices), r.slots)
	answers := r.rows
	r.do(func() error { return tensor.IndexAdd(r.s, y, answers, r.token, weights) })
	r.each(minus, diff, y, r.want)
	r.loss = r.make(1, 1)
	r.product(r.loss, r.view(diff, 1, n*width), r.view(diff, n*width, 1), 0.5/(tokens*width), 0)
	dy := r.selected(diff, r.token) // times tokens·width

	// The gradient of a gate is the product of its row with dy, that of a row dy times its gate.
	dgates := r.make(slots, 1, 1)
	r.product(dgates, r.view(dy, slots, 1, width), r.view(answers, slots, width, 1), 1, 0)
	all := make([]int32, slots)
	for i := range all {
		all[i] = int32(i)
	}
	r.rows = r.zeros(slots, width)
	r.do(func() error { return tensor.IndexAdd(r.s, r.rows, dy, r.upload32(all), weights) })

	// The gradient of a score is gate0·gate1 times the difference of the gates' gradients.
	bySlot, d0, d1, a, b := r.zeros(n*choices), r.make(n), r.make(n), r.make(n), r.make(n)
	r.do(func() error { return tensor.IndexAdd(r.s, bySlot, r.view(dgates, slots), r.slots, tensor.Tensor{}) })
	r.copy(a, r.column(r.view(bySlot, n, choices), 0))
	r.copy(b, r.column(r.view(bySlot, n, choices), 1))
	r.each(score, d0, r.gate0, r.gate1, a, b)
	r.each(score, d1, r.gate0, r.gate1, b, a)
	pairs := r.make(n, choices)
	r.copy(r.column(pairs, 0), d0)
	r.copy(r.column(pairs, 1), d1)
	r.dscores = r.zeros(n * experts)
	r.do(func() error {
		return tensor.IndexAdd(r.s, r.dscores, r.selected(r.view(pairs, n*choices), r.slots), r.score, tensor.Tensor{})
	})
	r.dscores = r.view(r.dscores, n, experts)
}

// backward computes the gradients of the experts' inputs, and then updates the experts.
func (r *rank) backward() {
	n := r.rows.Size(0)
	grad, masked := r.make(n, hidden), r.make(n, hidden)
	r.made = r.make(n, width)
	r.grouped(grad, r.rows, r.down)
	r.each(mask, masked, r.hiddens, grad)
	r.grouped(r.made, masked, r.up)
	r.update(r.down, r.hiddens, r.rows)
	r.update(r.up, r.inputs, masked)
}

// finish computes the update of the router, and then updates the tokens, which are embeddings that learn, too.
func (r *rank) finish() {
	n := r.x.Size(0)
	r.drouter = r.make(width, experts)
	r.product(r.drouter, r.x.T(), r.dscores, -rate/(tokens*width), 0)
	dx := r.make(n, width)
	r.product(dx, r.dscores, r.router.T(), 1, 0)
	r.do(func() error { return tensor.IndexAdd(r.s, dx, r.rows, r.token, tensor.Tensor{}) })
	r.each(learn, r.x, r.x, dx)
}

// ---- operations ----

// The functions of single elements.
var (
	gate  = function([]string{"a", "b"}, "1 / (1 + exp(b - a))", func(v []float64) float64 { return 1 / (1 + math.Exp(v[1]-v[0])) })
	minus = function([]string{"a", "b"}, "a - b", func(v []float64) float64 { return v[0] - v[1] })
	mask  = function([]string{"h", "g"}, "h > 0 ? g : 0 * g", func(v []float64) float64 {
		if v[0] > 0 {
			return v[1]
		}
		return 0
	})
	score = function([]string{"p", "q", "a", "b"}, "p * q * (a - b)", func(v []float64) float64 { return v[0] * v[1] * (v[2] - v[3]) })
)

// learn subtracts a gradient, times the learning rate.
var learn = function([]string{"a", "b"}, fmt.Sprintf("a - %vf * b", rate/(tokens*width)), func(v []float64) float64 { return v[0] - rate/(tokens*width)*v[1] })

func function(inputs []string, code string, fn func(in []float64) float64) *kernel.Elementwise {
	e, err := kernel.NewElementwise(code, &kernel.ElementwiseConfig{Inputs: inputs, Floats: func(in, out []float64) { out[0] = fn(in) }})
	if err != nil {
		panic(err) // the code is a constant
	}
	return e
}

func (r *rank) do(fn func() error) {
	if r.err == nil {
		r.err = fn()
	}
}

func (r *rank) close(list *[]tensor.Tensor) (err error) {
	for _, t := range *list {
		err = errors.Join(err, t.Close())
	}
	*list = nil
	return err
}

func (r *rank) make(shape ...int) tensor.Tensor { return r.makeOf(memory.Float32, shape...) }

func (r *rank) makeOf(d memory.DType, shape ...int) (t tensor.Tensor) {
	r.do(func() (err error) {
		t, err = tensor.Make(r.s, d, shape...)
		return err
	})
	r.step = append(r.step, t)
	return t
}

func (r *rank) zeros(shape ...int) tensor.Tensor {
	t := r.make(shape...)
	r.do(func() error {
		x, err := tensor.Slice[float32](t)
		if err == nil {
			err = x.Zero(r.s)
		}
		return err
	})
	return t
}

func upload[T memory.Element](r *rank, t tensor.Tensor, list []T) tensor.Tensor {
	r.do(func() error {
		x, err := tensor.Slice[T](t)
		if err == nil {
			err = x.CopyFrom(r.s, list)
		}
		return err
	})
	return t
}

func (r *rank) upload(list []float32, shape ...int) tensor.Tensor {
	return upload(r, r.make(shape...), list)
}
func (r *rank) upload32(list []int32) tensor.Tensor {
	return upload(r, r.makeOf(memory.Int32, len(list)), list)
}

// download copies a tensor to the host. It waits.
func (r *rank) download(list any, t tensor.Tensor) {
	r.do(func() (err error) {
		var host tensor.Tensor
		switch list := list.(type) {
		case []float32:
			host, err = tensor.OfHost(list, t.Shape()...)
		case []int32:
			host, err = tensor.OfHost(list, t.Shape()...)
		}
		if err == nil {
			err = tensor.Copy(r.s, host, t)
		}
		return err
	})
}

func (r *rank) copy(dst, src tensor.Tensor) {
	r.do(func() error { return tensor.Copy(r.s, dst, src) })
}

func (r *rank) view(t tensor.Tensor, shape ...int) (v tensor.Tensor) {
	r.do(func() (err error) {
		v, err = t.View(shape...)
		return err
	})
	return v
}

func (r *rank) column(t tensor.Tensor, i int) (v tensor.Tensor) {
	r.do(func() (err error) {
		v, err = t.Select(1, i)
		return err
	})
	return v
}

// product computes c = alpha·a·b + beta·c.
func (r *rank) product(c, a, b tensor.Tensor, alpha, beta float64) {
	r.do(func() error { return tensor.MatMul(r.s, c, a, b, &tensor.MatMulConfig{Alpha: &alpha, Beta: &beta}) })
}

// grouped computes the product of the rows of each own expert with its transposed matrix.
func (r *rank) grouped(c, a, b tensor.Tensor) {
	r.do(func() error {
		t, err := b.Transpose(1, 2)
		if err == nil {
			err = tensor.GroupedMatMul(r.s, c, a, t, r.groups, nil)
		}
		return err
	})
}

// update subtracts the gradient of each own expert's matrix, the product of its transposed inputs
// with the gradients of its outputs, times the learning rate.
func (r *rank) update(matrices, inputs, grads tensor.Tensor) {
	at := 0
	for e, n := range r.groups {
		r.do(func() error {
			m, err := matrices.Select(0, e)
			in, errIn := inputs.Narrow(0, at, n)
			out, errOut := grads.Narrow(0, at, n)
			if err := errors.Join(err, errIn, errOut); err != nil || n == 0 {
				return err
			}
			r.product(m, in.T(), out, -rate/(tokens*width), 1)
			return r.err
		})
		at += n
	}
}

// selected returns the rows that an index names.
func (r *rank) selected(src, index tensor.Tensor) tensor.Tensor {
	shape := append([]int{index.Len()}, r.rowOf(src)...)
	dst := r.make(shape...)
	r.do(func() error { return tensor.IndexSelect(r.s, dst, src, index) })
	return dst
}

func (r *rank) rowOf(t tensor.Tensor) []int {
	if t.Dims() == 0 {
		return nil
	}
	return t.Shape()[1:]
}

// each computes a function of the elements.
func (r *rank) each(fn *kernel.Elementwise, out tensor.Tensor, in ...tensor.Tensor) {
	r.do(func() error {
		y, err := tensor.Slice[float32](out)
		operands := []kernel.Operand{kernel.Out(y)}
		for _, t := range in {
			x, errX := tensor.Slice[float32](t)
			err = errors.Join(err, errX)
			operands = append(operands, kernel.In(x))
		}
		if err != nil || out.Len() == 0 {
			return err
		}
		return fn.Launch(r.s, operands...)
	})
}
