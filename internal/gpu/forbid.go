package gpu

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/goroutine"
)

// forbids returns the capture that forbids the calling goroutine calls that CUDA considers
// unsafe in a capture, such as querying a stream, and whether another goroutine captures.
// It returns nil if there is none.
func forbids() (c *Capture, others bool) {
	me := goroutine.ID()
	c = find(func(c *Capture) bool { return c.mode != cudadrv.CaptureRelaxed && c.goroutine == me })
	if c != nil {
		return c, false
	}
	c = find(func(c *Capture) bool { return c.mode == cudadrv.CaptureGlobal })
	return c, c != nil
}
