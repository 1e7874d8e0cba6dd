package rng

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/stream"
)

// A place is where the numbers of a fill begin. If launch points at the place of a
// launch, seed is nothing, and the offset counts from there.
type place struct {
	seed, offset uint64
	launch       kernel.Arg
}

// draw moves the generator on and returns where it was. What s captures moves it
// at each launch.
func (g *Generator) draw(s *stream.Stream, increment uint64) (place, error) {
	id, err := s.CaptureID()
	if err != nil {
		return place{}, err
	}
	if id == 0 {
		seed, offset := g.take(increment)
		return place{seed, offset, kernel.Null()}, nil
	}
	c, err := g.captured(s, id)
	if err != nil {
		return place{}, fmt.Errorf("capture: %w", err)
	}
	p, err := c.draw(increment)
	if err != nil {
		return place{}, fmt.Errorf("capture: %w", err)
	}
	return p, nil
}

// captured is what one capture draws from one generator. It keeps the place of
// the launch that is under way on the device, where the kernels of the graph look
// for it.
type captured struct {
	gen    *Generator
	id     uint64
	serial uint64 // no other one has it

	mu      sync.Mutex // guards what follows; held from Prepare to Launched
	now     position   // in the captured function, and at its end
	at      uint64     // the address of seed and offset of the launch, or 0 if no fill needs them
	places  *places    // that at comes from
	holders int
	host    [2]uint64
	last    *stream.Stream // of the launch before, or of the allocation of at
}

// captured returns what the capture of s draws from g, making it on first use. If the
// capture has been invalidated, it returns something that no graph draws, and the error.
func (g *Generator) captured(s *stream.Stream, id uint64) (*captured, error) {
	g.mu.Lock()
	c := g.captures[id]
	g.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c = &captured{gen: g, id: id, serial: serials.Add(1)}
	g.mu.Lock()
	if other := g.captures[id]; other != nil { // of another goroutine
		g.mu.Unlock()
		return other, nil
	}
	if g.captures == nil {
		g.captures = map[uint64]*captured{}
	}
	g.captures[id] = c
	g.mu.Unlock()
	err := s.Captured(c)
	if err != nil { // the graph does not hold it
		c.drop()
	}
	return c, err
}

var serials atomic.Uint64

// Hold keeps the place for a graph.
func (c *captured) Hold(stream.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holders++
}

// LetGo undoes Hold.
func (c *captured) LetGo(stream.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holders--; c.holders > 0 {
		return
	}
	c.drop()
	if c.at != 0 {
		c.places.free(c.at, c.last)
		c.at = 0
	}
	c.forget()
}

// drop takes it from its generator.
func (c *captured) drop() {
	c.gen.mu.Lock()
	defer c.gen.mu.Unlock()
	delete(c.gen.captures, c.id)
}

// Prepare takes the numbers of a launch on s and enqueues the writing of their
// place before it.
func (c *captured) Prepare(s *stream.Stream) error {
	if !s.Retain() { // until the next launch has waited for it
		return s.Check("rng", nil)
	}
	c.mu.Lock()
	if err := c.write(s); err != nil {
		c.mu.Unlock()
		return fmt.Errorf("rng: %w", errors.Join(err, s.Release()))
	}
	return nil
}

// Launched ends what Prepare began.
func (c *captured) Launched(s *stream.Stream) {
	c.forget()
	c.last = s
	c.mu.Unlock()
}

// forget lets the stream of the last launch go.
func (c *captured) forget() {
	if c.last != nil {
		_ = c.last.Release() // its own user hears of what is wrong with it
	}
	c.last = nil
}

func (c *captured) write(s *stream.Stream) error {
	if c.at == 0 {
		c.gen.launch(c.now)
		return nil
	}
	// The launch before must have read its place.
	if c.last != s {
		if err := follow(s, c.last); err != nil {
			return err
		}
	}
	on := s
	if s.Device() != c.gen.dev { // a copy needs a stream of the device
		var err error
		if on, err = c.places.stream(); err != nil {
			return err
		}
		if err := on.Follow(s); err != nil {
			return err
		}
	}
	c.host[0], c.host[1] = c.gen.launch(c.now)
	err := on.Device().Do("cuMemcpyHtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(cudadrv.DevicePtr(c.at), unsafe.Pointer(&c.host), unsafe.Sizeof(c.host), on.Raw())
	})
	if on != s {
		err = errors.Join(err, s.Follow(on))
	}
	return err
}

// follow lets s wait for o. If another graph captures o by now, the wait would become
// part of that graph.
func follow(s, o *stream.Stream) error {
	if err := o.RefuseCapture("launch a graph", "a launch uses it too: launch the graph after the capture"); err != nil {
		return err
	}
	return s.Follow(o)
}
