package rng

import (
	"errors"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/stream"
)

// A position is where a generator is within a captured function.
type position struct {
	fixed  bool   // every launch has this seed and offset
	seed   uint64 // if it is fixed
	offset uint64 // counts from the generator's at the launch, unless it is fixed
}

// mark tells the state of a position that is not fixed from others: offsets are multiples
// of 4. Such a state has the capture's serial number in place of the seed.
const mark = 3

// move goes to a fixed position: in the graph that the calling goroutine captures, or now.
func (g *Generator) move(p position) {
	if c := g.capturing(); c != nil {
		c.move(p)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seed, g.offset = p.seed, p.offset
}

// position returns where the generator is in the graph that the calling goroutine
// captures, if it captures one.
func (g *Generator) position() (position, bool) {
	c := g.capturing()
	if c == nil {
		return position{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now, true
}

// capturing returns what the capture of the calling goroutine draws from g, or nil if the
// goroutine captures nothing.
func (g *Generator) capturing() *captured {
	if g.dev == nil {
		return nil
	}
	s, id := stream.Capturer(g.dev.System())
	if s == nil {
		return nil
	}
	c, _ := g.captured(s, id) // the end of a capture that was invalidated says so
	return c
}

func (c *captured) move(p position) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = p
}

func (c *captured) state() [StateSize]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now.fixed {
		return encode(c.now.seed, c.now.offset)
	}
	return encode(c.serial, c.now.offset|mark)
}

// draw moves on and returns where the numbers of a fill begin.
func (c *captured) draw(increment uint64) (place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := place{c.now.seed, c.now.offset, kernel.Null()}
	if !c.now.fixed {
		if err := c.locate(); err != nil {
			return place{}, err
		}
		p.launch = kernel.Address(c.at)
	}
	c.now.offset += increment
	return p, nil
}

// locate allocates the memory for seed and offset on first use. c.mu is held.
func (c *captured) locate() error {
	if c.at != 0 {
		return nil
	}
	p := placesOf(c.gen.dev)
	s, err := p.stream()
	if err != nil {
		return err
	}
	if !s.Retain() {
		return s.Check("rng", nil)
	}
	if c.at, err = p.alloc(s); err != nil {
		return errors.Join(err, s.Release())
	}
	c.places, c.last = p, s
	return nil
}

// launch moves the generator to where a launch of the graph leaves it, and returns where it
// was.
func (g *Generator) launch(end position) (seed, offset uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	seed, offset = g.seed, g.offset
	if end.fixed {
		g.seed, g.offset = end.seed, end.offset
	} else {
		g.offset += end.offset
	}
	return seed, offset
}
