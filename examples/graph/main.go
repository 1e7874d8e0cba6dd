// Graph captures a step over all devices once and launches it repeatedly.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/graph"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("graph: ")
	if err := compare(); err != nil {
		log.Fatal(err)
	}
}

const inStep, steps = 10, 100 // operations in a step, and steps

// compare measures the steps without and with a graph.
func compare() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	xs, err := comm.Make[float32](g, 1024)
	if err != nil {
		return err
	}
	defer xs.Close()
	step := func() error { // several all-reduces to the mean
		for range inStep {
			if err := comm.AllReduce(g, comm.Avg, xs...); err != nil {
				return err
			}
		}
		return nil
	}
	eager, err := runEager(ctx, g, xs, step)
	if err != nil {
		return err
	}
	captured, nodes, err := runGraph(ctx, g, xs, step)
	if err != nil {
		return err
	}
	mean := make([]float32, xs[0].Len())
	if err := xs[0].CopyTo(g.Stream(0), mean); err != nil {
		return err
	}
	fmt.Printf("the mean of 1 to %d is %g; %d launches of %d operations: %v eager, %v as a graph\n",
		g.Size(), mean[0], steps, nodes, eager.Round(time.Microsecond), captured.Round(time.Microsecond))
	return nil
}

// runEager enqueues each operation by itself.
func runEager(ctx context.Context, g *comm.Group, xs comm.Shards[float32], step func() error) (time.Duration, error) {
	if err := fill(g, xs); err != nil {
		return 0, err
	}
	if err := step(); err != nil { // connects the ranks before the capture
		return 0, err
	}
	return timed(ctx, g, steps, step)
}

// runGraph captures a step and launches it.
func runGraph(ctx context.Context, g *comm.Group, xs comm.Shards[float32], step func() error) (took time.Duration, nodes int, err error) {
	exec, err := graph.Capture(g.Streams(), step, nil) // records; nothing runs
	if err != nil {
		return 0, 0, err
	}
	defer exec.Close()                  // before the group is closed, because the graph uses it
	if err := fill(g, xs); err != nil { // new inputs in the same memory
		return 0, 0, err
	}
	for _, s := range g.Streams()[1:] { // the launch is ordered after g.Stream(0) only
		if err := g.Stream(0).WaitStream(s); err != nil {
			return 0, 0, err
		}
	}
	took, err = timed(ctx, g, steps, func() error { return exec.Launch(g.Stream(0)) })
	return took, exec.Nodes(), err
}

// fill fills the slice of rank i with i+1.
func fill(g *comm.Group, xs comm.Shards[float32]) error {
	for i, x := range xs {
		in := make([]float32, x.Len())
		for k := range in {
			in[k] = float32(i + 1)
		}
		if err := x.CopyFrom(g.Stream(i), in); err != nil {
			return err
		}
	}
	return nil
}

// timed runs f n times and waits for the devices.
func timed(ctx context.Context, g *comm.Group, n int, f func() error) (time.Duration, error) {
	if err := g.Wait(ctx); err != nil {
		return 0, err
	}
	start := time.Now()
	for range n {
		if err := f(); err != nil {
			return 0, err
		}
	}
	err := g.Wait(ctx)
	return time.Since(start), err
}
