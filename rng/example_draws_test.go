package rng_test

import (
	"fmt"
	"log"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// drawn fills n numbers of a virtual device by a generator with seed 1, and returns them.
func drawn[T memory.Element](n int, fill func(g *rng.Generator, s *stream.Stream, x memory.Slice[T]) error) []T {
	out := make([]T, n)
	if err := drawInto(out, fill); err != nil {
		log.Fatal(err)
	}
	return out
}

func drawInto[T memory.Element](out []T, fill func(g *rng.Generator, s *stream.Stream, x memory.Slice[T]) error) error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		return err
	}
	dev := sys.Devices()[0]
	s := stream.Default(dev)
	x, err := memory.Make[T](s, len(out))
	if err != nil {
		return err
	}
	defer x.Close()
	if err := fill(rng.New(dev, 1), s, x); err != nil {
		return err
	}
	return x.CopyTo(s, out)
}

// Weights of a layer with ten inputs.
func ExampleNormal() {
	weights := drawn(1000, func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Normal(g, s, x, 0, 0.1)
	})
	var squares float64
	for _, w := range weights {
		squares += float64(w) * float64(w)
	}
	fmt.Printf("variance %.2f\n", squares/1000)
	// Output: variance 0.01
}

// The order of the rows of an epoch.
func ExamplePermutation() {
	order := drawn(5, rng.Permutation[int64])
	slices.Sort(order)
	fmt.Println(order)
	// Output: [0 1 2 3 4]
}

// A mask for dropout with probability 1/2.
func ExampleBernoulli() {
	mask := drawn(1000, func(g *rng.Generator, s *stream.Stream, x memory.Slice[bool]) error {
		return rng.Bernoulli(g, s, x, 0.5)
	})
	kept := 0
	for _, m := range mask {
		if m {
			kept++
		}
	}
	fmt.Println(kept > 400 && kept < 600)
	// Output: true
}
