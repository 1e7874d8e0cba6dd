package rng

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/stream"
)

// A place is the start of a fill's numbers. If launch points to the place of a
// graph's launch, seed is unused, and offset is relative to that place.
type place struct {
	seed, offset uint64
	launch       kernel.Arg
}

// draw advances the generator and returns its previous place. If s is being
// captured, each launch advances it.
func (g *Generator) draw(s *stream.Stream, increment uint64) (place, error) {
	id, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return place{}, err
	}
	if id == 0 {
		seed, offset := g.take(increment)
		return place{seed, offset, kernel.Address(0)}, nil
	}
	c, err := g.captured(gpu.StreamOf(s), id)
	if err != nil {
		return place{}, fmt.Errorf("capture: %w", err)
	}
	p, err := c.draw(increment)
	if err != nil {
		return place{}, fmt.Errorf("capture: %w", err)
	}
	return p, nil
}

// captured holds the draws of one capture from one generator. It owns the device
// memory with the place of the current launch, which the graph's kernels read.
type captured struct {
	gen    *Generator
	id     uint64
	serial uint64 // unique

	mu      sync.Mutex // guards the fields below; held from Prepare to Launched
	now     position   // current position in the captured function; final position after it
	at      uint64     // address of seed and offset of the launch, or 0 if no fill needs them
	places  *places    // allocator of at
	holders int
	host    [2]uint64
	last    *stream.Stream // stream of the previous launch, or of the allocation of at
}

// captured returns the draws of the capture of s from g, and creates them at the
// first call. If the capture is invalid, it returns an error and an object that
// no graph uses.
func (g *Generator) captured(s *gpu.Stream, id uint64) (*captured, error) {
	g.mu.Lock()
	c := g.captures[id]
	g.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c = &captured{gen: g, id: id, serial: serials.Add(1)}
	g.mu.Lock()
	if other := g.captures[id]; other != nil { // created by another goroutine
		g.mu.Unlock()
		return other, nil
	}
	if g.captures == nil {
		g.captures = map[uint64]*captured{}
	}
	g.captures[id] = c
	g.mu.Unlock()
	err := s.Captured(c)
	if err != nil { // no graph owns it
		c.drop()
	}
	return c, err
}

var serials atomic.Uint64

// Hold adds a reference of a graph.
func (c *captured) Hold(gpu.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holders++
}

// LetGo releases a reference of a graph.
func (c *captured) LetGo(gpu.Holder) {
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

// drop removes c from its generator.
func (c *captured) drop() {
	c.gen.mu.Lock()
	defer c.gen.mu.Unlock()
	delete(c.gen.captures, c.id)
}

// Prepare draws the numbers of a launch on s, and enqueues a copy of their place
// before the launch.
func (c *captured) Prepare(x gpu.HasStream) error {
	s := x.(*stream.Stream)
	if !gpu.StreamOf(s).Retain() { // until the next launch has waited for it
		return gpu.CheckStream("rng", s, nil)
	}
	c.mu.Lock()
	if err := c.write(s); err != nil {
		c.mu.Unlock()
		return fmt.Errorf("rng: %w", errors.Join(err, gpu.StreamOf(s).Release()))
	}
	return nil
}

// Launched completes the launch that Prepare started.
func (c *captured) Launched(s gpu.HasStream) {
	c.forget()
	c.last = s.(*stream.Stream)
	c.mu.Unlock()
}

// forget releases the stream of the last launch.
func (c *captured) forget() {
	if c.last != nil {
		_ = gpu.StreamOf(c.last).Release() // its own user gets its errors
	}
	c.last = nil
}

func (c *captured) write(s *stream.Stream) error {
	if c.at == 0 {
		c.gen.launch(c.now)
		return nil
	}
	// The previous launch must have read its place.
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
		if err := gpu.StreamOf(on).Follow(gpu.StreamOf(s)); err != nil {
			return err
		}
	}
	c.host[0], c.host[1] = c.gen.launch(c.now)
	err := gpu.DeviceOf(on.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(cudadrv.DevicePtr(c.at), unsafe.Pointer(&c.host), unsafe.Sizeof(c.host), gpu.StreamOf(on).Raw())
	})
	if on != s {
		err = errors.Join(err, gpu.StreamOf(s).Follow(gpu.StreamOf(on)))
	}
	return err
}

// follow makes s wait for o. It fails if another graph captures o, because the
// wait would become part of that graph.
func follow(s, o *stream.Stream) error {
	if err := gpu.StreamOf(o).RefuseCapture("launch a graph", "a launch uses it too: launch the graph after the capture"); err != nil {
		return err
	}
	return gpu.StreamOf(s).Follow(gpu.StreamOf(o))
}
