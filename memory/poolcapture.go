package memory

import (
	"fmt"

	"github.com/gochorus/chorus/internal/gpu"
)

// A capturePool is a Pool with the methods that captures use (mem.CapturePool).
type capturePool Pool

// Begin lets the capture of a graph allocate from the pool until End.
func (c *capturePool) Begin(graph string) error {
	const op = "memory: allocate from a pool"
	p := (*Pool)(c)
	if err := p.check(op); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy != "" {
		return fmt.Errorf("%s: the capture of %s is using it: captures that share a pool come one after another", op, p.busy)
	}
	p.busy = graph
	for key, x := range p.parts {
		if key.captured {
			x.Begin()
		}
	}
	return nil
}

// End undoes Begin.
func (c *capturePool) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy = ""
	for key, x := range c.parts {
		if key.captured {
			x.Rejoin()
		}
	}
}

// Hold keeps the memory for a graph.
func (c *capturePool) Hold(gpu.Holder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refs++
}

// LetGo undoes Hold. An error of the device was reported before.
func (c *capturePool) LetGo(gpu.Holder) { _ = (*Pool)(c).release() }
