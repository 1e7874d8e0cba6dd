// Moe trains a mixture of experts. A router sends each token to two of eight experts, which are divided
// among the ranks: the rows of the tokens travel to the experts and back, forward and backward. The loss
// is the same on 1, 2, 4 and 8 ranks, each a process with one device.
//
//	bin/moe
//	chorus run --nproc-per-node 4 -- bin/moe -steps 50
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"log"
	"math/rand/v2"
	"os/signal"
	"syscall"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/tensor"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("moe: ")
	steps := flag.Int("steps", 20, "`number` of steps")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *steps); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, steps int) error {
	g, err := comm.Init(ctx, &comm.InitConfig{Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	losses, err := train(ctx, g, steps)
	if err != nil {
		return err
	}
	for i, loss := range losses {
		if g.Rank() == 0 && (i%5 == 0 || i == steps-1) {
			log.Printf("step %d: loss %.5f", i, loss)
		}
	}
	return g.Shutdown(ctx)
}

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

// data returns the tokens of all ranks, what the layer is to make of them (negated), and its first parameters.
func data() (x, minusWant, router, up, down []float32) {
	r := rand.New(rand.NewPCG(1, 2))
	draw := func(n int, scale float64) (list []float32) {
		for range n {
			list = append(list, float32(scale*r.NormFloat64()))
		}
		return list
	}
	x = draw(tokens*width, 1)
	for i := range x { // a function that differs from region to region
		minusWant = append(minusWant, -x[i]*x[i/width*width])
	}
	return x, minusWant, draw(width*experts, 0.5), draw(experts*width*hidden, 0.25), draw(experts*hidden*width, 0.2)
}

// train trains the layer on this process's part of the tokens, which are embeddings that learn, too, with its part of the
// experts and a copy of the router. It returns the loss of each step, before its update.
func train(ctx context.Context, g *comm.Group, steps int) (losses []float32, err error) {
	s, n, own := g.Stream(0), tokens/g.Size(), experts/g.Size()
	var owned []io.Closer
	defer func() {
		err = errors.Join(err, g.Wait(ctx))
		for _, x := range owned {
			err = errors.Join(err, x.Close())
		}
	}()
	e, err := comm.NewExperts(ctx, g, &comm.ExpertsConfig{DType: memory.Float32, Experts: experts, TopK: choices, Hidden: width, MaxTokens: n})
	if err != nil {
		return nil, err
	}
	owned = append(owned, e)
	var rows [2][]comm.ExpertRows // of the forward and of the backward pass, by local rank
	for i := range rows {
		if rows[i], err = e.Make(); err != nil {
			return nil, err
		}
		owned = append(owned, &rows[i][0])
	}
	in, dout := rows[0][0], rows[1][0]
	keep := func(t tensor.Tensor, failed error) tensor.Tensor {
		owned, err = append(owned, t), errors.Join(err, failed)
		return t
	}
	filled := func(list []float32, shape ...int) tensor.Tensor { return keep(tensor.MakeFrom(s, list, shape...)) }
	empty := func(shape ...int) tensor.Tensor { return keep(tensor.Make(s, memory.Float32, shape...)) }
	like := func(t tensor.Tensor) tensor.Tensor { return keep(tensor.MakeLike(s, t, t.DType())) }
	view := func(t tensor.Tensor, shape ...int) tensor.Tensor { return keep(t.View(shape...)) }
	mine := func(list []float32) []float32 { k := len(list) / g.Size(); return list[g.Rank()*k : (g.Rank()+1)*k] }

	allX, allMinusWant, allRouter, allUp, allDown := data()
	x, minusWant, router := filled(mine(allX), n, width), filled(mine(allMinusWant), n, width), filled(allRouter, width, experts)
	up, down := filled(mine(allUp), own, width, hidden), filled(mine(allDown), own, hidden, width)
	scores, best, gates := empty(n, experts), empty(n, choices), empty(n, choices)
	chosen := keep(tensor.Make(s, memory.Int32, n, choices)) // the numbers of experts
	room := in.Rows.Size(1)                                  // for rows of an expert
	hiddens, made := empty(own, room, hidden), like(in.Rows)
	positive := keep(tensor.Make(s, memory.Uint8, own, room, 16)) // a bit for each element, in steps of 16 bytes
	y, answers, loss := like(x), empty(n, choices, width), empty(1, 1)
	// Gradients are multiplied by tokens·width.
	dx, drouter, dup, ddown, dy := like(x), like(router), like(up), like(down), like(y)
	dscores, dbest, dgates, dhiddens, dinputs := like(scores), like(best), like(gates), like(hiddens), like(in.Rows)
	dyRow, dyColumn, dyColumns := view(dy, 1, n*width), view(dy, n*width, 1), view(dy, n, width, 1)
	dgatesColumns := view(dgates, n, choices, 1)
	value := make([]float32, 1)
	host := keep(tensor.OfHost(value, 1, 1))
	if err != nil {
		return nil, err
	}
	opt, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{
		{Value: x, Grad: dx}, {Value: router, Grad: drouter}, {Value: up, Grad: dup}, {Value: down, Grad: ddown},
	}}}, &optim.SGDConfig{LR: rate / (tokens * width)})
	if err != nil {
		return nil, err
	}
	owned = append(owned, opt)

	one := func(t tensor.Tensor) []tensor.Tensor { return []tensor.Tensor{t} } // by local rank
	for range steps {
		if err := errors.Join( // nothing waits for the device before the copy of the loss
			// The router chooses experts by their scores. Their gates are the softmax of these scores.
			tensor.MatMul(s, scores, x, router, nil),
			tensor.TopK(s, best, chosen, scores),
			tensor.Softmax(s, gates, best),

			// The tokens travel to their experts and back. Rows behind those of an expert hold anything: grouped products
			// leave them out.
			e.Dispatch(rows[0], one(x), one(chosen), nil),
			tensor.MatMul(s, hiddens, in.Rows, up, &tensor.MatMulConfig{Epilogue: tensor.ReLU, Aux: positive}),
			tensor.GroupedMatMulAt(s, made, hiddens, down, in.Counts, nil),
			e.Combine(one(y), one(made), one(in.Routes), &comm.CombineConfig{Weights: one(gates), Rows: one(answers)}),
			tensor.Add(s, dy, y, minusWant),
			tensor.MatMul(s, loss, dyRow, dyColumn, &tensor.MatMulConfig{Alpha: new(0.5 / (tokens * width))}),
			comm.OfTensors(g).AllReduce(comm.Sum, loss),

			// Backward, the gradient travels to the experts with the weights of the gates, and back without.
			e.Dispatch(rows[1], one(dy), one(chosen), &comm.DispatchConfig{Weights: one(gates)}),
			tensor.GroupedMatMulInner(s, ddown, hiddens.T(), dout.Rows, in.Counts, nil),
			tensor.MatMul(s, dhiddens, dout.Rows, down.T(), &tensor.MatMulConfig{Epilogue: tensor.ReLUGrad, Aux: positive}),
			tensor.GroupedMatMulInner(s, dup, in.Rows.T(), dhiddens, in.Counts, nil),
			tensor.GroupedMatMulAt(s, dinputs, dhiddens, up.T(), in.Counts, nil),
			e.Combine(one(dx), one(dinputs), one(in.Routes), nil),

			// The gradient of a gate is the product of its row with that of the result.
			tensor.MatMul(s, dgatesColumns, answers, dyColumns, nil),
			tensor.SoftmaxGrad(s, dbest, dgates, gates),
			dscores.Zero(s),
			tensor.ScatterAdd(s, dscores, dbest, chosen),
			tensor.MatMul(s, drouter, x.T(), dscores, nil),
			comm.OfTensors(g).AllReduce(comm.Sum, drouter),
			tensor.MatMul(s, dx, dscores, router.T(), &tensor.MatMulConfig{Beta: new(1.)}),
			opt.Step(s, nil),
			tensor.Copy(s, host, loss),
		); err != nil {
			return nil, err
		}
		losses = append(losses, value...)
	}
	return losses, nil
}
