package rng_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// Two devices with one seed draw the same numbers, those that PyTorch draws on an
// H200.
func Example() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		log.Fatal(err)
	}
	devs := sys.Devices()
	if err := rng.ManualSeedAll(0, devs...); err != nil {
		log.Fatal(err)
	}
	for _, dev := range devs {
		s, err := stream.New(dev, nil)
		if err != nil {
			log.Fatal(err)
		}
		defer s.Close()
		x, err := memory.Make[float32](s, 3)
		if err != nil {
			log.Fatal(err)
		}
		defer x.Close()
		if err := rng.Uniform(nil, s, x, 0, 1); err != nil { // nil: the device's default generator
			log.Fatal(err)
		}
		out := make([]float32, 3)
		if err := x.CopyTo(s, out); err != nil {
			log.Fatal(err)
		}
		fmt.Println(dev, out)
	}
	// Output:
	// virtual:0 [0.39904648 0.51667917 0.024930386]
	// virtual:1 [0.39904648 0.51667917 0.024930386]
}

// A state that was saved gives the same numbers again, in this process, another
// one or PyTorch.
func ExampleGenerator_State() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, err := memory.Make[int32](s, 4)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	roll := func(g *rng.Generator) []int32 {
		out := make([]int32, 4)
		if err := rng.RandomFromTo(g, s, x, 1, 7); err != nil {
			log.Fatal(err)
		}
		if err := x.CopyTo(s, out); err != nil {
			log.Fatal(err)
		}
		return out
	}
	g := rng.New(s.Device(), 42)
	roll(g)
	saved := g.State()
	fmt.Printf("%x\n", saved)
	a := roll(g)
	if err := g.SetState(saved[:]); err != nil {
		log.Fatal(err)
	}
	b := roll(g)
	fmt.Println(a[0] == b[0], a[1] == b[1], a[2] == b[2], a[3] == b[3])
	// Output:
	// 2a000000000000000400000000000000
	// true true true true
}

// Each launch of a graph draws the next numbers of the generator, which may be seeded again
// between launches.
func ExampleUniform() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, err := memory.Make[float32](s, 2)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	g := rng.New(s.Device(), 42)                               // torch.Generator("cuda").manual_seed(42)
	fill := func() error { return rng.Uniform(g, s, x, 0, 1) } // x.uniform_(generator=g)
	exec, err := graph.Capture([]*stream.Stream{s}, fill, nil) // draws nothing yet
	if err != nil {
		log.Fatal(err)
	}
	defer exec.Close()
	draw := func(step func() error) (out [2]float32) {
		if err := errors.Join(step(), x.CopyTo(s, out[:])); err != nil {
			log.Fatal(err)
		}
		return out
	}
	launch := func() error { return exec.Launch(s) }
	first, second := draw(fill), draw(launch)
	g.ManualSeed(42)
	fmt.Println(draw(launch) == first, draw(fill) == second, first == second)
	// Output: true true false
}
