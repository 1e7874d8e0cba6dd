// Random draws the same numbers repeatedly: from a seed, from a saved state, and
// from a graph. PyTorch draws the same numbers from the same seed.
package main

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

func main() {
	log.SetFlags(0)
	log.SetPrefix("random: ")
	if err := draw(); err != nil {
		log.Fatal(err)
	}
}

func draw() error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print(note)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		return err
	}
	defer s.Close()
	x, err := memory.Make[float32](s, 4)
	if err != nil {
		return err
	}
	defer x.Close()
	return sequence(s, x)
}

// sequence fills x several times, and prints it.
func sequence(s *stream.Stream, x memory.Slice[float32]) error {
	g := rng.New(s.Device(), 42) // torch.Generator("cuda").manual_seed(42)
	show := func(what string, fill func() error) error {
		out := make([]float32, x.Len())
		if err := errors.Join(fill(), x.CopyTo(s, out)); err != nil {
			return err
		}
		_, err := fmt.Printf("%-28s %v\n", what, out)
		return err
	}
	uniform := func() error { return rng.Uniform(g, s, x, 0, 1) } // x.uniform_(generator=g)

	if err := show("first", uniform); err != nil {
		return err
	}
	saved := g.State() // 16 bytes, valid for torch.Generator.set_state
	if err := show("second", uniform); err != nil {
		return err
	}
	if err := g.SetState(saved[:]); err != nil {
		return err
	}
	if err := show("second, from the state", uniform); err != nil {
		return err
	}

	exec, err := graph.Capture([]*stream.Stream{s}, uniform, nil) // draws nothing yet
	if err != nil {
		return err
	}
	defer exec.Close()
	launch := func() error { return exec.Launch(s) }
	if err := show("third, by a graph", launch); err != nil {
		return err
	}
	g.ManualSeed(42)
	return show("first, by the same graph", launch)
}
