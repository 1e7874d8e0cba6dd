package graph_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
)

// A sum over two devices, captured once and launched for other numbers.
func ExampleCapture() {
	if err := sums(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// [3]
	// [30]
}

func sums() error {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		return err
	}
	g, err := comm.Local(ctx, sys.Devices(), nil)
	if err != nil {
		return err
	}
	defer g.Close()
	xs, err := comm.Make[float32](g, 1)
	if err != nil {
		return err
	}
	defer xs.Close()
	sum := func() error { return comm.AllReduce(g, comm.Sum, xs...) }
	for i, x := range xs {
		if err := x.Zero(g.Stream(i)); err != nil {
			return err
		}
	}
	if err := sum(); err != nil { // the ranks connect before the capture
		return err
	}
	exec, err := graph.Capture(g.Streams(), sum, nil)
	if err != nil {
		return err
	}
	defer exec.Close()
	for _, in := range [][]float32{{1, 2}, {10, 20}} {
		for i, x := range xs {
			if err := x.CopyFrom(g.Stream(i), in[i:i+1]); err != nil {
				return err
			}
		}
		// The launch is ordered with the one stream that it is given.
		if err := g.Stream(0).WaitStream(g.Stream(1)); err != nil {
			return err
		}
		if err := exec.Launch(g.Stream(0)); err != nil {
			return err
		}
		if err := g.Stream(1).WaitStream(g.Stream(0)); err != nil {
			return err
		}
		out := make([]float32, 1)
		if err := xs[0].CopyTo(g.Stream(0), out); err != nil {
			return err
		}
		fmt.Println(out)
	}
	return nil
}
