// Ddp trains a small classifier of handwritten digits by data parallelism: each
// process has a device and a part of every batch, and a comm.Reducer sums the
// gradients while the backward pass still runs.
//
//	chorus run --nproc-per-node 4 -- bin/ddp
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/digits"
	"github.com/gochorus/chorus/memory"
)

func main() {
	file := flag.String("json", "", "write the results to this `file`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *file); err != nil {
		fmt.Fprintln(os.Stderr, "ddp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, file string) (err error) {
	begun := time.Now()
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" && sess.Rank() == 0 {
		fmt.Fprintln(os.Stderr, "ddp:", note)
	}
	dev, err := sys.Open(sess.LocalRank())
	if err != nil {
		return err
	}
	g, err := comm.Join(ctx, sess, dev)
	if err != nil {
		return err
	}
	defer g.Close()
	res, err := train(ctx, g)
	if err != nil {
		return err
	}
	// Leave together, so that no rank takes another for lost.
	if err := errors.Join(g.Shutdown(ctx), sess.Shutdown(ctx)); err != nil {
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	if sess.Rank() != 0 {
		return nil
	}
	fmt.Println(res)
	return res.Write(file)
}

func train(ctx context.Context, g *comm.Group) (*digits.Result, error) {
	m, err := digits.NewModel(g.Device(0))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	params, paramParts, err := zeros(m)
	if err != nil {
		return nil, err
	}
	defer params.Close()
	grads, gradParts, err := zeros(m)
	if err != nil {
		return nil, err
	}
	defer grads.Close()
	momenta, _, err := zeros(m)
	if err != nil {
		return nil, err
	}
	defer momenta.Close()
	m.Params, m.Grads = paramParts, gradParts
	if err := start(g, m, params); err != nil {
		return nil, err
	}
	// Gradients are weighted by the rows of each rank, so they are summed. The
	// small first bucket makes the reduction of the last layer overlap with the
	// backward pass of the first one.
	red, err := comm.NewReducer(g, &comm.ReducerConfig{FirstBucketBytes: 6 << 10, Op: new(comm.Sum)}, m.Grads)
	if err != nil {
		return nil, err
	}
	defer red.Close()
	t := digits.Trainer{
		Group:  g,
		Models: []*digits.Model{m},
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

// zeros allocates as many numbers as there are parameters, next to each other.
func zeros(m *digits.Model) (flat memory.Slice[float32], parts []memory.Slice[float32], err error) {
	if flat, parts, err = memory.MakeFlat[float32](m.Stream, digits.ParamLens...); err != nil {
		return flat, nil, err
	}
	if err := flat.Zero(m.Stream); err != nil {
		return flat, nil, errors.Join(err, flat.Close())
	}
	return flat, parts, nil
}

// start gives all ranks rank 0's parameters.
func start(g *comm.Group, m *digits.Model, params memory.Slice[float32]) error {
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
