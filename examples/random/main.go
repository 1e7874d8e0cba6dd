// Random draws the same numbers again and again: from a seed, from a state that
// was saved, and from a graph. PyTorch draws them too, from the same seed.
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
	if err := draw(); err != nil {
		log.Fatal("random: ", err)
	}
}

func draw() error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print("random: ", note)
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
	saved := g.State() // 16 bytes, which torch.Generator.set_state takes
	if err := show("second", uniform); err != nil {
		return err
	}
	if err := g.SetState(saved[:]); err != nil {
		return err
	}
	if err := show("second, from the state", uniform); err != nil {
		return err
	}

	exec, err := graph.Capture([]*stream.Stream{s}, uniform) // draws nothing yet
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
