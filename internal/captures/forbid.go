package captures

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/goroutine"
)

// Forbids returns the capture that forbids the calling goroutine calls that CUDA cannot
// see to be harmless, such as to ask for a stream, and whether another goroutine captures.
// It returns nil if there is none.
func Forbids() (c *Capture, others bool) {
	me := goroutine.ID()
	c = Find(func(c *Capture) bool { return c.Mode != cudadrv.CaptureRelaxed && c.goroutine == me })
	if c != nil {
		return c, false
	}
	c = Find(func(c *Capture) bool { return c.Mode == cudadrv.CaptureGlobal })
	return c, c != nil
}
