// Ddp trains a small classifier of handwritten digits with data parallelism. Each
// process has one device and a part of every batch, and a ddp.Reducer sums the
// gradients while the backward pass is still running.
//
//	chorus run --nproc-per-node 4 -- bin/ddp
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
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/memory"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("ddp: ")
	file := flag.String("json", "", "`file` for the results in JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *file); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, file string) error {
	begun := time.Now()
	g, err := comm.Init(ctx, &comm.InitConfig{Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	res, err := train(ctx, g)
	if err != nil {
		return err
	}
	// Shut down together, so that no rank reports another one as lost.
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	if g.Rank() != 0 {
		return nil
	}
	fmt.Println(res)
	return res.Write(file)
}

func train(ctx context.Context, g *comm.Group) (*training.Result, error) {
	m, err := training.NewModel(g.Device(0))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	var flat [3]memory.Slice[float32] // parameters, gradients and momenta
	var parts [3][]memory.Slice[float32]
	for i := range flat {
		if flat[i], parts[i], err = zeros(m); err != nil {
			return nil, err
		}
		defer flat[i].Close()
	}
	params, grads, momenta := flat[0], flat[1], flat[2]
	m.Params, m.Grads = parts[0], parts[1]
	if err := start(g, m, params); err != nil {
		return nil, err
	}
	// Gradients are weighted by the rows of each rank, so they are summed. With a
	// small first bucket, the reduction of the last layer overlaps with the
	// backward pass of the first layer.
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{m.Grads}, &ddp.ReducerConfig{FirstBucketBytes: 6 << 10, Op: new(comm.Sum)})
	if err != nil {
		return nil, err
	}
	defer red.Close()
	t := training.Trainer{
		Group:  g,
		Models: []*training.Model{m},
		Ready:  red.Ready,
		Update: func() error {
			if err := red.Finish(m.Stream); err != nil {
				return err
			}
			return m.SGD(params, momenta, grads)
		},
	}
	return t.Run(ctx)
}

// zeros allocates contiguous memory with the lengths of the parameters, filled with zeros.
func zeros(m *training.Model) (flat memory.Slice[float32], parts []memory.Slice[float32], err error) {
	if flat, parts, err = memory.MakeFlat[float32](m.Stream, training.ParamLens...); err != nil {
		return flat, nil, err
	}
	if err := flat.Zero(m.Stream); err != nil {
		return flat, nil, errors.Join(err, flat.Close())
	}
	return flat, parts, nil
}

// start broadcasts rank 0's parameters.
func start(g *comm.Group, m *training.Model, params memory.Slice[float32]) error {
	if err := m.Init(); err != nil {
		return err
	}
	if err := g.Stream(0).WaitStream(m.Stream); err != nil {
		return err
	}
	if err := comm.BroadcastFrom(g, 0, params); err != nil {
		return err
	}
	return m.Stream.WaitStream(g.Stream(0))
}
