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
	e, err := comm.NewExperts(ctx, g, &comm.ExpertsConfig{DType: memory.Float32, Experts: experts, TopK: choices, Hidden: width, MaxTokens: tokens / g.Size()})
	if err != nil {
		return nil, err
	}
	l := &layer{g: g, e: e}
	defer func() {
		for _, r := range l.ranks {
			err = errors.Join(err, r.close(&r.step), r.close(&r.kept))
		}
		err = errors.Join(err, g.Wait(ctx), e.Close())
	}()
	rows, err := e.Make()
	if err != nil {
		return nil, err
	}
	for i := range g.Locals() {
		l.ranks = append(l.ranks, newRank(g.Stream(i), g.Rank()+i, g.Size(), rows[i]))
	}
	for range steps {
		loss, err := l.train()
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
	e     *comm.Experts
	ranks []*rank
}

// A rank has the parameters of a rank and the tensors of a step. An error of an operation is
// kept, and the operations after it do nothing.
type rank struct {
	s                *stream.Stream
	x, want          tensor.Tensor // [tokens of this rank, width]
	router, up, down tensor.Tensor // [width experts], [own width hidden], [own hidden width]
	starts           tensor.Tensor // the place of each token's first score [tokens, choices]
	err              error
	kept, step       []tensor.Tensor // to close at the end, and after the step

	gates, gate0, gate1    tensor.Tensor   // of each token's choices [tokens, choices], and of each choice [tokens]
	chosen                 tensor.Tensor   // the experts of each token
	got                    comm.ExpertRows // by the experts of this rank; the rows are those of inputs, and then of gradients
	inputs, hiddens, made  tensor.Tensor   // rows of the experts
	y, answers, diff, dx   tensor.Tensor   // of the tokens; answers has a row for each choice
	loss, dscores, drouter tensor.Tensor
}

func newRank(s *stream.Stream, index, size int, got comm.ExpertRows) *rank {
	r := &rank{s: s, got: got}
	x, want, router, up, down := data()
	mine := func(all []float32, shape ...int) tensor.Tensor {
		n := len(all) / size
		return r.upload(all[index*n:(index+1)*n], shape...)
	}
	r.x, r.want = mine(x, tokens/size, width), mine(want, tokens/size, width)
	r.router = r.upload(router, width, experts)
	r.up, r.down = mine(up, experts/size, width, hidden), mine(down, experts/size, hidden, width)
	starts := make([]int32, tokens/size*choices)
	for i := range starts {
		starts[i] = int32(i / choices * experts)
	}
	r.starts = upload(r, r.makeOf(memory.Int32, tokens/size, choices), starts)
	r.kept, r.step = append(r.step, got.Rows, got.Counts, got.Routes), nil
	return r
}

// train runs one step: forward, backward and the update. It returns the loss before the
// update. Only that waits for the devices.
func (l *layer) train() (float64, error) {
	l.each((*rank).route)
	l.dispatch(func(r *rank) tensor.Tensor { return r.x }, nil)
	l.each((*rank).forward)
	gates := &comm.CombineConfig{Weights: l.all(func(r *rank) tensor.Tensor { return r.gates }), Rows: l.all(func(r *rank) tensor.Tensor { return r.answers })}
	l.combine(func(r *rank) tensor.Tensor { return r.y }, gates)
	l.each((*rank).compare)
	l.dispatch(func(r *rank) tensor.Tensor { return r.diff }, &comm.DispatchConfig{Weights: gates.Weights})
	l.each((*rank).backward)
	l.combine(func(r *rank) tensor.Tensor { return r.dx }, nil)
	l.each((*rank).finish)
	for _, sum := range []func(r *rank) tensor.Tensor{func(r *rank) tensor.Tensor { return r.drouter }, func(r *rank) tensor.Tensor { return r.loss }} {
		l.do(func() error { return comm.OfTensors(l.g).AllReduce(comm.Sum, l.all(sum)...) })
	}
	loss := make([]float32, 1)
	l.each(func(r *rank) {
		r.do(func() error { return tensor.Add(r.s, r.router, r.router, r.drouter) })
		r.download(loss, r.loss)
		r.do(func() error { return r.close(&r.step) })
	})
	return float64(loss[0]), l.errors()
}

// dispatch sends rows of the tokens to their experts. Places without a row become zeros, which change nothing.
func (l *layer) dispatch(x func(*rank) tensor.Tensor, cfg *comm.DispatchConfig) {
	var dst []comm.ExpertRows
	for _, r := range l.ranks {
		r.zero(r.got.Rows)
		dst = append(dst, r.got)
	}
	l.do(func() error {
		return l.e.Dispatch(dst, l.all(x), l.all(func(r *rank) tensor.Tensor { return r.chosen }), cfg)
	})
}

// combine sends the rows that the experts made back, and adds them.
func (l *layer) combine(out func(*rank) tensor.Tensor, cfg *comm.CombineConfig) {
	l.do(func() error {
		return l.e.Combine(l.all(out), l.all(func(r *rank) tensor.Tensor { return r.made }), l.all(func(r *rank) tensor.Tensor { return r.got.Routes }), cfg)
	})
}

func (l *layer) each(fn func(*rank)) {
	for _, r := range l.ranks {
		fn(r)
	}
}

func (l *layer) all(of func(*rank) tensor.Tensor) (list []tensor.Tensor) {
	l.each(func(r *rank) { list = append(list, of(r)) })
	return list
}

