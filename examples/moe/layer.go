package main

import (
	"context"
	"errors"
	"math/rand/v2"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The layer: y = Σ gate·relu(x·up)·down over the chosen experts of a token. Its loss is the mean of
// (y - want)²/2.
const (
	tokens  = 64 // of a step, on all ranks together
	width   = 16 // elements of a token
	hidden  = 32 // elements between the products of an expert
	experts = 8
	choices = 2
	rate    = 4.0 // learning rate
)

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

// A layer has the tensors of this process's rank: its part of the tokens, which are embeddings that learn,
// too, its experts, and a copy of the router. What begins with d is a gradient, times tokens·width.
type layer struct {
	g    *comm.Group
	s    *stream.Stream
	e    *comm.Experts
	opt  *optim.Optimizer
	rows []comm.ExpertRows // of the forward and of the backward pass
	all  []tensor.Tensor   // to close

	x, want, y, dy, dx          tensor.Tensor // [tokens of this rank, width]
	router, drouter             tensor.Tensor // [width, experts]
	up, dup                     tensor.Tensor // [experts of this rank, width, hidden]
	down, ddown                 tensor.Tensor // [experts of this rank, hidden, width]
	scores, dscores             tensor.Tensor // [tokens, experts]
	chosen                      tensor.Tensor // [tokens, choices]: the numbers of experts
	best, gates, dgates, dbest  tensor.Tensor // [tokens, choices]
	answers                     tensor.Tensor // [tokens, choices, width]: the row of each choice
	hiddens, dhiddens, positive tensor.Tensor // [experts of this rank, room for rows, hidden], and for relu's gradient
	made, dinputs               tensor.Tensor // [experts of this rank, room for rows, width]
	loss                        tensor.Tensor // [1, 1]
}

func newLayer(ctx context.Context, g *comm.Group) (l *layer, err error) {
	n, own := tokens/g.Size(), experts/g.Size()
	l = &layer{g: g, s: g.Stream(0)}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if l.e, err = comm.NewExperts(ctx, g, &comm.ExpertsConfig{DType: memory.Float32, Experts: experts, TopK: choices, Hidden: width, MaxTokens: n}); err != nil {
		return l, err
	}
	for range 2 {
		rows, err := l.e.Make()
		if err != nil {
			return l, err
		}
		l.rows = append(l.rows, rows...)
	}
	add := func(t tensor.Tensor, e error) tensor.Tensor {
		l.all, err = append(l.all, t), errors.Join(err, e)
		return t
	}
	empty := func(shape ...int) tensor.Tensor { return add(tensor.Make(l.s, memory.Float32, shape...)) }
	filled := func(list []float32, shape ...int) tensor.Tensor { return add(tensor.MakeFrom(l.s, list, shape...)) }
	mine := func(list []float32) []float32 { k := len(list) / g.Size(); return list[g.Rank()*k : (g.Rank()+1)*k] }
	x, want, router, up, down := data()
	l.x, l.want = filled(mine(x), n, width), filled(mine(want), n, width)
	l.router, l.up, l.down = filled(router, width, experts), filled(mine(up), own, width, hidden), filled(mine(down), own, hidden, width)
	l.y, l.dy, l.dx, l.answers = empty(n, width), empty(n, width), empty(n, width), empty(n, choices, width)
	l.drouter, l.dup, l.ddown = empty(width, experts), empty(own, width, hidden), empty(own, hidden, width)
	l.scores, l.dscores, l.loss = empty(n, experts), empty(n, experts), empty(1, 1)
	l.best, l.gates, l.dgates, l.dbest = empty(n, choices), empty(n, choices), empty(n, choices), empty(n, choices)
	room := l.rows[0].Rows.Size(1)
	l.hiddens, l.dhiddens, l.made, l.dinputs = empty(own, room, hidden), empty(own, room, hidden), empty(own, room, width), empty(own, room, width)
	l.chosen = add(tensor.Make(l.s, memory.Int32, n, choices))
	l.positive = add(tensor.Make(l.s, memory.Uint8, own, room, 16)) // a bit for each element, in steps of 16 bytes
	if err != nil {
		return l, err
	}
	l.opt, err = optim.NewSGD(l.s, []optim.Group{{Params: []optim.Param{
		{Value: l.x, Grad: l.dx}, {Value: l.router, Grad: l.drouter}, {Value: l.up, Grad: l.dup}, {Value: l.down, Grad: l.ddown},
	}}}, &optim.SGDConfig{LR: rate / (tokens * width)})
	return l, err
}

var minus, _ = kernel.NewElementwise("a - b", &kernel.ElementwiseConfig{Inputs: []string{"a", "b"}, Floats: func(in, out []float64) { out[0] = in[0] - in[1] }})

// step enqueues the forward pass, the backward pass and the update. Nothing waits for the device.
func (l *layer) step() error {
	s, in, dout, n := l.s, l.rows[0], l.rows[1], l.x.Size(0)
	one := func(t tensor.Tensor) []tensor.Tensor { return []tensor.Tensor{t} } // by local rank
	return errors.Join(
		// The router chooses experts by their scores. Their gates are the softmax of these scores.
		tensor.MatMul(s, l.scores, l.x, l.router, nil),
		tensor.TopK(s, l.best, l.chosen, l.scores),
		tensor.Softmax(s, l.gates, l.best),

		// The tokens travel to their experts and back. Places without a row are zeros, which change nothing.
		in.Rows.Zero(s),
		l.e.Dispatch([]comm.ExpertRows{in}, one(l.x), one(l.chosen), nil),
		tensor.MatMul(s, l.hiddens, in.Rows, l.up, &tensor.MatMulConfig{Epilogue: tensor.ReLU, Aux: l.positive}),
		tensor.MatMul(s, l.made, l.hiddens, l.down, nil),
		l.e.Combine(one(l.y), one(l.made), one(in.Routes), &comm.CombineConfig{Weights: one(l.gates), Rows: one(l.answers)}),
		minus.Launch(s, kernel.Out(floats(l.dy)), kernel.In(floats(l.y)), kernel.In(floats(l.want))),
		tensor.MatMul(s, l.loss, view(l.dy, 1, n*width), view(l.dy, n*width, 1), &tensor.MatMulConfig{Alpha: new(0.5 / (tokens * width))}),
		comm.OfTensors(l.g).AllReduce(comm.Sum, l.loss),

		// Backward, the gradient travels to the experts with the weights of the gates, and back without.
		dout.Rows.Zero(s),
		l.e.Dispatch([]comm.ExpertRows{dout}, one(l.dy), one(l.chosen), &comm.DispatchConfig{Weights: one(l.gates)}),
		tensor.MatMul(s, l.ddown, transposed(l.hiddens), dout.Rows, nil),
		tensor.MatMul(s, l.dhiddens, dout.Rows, transposed(l.down), &tensor.MatMulConfig{Epilogue: tensor.ReLUGrad, Aux: l.positive}),
		tensor.MatMul(s, l.dup, transposed(in.Rows), l.dhiddens, nil),
		tensor.MatMul(s, l.dinputs, l.dhiddens, transposed(l.up), nil),
		l.e.Combine(one(l.dx), one(l.dinputs), one(in.Routes), nil),

		// The gradient of a gate is the product of its row with that of the result.
		tensor.MatMul(s, view(l.dgates, n, choices, 1), l.answers, view(l.dy, n, width, 1), nil),
		tensor.SoftmaxGrad(s, l.dbest, l.dgates, l.gates),
		l.dscores.Zero(s),
		tensor.ScatterAdd(s, l.dscores, l.dbest, l.chosen),
		tensor.MatMul(s, l.drouter, l.x.T(), l.dscores, nil),
		comm.OfTensors(l.g).AllReduce(comm.Sum, l.drouter),
		tensor.MatMul(s, l.dx, l.dscores, l.router.T(), &tensor.MatMulConfig{Beta: new(1.)}),
		l.opt.Step(s, nil),
	)
}

// train returns the loss of each step, before its update.
func train(ctx context.Context, g *comm.Group, steps int) (losses []float32, err error) {
	l, err := newLayer(ctx, g)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Wait(ctx), l.close()) }()
	for range steps {
		loss := make([]float32, 1)
		if err := errors.Join(l.step(), floats(l.loss).CopyTo(l.s, loss)); err != nil { // the copy waits
			return nil, err
		}
		losses = append(losses, loss...)
	}
	return losses, nil
}

func (l *layer) close() error {
	errs := []error{l.opt.Close(), l.e.Close()}
	for i := range l.rows {
		errs = append(errs, l.rows[i].Close())
	}
	for _, t := range l.all {
		errs = append(errs, t.Close())
	}
	return errors.Join(errs...)
}

// floats, view and transposed are of tensors whose layout fits: an error is a mistake of the program.
func floats(t tensor.Tensor) memory.Slice[float32]     { return must(tensor.Slice[float32](t)) }
func view(t tensor.Tensor, shape ...int) tensor.Tensor { return must(t.View(shape...)) }
func transposed(t tensor.Tensor) tensor.Tensor         { return must(t.Transpose(1, 2)) }

func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}
