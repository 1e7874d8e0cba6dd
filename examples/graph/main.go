// Graph captures a step over all devices once and launches it many times.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
)

func main() {
	log.SetFlags(0)
	if err := loop(); err != nil {
		log.Fatal("graph: ", err)
	}
}

func loop() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print("graph: ", note)
	}
	g, err := comm.Local(ctx, sys.Devices()...)
	if err != nil {
		return err
	}
	defer g.Close() // after the graph, which uses it
	xs, err := comm.Make[float32](g, 1024)
	if err != nil {
		return err
	}
	defer xs.Close()

	const inStep, steps = 10, 100
	step := func() error { // the mean over all ranks, some times
		for range inStep {
			if err := comm.AllReduce(g, comm.Avg, xs...); err != nil {
				return err
			}
		}
		return nil
	}
	if err := fill(g, xs); err != nil {
		return err
	}
	if err := step(); err != nil { // the ranks connect in their first operation, which no graph can capture
		return err
	}
	eager, err := timed(ctx, g, steps, step)
	if err != nil {
		return err
	}
	exec, err := graph.Capture(g.Streams(), step) // records; nothing runs
	if err != nil {
		return err
	}
	defer exec.Close()

	if err := fill(g, xs); err != nil { // new inputs, the same memory
		return err
	}
	for _, s := range g.Streams()[1:] { // the launch is ordered with one stream
		if err := g.Stream(0).WaitStream(s); err != nil {
			return err
		}
	}
	captured, err := timed(ctx, g, steps, func() error { return exec.Launch(g.Stream(0)) })
	if err != nil {
		return err
	}
	mean := make([]float32, xs[0].Len())
	if err := xs[0].CopyTo(g.Stream(0), mean); err != nil {
		return err
	}
	fmt.Printf("the mean of 1 to %d is %g; %d launches of %d operations: %v one by one, %v as a graph\n",
		g.Size(), mean[0], steps, exec.Nodes(), eager.Round(time.Microsecond), captured.Round(time.Microsecond))
	return nil
}

// fill gives rank i the number i+1.
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
