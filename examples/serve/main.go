// Serve runs the forward pass of a stack of transformer blocks with tensor parallelism. The
// layers of each half of a block are column-parallel and row-parallel, so a half needs one
// all-reduce. comm.AllReduceNorm does it together with the residual and the norm in one
// kernel. The whole step is a graph. The program uses all devices in one process, or one device in each
// process of a job.
//
//	bin/serve
//	chorus run --nproc-per-node 2 -- bin/serve -steps 1000
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("serve: ")
	steps := flag.Int("steps", 20, "`number` of forward passes that are timed")
	flag.Parse()
	if *steps < 1 {
		log.Fatalf("-steps is %d: want at least 1", *steps)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *steps); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, steps int) error {
	g, err := comm.Init(ctx, &comm.InitConfig{
		Group: &comm.Config{Strategy: comm.OwnKernels}, AllDevices: true, Fallback: func(note string) { log.Print(note) },
	})
	if err != nil {
		return err
	}
	defer g.Close()
	got, each, err := serve(ctx, g, steps)
	if err != nil {
		return err
	}
	if g.Rank() == 0 {
		fmt.Printf("%d layers on %d ranks, all-reduces by %s: %v for each step of %d tokens\n", layers, g.Size(), g.Strategy(), each.Round(time.Microsecond/10), tokens)
		fmt.Printf("the last token is %.2f\n", got[len(got)-width:])
	}
	return g.Shutdown(ctx)
}

// serve runs the model and returns the result of the first local rank, and the time of a step.
func serve(ctx context.Context, g *comm.Group, steps int) (result []float32, each time.Duration, err error) {
	e := &engine{g: g}
	defer func() { err = errors.Join(err, e.close()) }()
	for i := range g.Locals() {
		m, err := newShard(g, i)
		e.shards = append(e.shards, m)
		if err != nil {
			return nil, 0, err
		}
	}
	// The first step loads the kernels and chooses the algorithms of the products.
	if err := errors.Join(e.step(), g.Wait(ctx)); err != nil {
		return nil, 0, err
	}
	if e.exec, err = graph.Capture(g.Streams(), e.step, nil); err != nil {
		return nil, 0, err
	}
	begun := time.Now()
	for range steps {
		if err := e.exec.Launch(g.Stream(0)); err != nil {
			return nil, 0, err
		}
	}
	if err := g.Wait(ctx); err != nil {
		return nil, 0, err
	}
	each = time.Since(begun) / time.Duration(max(steps, 1))
	out := make([]memory.BFloat16Bits, tokens*width)
	if err := e.shards[0].a.CopyTo(g.Stream(0), out); err != nil {
		return nil, 0, err
	}
	for _, x := range out {
		result = append(result, x.Float32())
	}
	return result, each, nil
}

// An engine runs the model on the local ranks of a group.
type engine struct {
	g      *comm.Group
	shards []*shard
	exec   *graph.Exec
}

// step enqueues a forward pass.
func (e *engine) step() error {
	if err := e.each((*shard).begin); err != nil {
		return err
	}
	if err := e.reduce(func(m *shard) bfloats { return m.first }); err != nil {
		return err
	}
	for l := range layers {
		if err := e.half(l, 0, (*shard).attend); err != nil {
			return err
		}
		if err := e.half(l, 1, (*shard).feed); err != nil {
			return err
		}
	}
	return nil
}

// half enqueues one half of a block.
func (e *engine) half(layer, i int, do func(*shard, *block) error) error {
	if err := e.each(func(m *shard) error { return do(m, &m.blocks[layer]) }); err != nil {
		return err
	}
	return e.reduce(func(m *shard) bfloats { return m.blocks[layer].norms[i] })
}

// each calls do for each local rank.
func (e *engine) each(do func(*shard) error) error {
	for _, m := range e.shards {
		if err := do(m); err != nil {
			return err
		}
	}
	return nil
}

// reduce enqueues the all-reduce, the residual and the norm.
func (e *engine) reduce(weight func(*shard) bfloats) error {
	var a, residual, x, w comm.Shards[memory.BFloat16Bits]
	for _, m := range e.shards {
		a, residual, x, w = append(a, m.a), append(residual, m.residual), append(x, m.x), append(w, weight(m))
	}
	return comm.AllReduceNorm(e.g, a, residual, x, w, &comm.NormConfig{Eps: eps})
}

func (e *engine) close() error {
	err := e.exec.Close()
	for _, m := range e.shards {
		err = errors.Join(err, m.close())
	}
	return err
}
