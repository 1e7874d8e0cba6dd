package graph_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// onStream runs an example with a stream of a virtual device and two slices of one number.
func onStream(example func(s *stream.Stream, x, y memory.Slice[float32]) error) {
	if err := withSlices(example); err != nil {
		log.Fatal(err)
	}
}

func withSlices(example func(s *stream.Stream, x, y memory.Slice[float32]) error) error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		return err
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		return err
	}
	defer s.Close()
	x, err := memory.MakeFrom(s, []float32{1})
	if err != nil {
		return err
	}
	defer x.Close()
	y, err := memory.MakeFrom(s, []float32{0})
	if err != nil {
		return err
	}
	defer y.Close()
	return example(s, x, y)
}

// Each launch adds x to y.
func ExampleBegin() {
	onStream(func(s *stream.Stream, x, y memory.Slice[float32]) error {
		add, err := sum(x, y)
		if err != nil {
			return err
		}
		r, err := graph.Begin(s, nil)
		if err != nil {
			return err
		}
		if err := add(s); err != nil {
			return errors.Join(err, r.Abort())
		}
		exec, err := r.End()
		if err != nil {
			return err
		}
		defer exec.Close()
		for range 3 {
			if err := exec.Launch(s); err != nil {
				return err
			}
		}
		out := make([]float32, 1)
		err = y.CopyTo(s, out)
		fmt.Println(out)
		return err
	})
	// Output: [3]
}

// sum returns a function that enqueues y = x + y.
func sum(x, y memory.Slice[float32]) (func(s *stream.Stream) error, error) {
	a, err := tensor.Of(x, 1)
	if err != nil {
		return nil, err
	}
	b, err := tensor.Of(y, 1)
	return func(s *stream.Stream) error { return tensor.Add(s, b, a, b) }, err
}

// A call copies other inputs in, and launches the graph.
func ExampleNewCallable() {
	onStream(func(s *stream.Stream, x, y memory.Slice[float32]) error {
		add, err := sum(x, x)
		if err != nil {
			return err
		}
		call, err := graph.NewCallable(s, []memory.Slice[float32]{x}, add, nil)
		if err != nil {
			return err
		}
		defer call.Close()
		out := make([]float32, 1)
		for _, in := range []float32{5, 7} {
			if err := errors.Join(y.CopyFrom(s, []float32{in}), call.Call(s, y), x.CopyTo(s, out)); err != nil {
				return err
			}
			fmt.Println(out)
		}
		return nil
	})
	// Output:
	// [10]
	// [14]
}
