package nccl

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
)

// note finds out whether the operation is captured, which holds the communicator.
func (o *operation) note() (err error) {
	if o.captured, err = o.stream.Capturing(); err != nil {
		return err
	}
	return o.stream.Captured(o.comm)
}

// stillCaptured refuses an operation whose capture began or ended.
func (o *operation) stillCaptured() error {
	switch now, err := o.stream.CaptureID(); {
	case err != nil:
		return err
	case now != o.capture:
		return fmt.Errorf("nccl: %s on rank %d of %d: a capture of %s began or ended in the group, after the operation was issued: want the whole group within it, or none: %w",
			o.kind, o.comm.rank, o.comm.size, o.stream, ErrorInvalidUsage)
	}
	return nil
}

// checkCaptures refuses a group of which a part is captured into a graph, or that of one
// rank into two. NCCL would give its communicators up.
func (g *group) checkCaptures() error {
	first := &g.ops[0]
	for i := range g.ops {
		if o := &g.ops[i]; o.captured != first.captured {
			return fmt.Errorf("nccl: %s on rank %d of %d: a graph captures a part of the group, and not all of it: begin the capture on the streams of all its operations, or of none: %w",
				o.kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
		}
	}
	if !first.captured || g.single() {
		return nil
	}
	for i := range g.ops {
		o := &g.ops[i]
		j := slices.IndexFunc(g.ops, func(p operation) bool { return p.comm == o.comm })
		if g.ops[j].capture != o.capture {
			return fmt.Errorf("nccl: %s on rank %d of %d: two graphs capture operations of the rank in one group: want one of both: %w",
				o.kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
		}
	}
	return nil
}

// relaxed makes calls of NCCL with the device's context bound and in the relaxed mode of
// captures. NCCL allocates memory, and opens that of its peers before the first operation
// with them, and asks for events when it ends.
func relaxed(dev *device.Device, call func() error) error {
	return dev.Bound(func() error { return dev.Relaxed(call) })
}
