package nccl

import (
	"fmt"
	"runtime"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// Group makes one of all operations that fn enqueues (ncclGroupStart,
// ncclGroupEnd): they start together, so that several ranks in one process, or
// sends and receives, cannot wait for each other. c is any of the communicators
// that take part.
//
// NCCL keeps the group on the OS thread: Group locks the goroutine to its
// thread, and what fn starts on other goroutines is not part of the group. If
// fn returns an error or panics, nothing of the group is enqueued. Groups nest;
// the outermost one enqueues.
func Group(c *Communicator, fn func() error) (err error) {
	if c == nil || c.owner.Closed() {
		return c.closed("ncclGroupStart")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := c.fail("ncclGroupStart", c.api.GroupStart()); err != nil {
		return err
	}
	ok := false
	defer func() {
		if !ok {
			c.discard()
		}
	}()
	if err := fn(); err != nil {
		return err
	}
	ok = true
	return c.fail("ncclGroupEnd", c.api.GroupEnd())
}

// discard ends a group so that nothing of it is enqueued: a call that NCCL
// refuses makes it drop the rest.
func (c *Communicator) discard() {
	c.api.AllReduce(0, 0, 1, ncclapi.Float32, ncclapi.Sum, 0, 0)
	c.api.GroupEnd()
}

func (c *Communicator) closed(op string) error {
	if c == nil {
		return fmt.Errorf("nccl: %s: no communicator given", op)
	}
	return fmt.Errorf("nccl: %s on rank %d of %d (%s): %w", op, c.rank, c.size, c.dev, device.ErrClosed)
}
