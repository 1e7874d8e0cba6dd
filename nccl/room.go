package nccl

import (
	"context"

	"github.com/gochorus/chorus/internal/gpu"
)

// mostInFlight is about the maximum number of operations in flight of a communicator whose
// processes share GPUs. After a failure each kernel of NCCL notices the abort by itself, and
// processes take turns on a GPU, so an abort takes tens of milliseconds for each operation.
const mostInFlight = 64

// awaitRoom waits while many operations of the communicator are in flight, as a launch on a
// full stream does. The wait ends if the communicator fails or is closed, and the caller then
// refuses the operation. A rank that has others in its process does not wait, because
// the same goroutine may issue their operations next. Captures do not wait: progress cannot
// be observed during a capture. The communicator is not entered, so that it can be aborted.
func (c *Communicator) awaitRoom(captured bool) {
	if captured || c.rec.InFlight() < mostInFlight || len(c.others()) > 0 {
		return
	}
	_ = gpu.DeviceOf(c.dev).Until(context.Background(), "nccl: room for an operation", func() (bool, error) {
		if !c.alive() {
			return true, nil
		}
		_, blind, err := c.watch.Observe() // an error of the device occurs again in the operation
		return blind || c.rec.InFlight() < mostInFlight, err
	})
}

// awaitRoom is Communicator.awaitRoom for all operations of the group.
func (g *group) awaitRoom() {
	for i := range g.ops {
		g.ops[i].comm.awaitRoom(g.ops[i].Captured)
	}
}
