package rng

import (
	"errors"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
)

// A position is the position of a generator within a captured function.
type position struct {
	fixed  bool   // every launch uses this seed and offset
	seed   uint64 // if fixed
	offset uint64 // relative to the generator's offset at the launch, unless fixed
}

// mark identifies the state of a position that is not fixed, because offsets are
// multiples of 4. Such a state contains the serial number of the capture instead
// of the seed.
const mark = 3

// move moves to a fixed position: in the graph that the calling goroutine captures, or immediately.
func (g *Generator) move(p position) {
	if c := g.capturing(); c != nil {
		c.move(p)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seed, g.offset = p.seed, p.offset
}

// position returns the position in the graph that the calling goroutine captures,
// if any.
func (g *Generator) position() (position, bool) {
	c := g.capturing()
	if c == nil {
		return position{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now, true
}

// capturing returns the draws from g of the calling goroutine's capture, or nil
// if the goroutine does not capture.
func (g *Generator) capturing() *captured {
	if g.dev == nil {
		return nil
	}
	open := gpu.CaptureOf(gpu.DeviceOf(g.dev).System())
	if open == nil {
		return nil
	}
	c, _ := g.captured(open.Stream, open.ID) // the end of a capture that was invalidated says so
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

// draw advances the position and returns the start of a fill's numbers.
func (c *captured) draw(increment uint64) (place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := place{c.now.seed, c.now.offset, kernel.Address(0)}
	if !c.now.fixed {
		if err := c.locate(); err != nil {
			return place{}, err
		}
		p.launch = kernel.Address(c.at)
	}
	c.now.offset += increment
	return p, nil
}

// locate allocates the memory for seed and offset at the first use. c.mu is held.
func (c *captured) locate() error {
	if c.at != 0 {
		return nil
	}
	p := placesOf(c.gen.dev)
	s, err := p.stream()
	if err != nil {
		return err
	}
	if !gpu.StreamOf(s).Retain() {
		return gpu.CheckStream("rng", s, nil)
	}
	if c.at, err = p.alloc(s); err != nil {
		return errors.Join(err, gpu.StreamOf(s).Release())
	}
	c.places, c.last = p, s
	return nil
}

// launch moves the generator to its position after a launch of the graph, and
// returns the previous position.
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
