package nccl

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A room bounds the launches of a communicator that are in flight. An operation, or a group of operations, is one launch.
//
// NCCL's kernels notice an abort one after the other, each after about 4 ms. Without a bound the host may be a thousand
// launches ahead, and a group then needs seconds to end. Processes that share a GPU take turns on it, so that each launch takes
// tens of milliseconds.
//
// An operation may legitimately wait for something that the issuing goroutine does later, such as the receive of another
// process or a host callback. A wait must therefore end by itself: if no operation ends for some time, the launches go on
// without a bound until one does.
type room struct {
	part    int64         // launches from one check to the next; 0 means no bound
	timeout time.Duration // 0: processes share GPUs, and a wait has no limit

	launches atomic.Int64

	mu      sync.Mutex
	next    int               // the oldest of issued
	issued  [roomParts]uint64 // operations that had been issued at the last checks
	lifted  bool              // there is no bound while the number of operations that have ended is stalled
	stalled uint64
}

const (
	roomParts     = 4           // a launch waits for the launches before those of so many parts
	roomOfSharers = 64          // launches in flight if processes share GPUs
	roomTimeout   = time.Second // longer than the time between two operations that end, if nothing is wrong
)

// setRoom sets the bound. It has no effect on a process that has all ranks.
func (c *Communicator) setRoom() error {
	if ncclapi.SharesGPUs() {
		c.room.part = roomOfSharers / roomParts
		return nil
	}
	most, err := env.NCCLInFlight.IntWhere(fmt.Sprintf("a whole number from %d to %d, or 0 for no bound", roomParts, math.MaxInt32), func(n int) bool {
		return n == 0 || n >= roomParts && n <= math.MaxInt32
	})
	if err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	c.room.part, c.room.timeout = int64(most/roomParts), roomTimeout
	return nil
}

// awaitRoom waits while many launches of the communicator are in flight, as a launch on a full stream does. The wait ends
// if the communicator fails or is closed, and the caller then refuses the operation. Captures do not wait: progress
// cannot be observed during a capture. The communicator is not entered, so that it can be aborted.
func (c *Communicator) awaitRoom(captured bool) {
	if c.room.part == 0 || captured || c.room.launches.Add(1)%c.room.part != 0 {
		return
	}
	// If processes share GPUs, a wait has no limit, so a rank does not wait if the same goroutine may issue the operations of
	// others next.
	if others := c.countOthers(); others+1 == c.size || others > 0 && c.room.timeout == 0 {
		return
	}
	r := &c.room
	r.mu.Lock()
	defer r.mu.Unlock()
	issued, ended := c.rec.Progress()
	c.marks.SetRequested(0) // the next operation gets marks, which tell when the launches before it have ended
	before := r.issued[r.next]
	r.issued[r.next] = issued
	r.next = (r.next + 1) % roomParts
	if ended >= before || r.lifted && ended == r.stalled {
		return
	}
	r.lifted = false
	moved := time.Now()
	_ = gpu.DeviceOf(c.dev).Until(context.Background(), "nccl: room for an operation", func() (bool, error) {
		if !c.alive() {
			return true, nil
		}
		_, blind, err := c.watch.Observe() // an error of the device occurs again in the operation
		_, now := c.rec.Progress()
		switch {
		case blind || now >= before:
			return true, err
		case now > ended:
			ended, moved = now, time.Now()
		case r.timeout > 0 && time.Since(moved) >= r.timeout:
			r.lifted, r.stalled = true, now
			return true, err
		}
		return false, err
	})
}