// do runs fn for all ranks, unless one has failed.
func (l *layer) do(fn func() error) {
	if l.errors() == nil {
		l.ranks[0].do(fn)
	}
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
	scores, best := r.make(n, experts), r.make(n, choices)
	r.chosen = r.makeOf(memory.Int32, n, choices)
	r.product(scores, r.x, r.router, 1, 0)
	r.do(func() error { return tensor.TopK(r.s, best, r.chosen, scores) })
	r.gate0, r.gate1, r.gates = r.make(n), r.make(n), r.make(n, choices)
	a, b := r.columns(best)
	r.each(gate, r.gate0, a, b)
	r.each(gate, r.gate1, b, a)
	r.join(r.gates, r.gate0, r.gate1)
}

// forward computes the experts.
func (r *rank) forward() {
	own, n := r.up.Size(0), r.got.Rows.Size(1)
	r.inputs, r.hiddens, r.made = r.make(own, n, width), r.make(own, n, hidden), r.make(own, n, width)
	r.copy(r.inputs, r.got.Rows)
	r.do(func() error {
		return tensor.MatMul(r.s, r.hiddens, r.inputs, r.up, &tensor.MatMulConfig{Epilogue: tensor.ReLU})
	})
	r.product(r.made, r.hiddens, r.down, 1, 0)
	r.y, r.answers = r.make(r.x.Size(0), width), r.make(r.x.Size(0), choices, width)
}

// compare computes the loss of the tokens, and the gradients of the result, times tokens·width, and of the scores.
func (r *rank) compare() {
	n := r.x.Size(0)
	r.diff, r.loss = r.make(n, width), r.make(1, 1)
	r.each(minus, r.diff, r.y, r.want)
	r.product(r.loss, r.view(r.diff, 1, n*width), r.view(r.diff, n*width, 1), 0.5/(tokens*width), 0)

	// The gradient of a gate is the product of its row with that of the result, and the gradient of a score is gate0·gate1
	// times the difference of the gates' gradients.
	dgates := r.make(n, choices, 1)
	r.product(dgates, r.answers, r.view(r.diff, n, width, 1), 1, 0)
	d0, d1, pairs, places := r.make(n), r.make(n), r.make(n, choices), r.makeOf(memory.Int32, n, choices)
	a, b := r.columns(r.view(dgates, n, choices))
	r.each(score, d0, r.gate0, r.gate1, a, b)
	r.each(score, d1, r.gate0, r.gate1, b, a)
	r.join(pairs, d0, d1)
	r.dscores = r.make(n * experts)
	r.zero(r.dscores)
	r.do(func() error { return tensor.Add(r.s, places, r.starts, r.chosen) })
	r.do(func() error {
		return tensor.IndexAdd(r.s, r.dscores, r.view(pairs, n*choices), r.view(places, n*choices), tensor.Tensor{})
	})
	r.dscores = r.view(r.dscores, n, experts)
}

// backward computes the gradients of the experts' inputs, and then updates the experts.
func (r *rank) backward() {
	grad, masked := r.make(r.hiddens.Shape()...), r.make(r.hiddens.Shape()...)
	r.made, r.dx = r.make(r.inputs.Shape()...), r.make(r.x.Shape()...)
	r.product(grad, r.got.Rows, r.transposed(r.down), 1, 0)
	r.each(mask, masked, r.hiddens, grad)
	r.product(r.made, masked, r.transposed(r.up), 1, 0)
	r.product(r.down, r.transposed(r.hiddens), r.got.Rows, -rate/(tokens*width), 1)
	r.product(r.up, r.transposed(r.inputs), masked, -rate/(tokens*width), 1)
}

// finish computes the update of the router, and then updates the tokens, which are embeddings that learn, too.
func (r *rank) finish() {
	r.drouter = r.make(width, experts)
	r.product(r.drouter, r.x.T(), r.dscores, -rate/(tokens*width), 0)
	r.product(r.dx, r.dscores, r.router.T(), 1, 1)
	r.each(learn, r.x, r.x, r.dx)
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

func (r *rank) zero(t tensor.Tensor) {
	r.do(func() error {
		x, err := tensor.Slice[float32](t)
		if err == nil {
			err = x.Zero(r.s)
		}
		return err
	})
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

// download copies a tensor to the host. It waits.
func (r *rank) download(list []float32, t tensor.Tensor) {
	r.do(func() error {
		host, err := tensor.OfHost(list, t.Shape()...)
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

// columns returns copies of the two columns of a tensor, and join writes them.
func (r *rank) columns(t tensor.Tensor) (a, b tensor.Tensor) {
	a, b = r.make(t.Size(0)), r.make(t.Size(0))
	r.copy(a, r.column(t, 0))
	r.copy(b, r.column(t, 1))
	return a, b
}

func (r *rank) join(t, a, b tensor.Tensor) {
	r.copy(r.column(t, 0), a)
	r.copy(r.column(t, 1), b)
}

func (r *rank) column(t tensor.Tensor, i int) (v tensor.Tensor) {
	r.do(func() (err error) {
		v, err = t.Select(1, i)
		return err
	})
	return v
}

// transposed returns the transposed matrices of a batch.
func (r *rank) transposed(t tensor.Tensor) (v tensor.Tensor) {
	r.do(func() (err error) {
		v, err = t.Transpose(1, 2)
		return err
	})
	return v
}

// product computes c = alpha·a·b + beta·c.
func (r *rank) product(c, a, b tensor.Tensor, alpha, beta float64) {
	r.do(func() error { return tensor.MatMul(r.s, c, a, b, &tensor.MatMulConfig{Alpha: &alpha, Beta: &beta}) })
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
