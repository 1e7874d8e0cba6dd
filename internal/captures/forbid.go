package captures

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/goroutine"
)

// Forbids returns the capture that forbids the calling goroutine calls that CUDA cannot
// see to be harmless, and whom it forbids them, or nil.
func Forbids() (c *Capture, whom string) {
	me := goroutine.ID()
	c = Find(func(c *Capture) bool {
		return c.Mode == cudadrv.CaptureGlobal || c.Mode == cudadrv.CaptureThreadLocal && c.goroutine == me
	})
	switch {
	case c == nil:
		return nil, ""
	case c.goroutine == me:
		return c, fmt.Sprintf("the goroutine that captures it in the mode %s", c.Mode)
	}
	return c, fmt.Sprintf("any goroutine while it is captured in the mode %s", c.Mode)
}
