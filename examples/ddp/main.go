// Ddp trains a small classifier of handwritten digits by data parallelism: each
// process has a device and a part of every batch, and a comm.Reducer sums the
// gradients while the backward pass still runs.
//
//	chorus run --nproc-per-node 4 -- bin/ddp
package main

import (
	"context"
	"encoding/json"
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

// A result is what -json writes.
type result struct {
	Losses       []float32 `json:"losses"` // of each step, over all ranks
	TestAccuracy float64   `json:"test_accuracy"`
	Ranks        int       `json:"ranks"`
	Backend      string    `json:"backend"`
	Seconds      float64   `json:"seconds"`
}

func run(ctx context.Context, file string) (err error) {
	start := time.Now()
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
	res := &result{Ranks: g.Size(), Backend: sys.Backend()}
	if err := train(ctx, g, res); err != nil {
		return err
	}
	// Leave together, so that no rank takes another for lost.
	if err := errors.Join(g.Shutdown(ctx), sess.Shutdown(ctx)); err != nil {
		return err
	}
	res.Seconds = time.Since(start).Seconds()
	if g.Rank() != 0 {
		return nil
	}
	fmt.Printf("ranks %d, backend %s, steps %d, loss %.4f -> %.4f, test accuracy %.3f, %.1f s\n", res.Ranks, res.Backend,
		len(res.Losses), res.Losses[0], res.Losses[len(res.Losses)-1], res.TestAccuracy, res.Seconds)
	return write(file, res)
}

func train(ctx context.Context, g *comm.Group, res *result) error {
	data, test, err := loadDigits()
	if err != nil {
		return err
	}
	m, err := newModel(g.Device(0), max(batchRows, test.rows()))
	if err != nil {
		return err
	}
	defer m.close()
	// All ranks start from rank 0's parameters.
	if err := g.Stream(0).WaitStream(m.s); err != nil {
		return err
	}
	if err := comm.BroadcastFrom(g, 0, m.flat[0]); err != nil {
		return err
	}
	if err := m.s.WaitStream(g.Stream(0)); err != nil {
		return err
	}
	// Gradients are weighted by the rows of each rank, so they are summed. The
	// small first bucket makes the reduction of the last layer overlap with the
	// backward pass of the first one.
	red, err := comm.NewReducer(g, &comm.ReducerConfig{FirstBucketBytes: 6 << 10, Op: new(comm.Sum)}, m.grads)
	if err != nil {
		return err
	}
	defer red.Close()
	losses, err := memory.Make[float32](m.s, steps)
	if err != nil {
		return err
	}
	defer losses.Close()
	for e := range epochs {
		for i := range steps {
			if err := trainStep(g, m, red, data.slice(i*batchRows, (i+1)*batchRows), losses.Slice(i, i+1)); err != nil {
				return err
			}
		}
		ls, err := gather(ctx, g, m, losses)
		if err != nil {
			return err
		}
		res.Losses = append(res.Losses, ls...)
		if g.Rank() == 0 {
			fmt.Printf("epoch %d of %d: loss %.4f\n", e+1, epochs, ls[steps-1])
		}
	}
	res.TestAccuracy, err = m.accuracy(test)
	return err
}

// trainStep enqueues one step on this rank's part of the batch. The host only
// waits for the batch to be copied.
func trainStep(g *comm.Group, m *model, red *comm.Reducer[float32], batch dataset, loss floatSlice) error {
	from, to := share(batch.rows(), g.Rank(), g.Size())
	if err := m.load(batch.slice(from, to)); err != nil {
		return err
	}
	if err := m.forward(); err != nil {
		return err
	}
	if err := m.backward(loss, red); err != nil {
		return err
	}
	if err := red.Finish(m.s); err != nil {
		return err
	}
	return m.step(0.1, 0.9)
}

// gather sums the losses of an epoch over the ranks and copies them to the host.
func gather(ctx context.Context, g *comm.Group, m *model, losses floatSlice) ([]float32, error) {
	s := g.Stream(0)
	if err := s.WaitStream(m.s); err != nil {
		return nil, err
	}
	if err := comm.AllReduce(g, comm.Sum, losses); err != nil {
		return nil, err
	}
	// The host waits for the group first: it gives up when a rank is lost.
	if err := g.Wait(ctx); err != nil {
		return nil, err
	}
	if err := m.s.WaitStream(s); err != nil {
		return nil, err
	}
	host := make([]float32, losses.Len())
	return host, losses.CopyTo(m.s, host)
}

func write(file string, res *result) error {
	if file == "" {
		return nil
	}
	b, err := json.Marshal(res)
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}
